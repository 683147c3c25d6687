"""The CPU's fast path: the C kernels of `kernels.c`, compiled and loaded by tinygrad's CPU device, called on memory that numpy owns.

One call is one block, or the read-out, for any number of rows; a call costs about 1 us, against 20 us for a kernel in a TinyJit, and no
Tensor is made in a step. The plain tinygrad path in `model.py` computes the same and is what each kernel is checked against.

Of tinygrad's internals this uses the CPU device's `compiler.compile_cached` (the disk cache), `renderer.target`, `runtime`, `TinyELF`, and
the loaded program's `fxn`: the reasons why tinygrad is pinned.
"""

import ctypes
import logging
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
from workers.weights import OnProgress, Weight, aligned_zeros

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
VECTOR = 16  # elements; what the kernels' loops step by
OUTPUTS = 4  # of a matrix product at a time
F32 = np.dtype(np.float32)
Call = tuple[Callable[..., None], tuple[ctypes.c_uint64, ...]]  # a loaded kernel and its arguments


def obstacle(config: ModelConfig) -> str | None:
    """Why the kernels cannot run this model on tinygrad's default device; None when they can."""
    if Device.DEFAULT.split(":")[0] != "CPU":
        return f"the device is {Device.DEFAULT}"
    if not isinstance(Device["CPU"].renderer, ClangRenderer):
        return f"the CPU's renderer is {type(Device['CPU'].renderer).__name__}"
    if config.architecture != "llama":
        return f"the architecture is {config.architecture}"
    sizes = {"hidden": config.dim, "feed-forward": config.ffn_dim, "head": config.head_dim}
    uneven = [f"{name} width {size}" for name, size in sizes.items() if size % VECTOR]
    if uneven:
        return f"{', '.join(uneven)}: not a multiple of {VECTOR}"
    return f"a vocabulary of {config.vocab_size}" if config.vocab_size < OUTPUTS else None


class CpuKernels:
    """The blocks of a span, the embedding and the read-out, whichever of them `weights` brings. See `model.Backend`."""

    name = "c"

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], blocks: range, rope: np.ndarray, n_slots: int, max_rows: int
    ):
        """rope: float32 (context, Hd), the cosines of each position's angles, then the sines."""
        self._config, self._block_ids, self._rope, self._max_rows = config, blocks, rope, max_rows
        self._weights = dict(weights)
        cache = (n_slots, len(rope), config.n_kv_heads, config.head_dim)
        self._cache = {i: (aligned_zeros(cache, F32), aligned_zeros(cache, F32)) for i in blocks}  # keys, values
        self._scratch = aligned_zeros((_scratch_floats(config, len(rope), max_rows),), F32)
        self._x, self._slots, self._positions, self._rows, self._logits = (ctypes.c_uint64() for _ in range(5))
        self._blocks: list[Call] | None = None
        self._readout: Call | None = None

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """int32 (R,) -> float32 (R, D)"""
        table = self._weights[EMBEDDING]
        rows = table.data[ids]
        return (rows.astype(np.uint32) << 16).view(np.float32) if table.dtype == "BF16" else rows.astype(np.float32)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D)"""
        if self._blocks is None:
            self._blocks = [self._block_call(i) for i in self._block_ids]
        out = np.array(x, np.float32, order="C")  # the kernels work in place
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int32)
        self._x.value, self._slots.value, self._positions.value = out.ctypes.data, slots.ctypes.data, positions.ctypes.data
        self._rows.value = len(out)
        for kernel, args in self._blocks:
            kernel(*args)
        return out

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (n, D) -> float32 (n, V)"""
        if self._readout is None:
            self._readout = self._readout_call()
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self._config.vocab_size), np.float32)
        self._x.value, self._logits.value, self._rows.value = x.ctypes.data, out.ctypes.data, len(x)
        kernel, args = self._readout
        kernel(*args)
        return out

    def warm(self, on_progress: OnProgress) -> None:
        """Compile, and run each kernel on one row; it writes position 0 of slot 0."""
        on_progress("compile", 0, 2)
        x, zero = np.zeros((1, self._config.dim), np.float32), np.zeros(1, np.int32)
        self.forward(x, zero, zero)
        on_progress("compile", 1, 2)
        if OUTPUT_NORM in self._weights:
            self.logits(x)
        on_progress("compile", 2, 2)

    def _block_call(self, i: int) -> Call:
        c = self._config

        def weight(name: str) -> Weight:
            return self._weights[f"blk.{i}.{name}.weight"]

        attention = [weight(n) for n in ("attn_q", "attn_k", "attn_v", "attn_output")]
        ffn = [weight(n) for n in ("ffn_gate", "ffn_up", "ffn_down")]
        types = zip(("Q_T", "K_T", "V_T", "O_T", "GATE_T", "UP_T", "DOWN_T"), (w.dtype for w in attention + ffn), strict=True)
        sizes = {"HEADS": c.n_heads, "KV_HEADS": c.n_kv_heads, "HEAD_DIM": c.head_dim, "FFN": c.ffn_dim}
        kernel = _compile("block", c, sizes, dict(types))
        arrays = (
            self._scratch, self._slots, self._positions, self._rope, *self._cache[i],
            weight("attn_norm"), *attention, weight("ffn_norm"), *ffn,
        )  # fmt: skip
        return kernel, (self._x, *map(_address, arrays), self._rows, ctypes.c_uint64(len(self._rope)))

    def _readout_call(self) -> Call:
        output = self._weights[EMBEDDING if self._config.tied else OUTPUT]
        kernel = _compile("readout", self._config, {"VOCAB": self._config.vocab_size}, {"OUT_T": output.dtype})
        arrays = (self._scratch, self._x, self._weights[OUTPUT_NORM], output)
        return kernel, (self._logits, *map(_address, arrays), self._rows)


def _address(array: np.ndarray | Weight | ctypes.c_uint64) -> ctypes.c_uint64:
    if isinstance(array, ctypes.c_uint64):
        return array  # set before each call
    return ctypes.c_uint64((array.data if isinstance(array, Weight) else array).ctypes.data)


def _scratch_floats(c: ModelConfig, context: int, rows: int) -> int:
    """What `block` cuts up in kernels.c: per row the normed x, an output, q, k, v, attention, gate, up; once the scores of all heads."""
    per_row = 2 * c.dim + 2 * (c.n_heads + c.n_kv_heads) * c.head_dim + 2 * c.ffn_dim
    return rows * per_row + c.n_heads * (-(-context // VECTOR) * VECTOR)


_loaded: dict[str, Any] = {}  # source -> tinygrad's program; blocks of one shape share it


def _compile(entry: str, c: ModelConfig, sizes: Mapping[str, int], types: Mapping[str, str]) -> Callable[..., None]:
    """The function `entry` of kernels.c for these numbers and element types. Raises ConfigError if the compiler refuses it."""
    defines = {f"ENTRY_{entry.upper()}": 1, "DIM": c.dim, "EPS": f"{c.norm_eps!r}f", **sizes}
    defines |= {name: dtype.lower() for name, dtype in types.items()}
    source = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + SOURCE.read_text()
    if source not in _loaded:
        device = Device["CPU"]
        try:
            binary = device.compiler.compile_cached(source)
        except (CalledProcessError, OSError) as e:
            raise ConfigError(f"the C compiler cannot compile the CPU kernels ({e}): install clang, or set PP_KERNELS=tinygrad") from e
        _loaded[source] = device.runtime(TinyELF(binary, entry, device.renderer.target, signature=()))
    return _loaded[source].fxn
