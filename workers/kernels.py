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
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ModelConfig
from workers.weights import FLOATS, OnProgress, Weight, aligned_zeros

SOURCE = Path(__file__).with_name("kernels.c")
VECTOR = 16  # elements; what the kernels' loops step by
OUTPUTS = 4  # of a matrix product at a time
Call = tuple[Callable[..., None], tuple[ctypes.c_uint64, ...]]  # a loaded kernel and its arguments
Argument = np.ndarray | Weight | ctypes.c_uint64  # memory, or what is set before each call


def obstacle(config: ModelConfig) -> str | None:
    """Why the kernels cannot run this model on tinygrad's default device; None when they can."""
    if Device.DEFAULT != "CPU":
        return f"the device is {Device.DEFAULT}"
    if not isinstance(Device["CPU"].renderer, ClangRenderer):
        return f"the CPU's renderer is {type(Device['CPU'].renderer).__name__}"
    if config.architecture != "llama":
        return f"the architecture is {config.architecture}"
    sizes = {"hidden": config.dim, "feed-forward": config.ffn_dim, "head": config.head_dim}
    for name, size in sizes.items():
        if size % VECTOR:
            return f"{name} width {size} is not a multiple of {VECTOR}"
    return f"a vocabulary of {config.vocab_size}" if config.vocab_size < OUTPUTS else None


class CpuKernels:
    """The blocks of a span, the embedding and the read-out, whichever of them `weights` brings. See `model.Backend`."""

    name = "c"

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        blocks: range,
        rope: np.ndarray,
        n_slots: int,
        max_rows: int,
    ):
        """rope: float32 (context, Hd), the cosines of each position's angles, then the sines."""
        self._config, self._block_ids, self._rope = config, blocks, rope
        self._weights = dict(weights)
        cache = (n_slots, len(rope), config.n_kv_heads, config.head_dim)
        self._cache = {i: (_zeros(cache), _zeros(cache)) for i in blocks}  # keys, values
        self._scratch = _zeros((_scratch_floats(config, len(rope), max_rows),))
        self._x, self._slots, self._positions, self._logits, self._rows = (ctypes.c_uint64() for _ in range(5))
        self._blocks: list[Call] | None = None
        self._readout: Call | None = None

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self._weights[EMBEDDING].data[ids].astype(np.float32)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if self._blocks is None:
            self._blocks = [self._block_call(i) for i in self._block_ids]
        out = np.array(x, np.float32, order="C")  # the kernels work in place
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int32)
        self._x.value, self._slots.value, self._positions.value = map(_address, (out, slots, positions))
        self._rows.value = len(out)
        for kernel, arguments in self._blocks:
            kernel(*arguments)
        return out

    def logits(self, x: np.ndarray) -> np.ndarray:
        if self._readout is None:
            self._readout = self._readout_call()
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self._config.vocab_size), np.float32)
        self._x.value, self._logits.value, self._rows.value = _address(x), _address(out), len(x)
        kernel, arguments = self._readout
        kernel(*arguments)
        return out

    def warm(self, on_progress: OnProgress) -> None:
        on_progress("compile", 0, 2)
        x, zero = np.zeros((1, self._config.dim), np.float32), np.zeros(1, np.int32)
        self.forward(x, zero, zero)
        on_progress("compile", 1, 2)
        if OUTPUT_NORM in self._weights:
            self.logits(x)
        on_progress("compile", 2, 2)

    def _block_call(self, i: int) -> Call:
        """Block `i` with its arguments, in the order of `block` in kernels.c."""
        c = self._config

        def weight(name: str) -> Weight:
            return self._weights[f"blk.{i}.{name}.weight"]

        q, k, v, o = (weight(f"attn_{name}") for name in ("q", "k", "v", "output"))
        gate, up, down = (weight(f"ffn_{name}") for name in ("gate", "up", "down"))
        sizes = {"HEADS": c.n_heads, "KV_HEADS": c.n_kv_heads, "HEAD_DIM": c.head_dim, "FFN": c.ffn_dim}
        types = {"Q_T": q, "K_T": k, "V_T": v, "O_T": o, "GATE_T": gate, "UP_T": up, "DOWN_T": down}
        kernel = _compile("block", c, sizes, types)
        return kernel, _arguments(
            self._x, self._scratch, self._slots, self._positions, self._rope, *self._cache[i],
            weight("attn_norm"), q, k, v, o, weight("ffn_norm"), gate, up, down,
            self._rows, ctypes.c_uint64(len(self._rope)),
        )  # fmt: skip

    def _readout_call(self) -> Call:
        """The read-out with its arguments, in the order of `readout` in kernels.c."""
        output = self._weights[EMBEDDING if self._config.tied else OUTPUT]
        kernel = _compile("readout", self._config, {"VOCAB": self._config.vocab_size}, {"OUT_T": output})
        norm = self._weights[OUTPUT_NORM]
        return kernel, _arguments(self._logits, self._scratch, self._x, norm, output, self._rows)


def _compile(entry: str, c: ModelConfig, sizes: Mapping[str, int], types: Mapping[str, Weight]) -> Callable[..., None]:
    """The function `entry` of kernels.c for these numbers and element types.

    Raises ConfigError if the compiler refuses it.
    """
    defines = {f"ENTRY_{entry.upper()}": 1, "DIM": c.dim, "EPS": f"{c.norm_eps!r}f", **sizes}
    defines |= {name: weight.dtype.lower() for name, weight in types.items()}
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


def _arguments(*arguments: Argument) -> tuple[ctypes.c_uint64, ...]:
    return tuple(a if isinstance(a, ctypes.c_uint64) else ctypes.c_uint64(_address(a)) for a in arguments)


def _address(memory: np.ndarray | Weight) -> int:
    return (memory.data if isinstance(memory, Weight) else memory).ctypes.data


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return aligned_zeros(shape, FLOATS["F32"])


def _scratch_floats(c: ModelConfig, context: int, rows: int) -> int:
    """What `block` in kernels.c cuts up: per row the normed x, an output, q, k, v, attention, gate and up; then scores.

    `readout` needs less: the normed x.
    """
    per_row = 2 * c.dim + 2 * (c.n_heads + c.n_kv_heads) * c.head_dim + 2 * c.ffn_dim
    return rows * per_row + c.n_heads * (-(-context // VECTOR) * VECTOR)
