"""The CPU's fast path: the C kernels of `kernels.c`, compiled and loaded by tinygrad, called on memory of numpy's.

One call is one block, or the read-out, for any number of rows. It costs about 1 us, against 20 to 60 us for the same
program in a TinyJit (which looks up each of its 16 buffers), and no Tensor is made in a step.

Of tinygrad's internals this uses the CPU device's `compiler.compile_cached` (the disk cache), `renderer.target` and
`runtime`, `TinyELF`, and the loaded program's `fxn`, which releases the interpreter's lock while the kernel runs.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np
from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.renderer.cstyle import ClangRenderer

from pptasks.errors import ConfigError
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, OUTPUT_NORM_BIAS, POSITIONS, ModelConfig, OnProgress
from workers.trace import Trace
from workers.weights import FLOATS, Weight, aligned_zeros

SOURCE = Path(__file__).with_name("kernels.c")
VECTOR = 16  # elements; what the kernels' loops step by
OUTPUTS = 4  # of a matrix product at a time
BLOCK_TENSORS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip  # as in `Weights` of kernels.c: each a weight and a bias
TYPE_NAMES = {
    "Q_T": "attn_q", "K_T": "attn_k", "V_T": "attn_v", "O_T": "attn_output",
    "GATE_T": "ffn_gate", "UP_T": "ffn_up", "DOWN_T": "ffn_down",
}  # fmt: skip
Kernel = Callable[..., None]
Call = tuple[Kernel, tuple[ctypes.c_uint64, ...]]  # a loaded kernel and its arguments


def obstacle(config: ModelConfig) -> str | None:
    """Why the kernels cannot run this model on tinygrad's default device; None when they can."""
    if Device.DEFAULT != "CPU":
        return f"the device is {Device.DEFAULT}"
    if not isinstance(Device["CPU"].renderer, ClangRenderer):
        return f"the CPU's renderer is {type(Device['CPU'].renderer).__name__}"
    if config.norm not in ("rms", "layer"):
        return f"the norm is {config.norm}"
    return f"the feed-forward layer is {config.ffn}" if config.ffn not in ("swiglu", "gelu") else None


class CpuKernels:
    """The blocks of a span, the embedding and the read-out, whichever of them `weights` brings. See `model.Backend`."""

    name = "c"

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        blocks: range,
        rope: np.ndarray | None,
        context: int,
        n_slots: int,
        max_rows: int,
        traced: range,
    ):
        """rope: float32 (context, Hd), the cosines of each position's angles, then the sines; None where positions are
        learned. `traced` is for the other backend: here any block can be traced.
        """
        self._config, self._block_ids, self._rope, self._context = config, blocks, rope, context
        self._weights = dict(weights)
        cache = (n_slots, context, config.n_kv_heads, config.head_dim)
        self._cache = {i: (_zeros(cache), _zeros(cache)) for i in blocks}  # keys, values
        self._scratch = _zeros((_scratch_floats(config, context, max_rows),))
        self._x, self._slots, self._positions, self._logits, self._rows = (ctypes.c_uint64() for _ in range(5))
        self._tensors: dict[int, np.ndarray] = {}  # of each block, what the kernel's `Weights` points to
        self.trace: Trace | None = None  # of the last `forward` that was asked for one

    def embed(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        x = self._weights[EMBEDDING].rows(ids)
        return x + self._weights[POSITIONS].rows(positions) if POSITIONS in self._weights else x

    def forward(
        self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray, *, trace: int | None = None
    ) -> np.ndarray:
        return self._run(self._blocks, x, slots, positions, trace)

    def run_block(
        self, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray, *, window: int | None = None
    ) -> np.ndarray:
        """`window`: another than the model's."""
        kernel, arguments = self._blocks[i]
        if window is not None:
            arguments = (*arguments[:-1], ctypes.c_uint64(window))
        return self._run({i: (kernel, arguments)}, x, slots, positions, None)

    def cached(self, i: int, slot: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = (cache[slot, first : last + 1].reshape(last + 1 - first, -1) for cache in self._cache[i])
        return keys, values

    def block_kinds(self) -> list[int]:
        """One block for each kernel of the span, and for each way through it: with a window or none, which biases."""
        kinds: dict[tuple[int, bool, bytes], int] = {}
        for i, (kernel, _) in self._blocks.items():
            present = (self._tensors[i] != 0).tobytes()
            kinds.setdefault((id(kernel), self._config.windows[i] > 0, present), i)  # `_load` keeps the kernels
        return list(kinds.values())

    def logits(self, x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self._config.vocab_size), np.float32)
        self._x.value, self._logits.value, self._rows.value = _address(x), _address(out), len(x)
        kernel, arguments = self._readout
        kernel(*arguments)
        return out

    def copy(self, source: int, slot: int, n: int) -> None:
        for cache in (part for pair in self._cache.values() for part in pair):
            cache[slot, :n] = cache[source, :n]

    def warm(self, on_progress: OnProgress) -> int:
        on_progress("compile", 0, 2)
        x, zero = np.zeros((1, self._config.dim), np.float32), np.zeros(1, np.int32)
        self.forward(x, zero, zero)
        on_progress("compile", 1, 2)
        if OUTPUT_NORM in self._weights:
            self.logits(x)
        on_progress("compile", 2, 2)
        return len({id(kernel) for kernel, _ in self._blocks.values()}) + (OUTPUT_NORM in self._weights)

    def _run(
        self, calls: Mapping[int, Call], x: np.ndarray, slots: np.ndarray, positions: np.ndarray, trace: int | None
    ) -> np.ndarray:
        out = np.array(x, np.float32, order="C")  # the kernels work in place
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int32)
        self._x.value, self._slots.value, self._positions.value = map(_address, (out, slots, positions))
        self._rows.value = len(out)
        for i, (kernel, arguments) in calls.items():
            before = out.copy() if i == trace else None
            kernel(*arguments)
            if before is not None:
                self.trace = self._trace_of(i, before, out)
        return out

    def _trace_of(self, i: int, x: np.ndarray, y: np.ndarray) -> Trace:
        """What the call of block `i` that has just ended left in the scratch."""
        parts, at = {}, 0
        for name, width in _scratch_widths(self._config).items():
            parts[name] = self._scratch[at : at + len(x) * width].reshape(len(x), width).copy()
            at += len(x) * width
        return Trace(i, x=x, y=y.copy(), **{name: parts[name] for name in "qkvoha"})

    @functools.cached_property
    def _blocks(self) -> dict[int, Call]:
        return {i: self._block_call(i) for i in self._block_ids}

    def _block_call(self, i: int) -> Call:
        """Block `i` with its arguments, in the order of `block` in kernels.c."""
        c = self._config
        optional = {"attn_q_norm", "attn_k_norm"} | ({"ffn_gate"} if c.ffn == "gelu" else set())
        tensors = {name: self._weights.get(f"blk.{i}.{name}.weight") for name in BLOCK_TENSORS}
        missing = [name for name, weight in tensors.items() if weight is None and name not in optional]
        if missing:
            raise KeyError(f"block {i} lacks {', '.join(missing)}")  # the kernel would read through NULL
        biases = (self._weights.get(f"blk.{i}.{name}.bias") for name in BLOCK_TENSORS)
        pairs = list(zip(tensors.values(), biases, strict=True))
        self._tensors[i] = np.array([[_address(w), _address(b)] for w, b in pairs], np.uint64)
        kernel = _compile("block", c, {macro: tensors[name] for macro, name in TYPE_NAMES.items()})
        return kernel, _arguments(
            self._x, self._scratch, self._slots, self._positions, self._rope, *self._cache[i], self._tensors[i],
            self._rows, ctypes.c_uint64(self._context), ctypes.c_uint64(c.windows[i]),
        )  # fmt: skip

    @functools.cached_property
    def _readout(self) -> Call:
        """The read-out with its arguments, in the order of `readout` in kernels.c."""
        output = self._weights[EMBEDDING if self._config.tied else OUTPUT]
        norm, bias = self._weights[OUTPUT_NORM], self._weights.get(OUTPUT_NORM_BIAS)
        kernel = _compile("readout", self._config, {"OUT_T": output})
        return kernel, _arguments(self._logits, self._scratch, self._x, norm, bias, output, self._rows)


def _compile(entry: str, c: ModelConfig, types: Mapping[str, Weight | None]) -> Kernel:
    """The function `entry` of kernels.c for this model's numbers and these types of weights.

    Raises ConfigError if the compiler refuses it.
    """
    defines = {
        f"ENTRY_{entry.upper()}": 1, "DIM": c.dim, "HEADS": c.n_heads, "KV_HEADS": c.n_kv_heads,
        "HEAD_DIM": c.head_dim, "FFN": c.ffn_dim, "VOCAB": c.vocab_size, "EPS": f"{c.norm_eps!r}f",
        "LAYER_NORM": int(c.norm == "layer"), "GELU": int(c.ffn == "gelu"),
    }  # fmt: skip
    defines |= {name: weight.dtype.lower() if weight else "f32" for name, weight in types.items()}
    source = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + SOURCE.read_text()
    return _load(entry, source).fxn


@functools.cache  # the blocks of a model have a source or two between them; and the code is unmapped with its program
def _load(entry: str, source: str) -> Any:
    device = Device["CPU"]
    try:
        binary = device.compiler.compile_cached(source)
    except (CalledProcessError, OSError) as e:
        raise ConfigError(f"the CPU kernels do not compile ({e}): install clang, or set PP_KERNELS=tinygrad") from e
    return device.runtime(TinyELF(binary, entry, device.renderer.target, signature=()))


def _arguments(*arguments: np.ndarray | Weight | ctypes.c_uint64 | None) -> tuple[ctypes.c_uint64, ...]:
    """Addresses of memory; what is set before each call, as it is."""
    return tuple(a if isinstance(a, ctypes.c_uint64) else ctypes.c_uint64(_address(a)) for a in arguments)


def _address(memory: np.ndarray | Weight | None) -> int:
    """NULL for None."""
    if memory is None:
        return 0
    return (memory.data if isinstance(memory, Weight) else memory).ctypes.data


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return aligned_zeros(shape, FLOATS["F32"])


def _scratch_widths(c: ModelConfig) -> dict[str, int]:
    """What `block` in kernels.c keeps of each row, in its order, by the names of `Trace`."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    return {"h": c.dim, "sum": c.dim, "q": q, "k": kv, "v": kv, "o": q, "a": c.ffn_dim, "up": c.ffn_dim}


def _scratch_floats(c: ModelConfig, context: int, rows: int) -> int:
    """Those of all rows, then the scores, then a few rows of a quantised weight. `readout` needs less."""
    scores = c.n_heads * (-(-context // VECTOR) * VECTOR)
    widened = OUTPUTS * max(c.dim, c.n_heads * c.head_dim, c.ffn_dim)
    return rows * sum(_scratch_widths(c).values()) + scores + widened
