"""The blocks in plain tinygrad, for every device; on the CPU also what the C kernels are checked against."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, POSITIONS, ModelConfig, OnProgress
from workers.blocks import NORMS, TENSOR_TYPES, OnDevice, Rows, Steps, Weights, block, linear
from workers.trace import Trace
from workers.weights import Weight

BUCKET_GROWTH = 4  # rows are padded to 1, 4, 16, ...: compiling a size costs seconds, a padding row next to nothing
CPU_ROWS = 8  # on a CPU, where a padding row costs a row; more are run by portions, at 1.4 times what 128 at once take
RUNS_TO_RECORD = 3  # a TinyJit runs, records, and replays from its third call on


class PlainTinygrad:
    """The blocks, the embedding and the read-out on tinygrad's default device. See `model.Backend`."""

    name = "tinygrad"

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
        """rope: float32 (context, Hd), the cosines of each position's angles, then the sines; None: nothing turns.

        traced: the block whose steps `forward` may be asked for, or none.
        """
        self._config, self._context, self._spare, self._traced = config, context, n_slots, traced
        self.trace: Trace | None = None  # of the last call that was asked for it
        self._memory: list[np.ndarray] = []  # what tensors on the CPU point to
        self._weights = {name: self._on_device(weight) for name, weight in weights}
        self._blocks = {i: self._block_weights(i) for i in blocks}  # by the block's index in the whole model
        self._rope = None if rope is None else Tensor(rope).realize()
        cache = (n_slots + 1, context, config.n_kv_heads, config.head_dim)  # the spare slot takes the padding rows
        self._cache = {i: (_zeros(cache), _zeros(cache)) for i in blocks}  # keys, values
        self._sizes = _sizes(max_rows)  # of a call on the device
        self._embed = {n: TinyJit(self._embed_rows) for n in self._sizes}
        self._forward = {n: TinyJit(self._run_blocks) for n in self._sizes}
        self._logits = {n: TinyJit(self._read_out) for n in self._sizes}

    def embed(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        def run(rows: np.ndarray) -> list[Tensor]:
            n = self._bucket(len(rows))
            return [self._embed[n](_padded(ids[rows], n, 0, np.int32), _padded(positions[rows], n, 0, np.int32))]

        [x] = self._by_portions(np.arange(len(ids)), run)
        return x

    def forward(
        self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray, *, trace: int | None = None
    ) -> np.ndarray:
        if not self._blocks:
            return x.copy()

        def run(rows: np.ndarray) -> tuple[Tensor, ...]:
            outputs = self._forward[self._bucket(len(rows))](*self._inputs(x[rows], slots[rows], positions[rows]))
            return outputs[:1] if trace is None else outputs

        y, *steps = self._by_portions(_causal_order(positions), run)
        if trace is not None:
            self.trace = Trace(trace, *steps)
        return y

    def run_block(self, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Without recording: for a call or two, that is the quicker way."""

        def run(rows: np.ndarray) -> list[Tensor]:
            inputs, *where = self._inputs(x[rows], slots[rows], positions[rows])
            return [self._run(i, inputs, self._rows(*where)).y]

        [y] = self._by_portions(_causal_order(positions), run)
        return y

    def cached(self, i: int, slot: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = (_copied(cache, (slot, first), last + 1 - first) for cache in self._cache[i])
        return keys, values

    def logits(self, x: np.ndarray) -> np.ndarray:
        def run(rows: np.ndarray) -> list[Tensor]:
            n = self._bucket(len(rows))
            return [self._logits[n](_padded(x[rows], n, 0, np.float32))]

        [logits] = self._by_portions(np.arange(len(x)), run)
        return logits

    def copy(self, source: int, slot: int, n: int) -> None:
        for cache in (part for pair in self._cache.values() for part in pair):
            _copy(cache, source, slot, n)

    def warm(self, on_progress: OnProgress) -> int:
        for done, n in enumerate(self._sizes):
            on_progress("compile", done, len(self._sizes))
            zeros, x = np.zeros(n, np.int32), np.zeros((n, self._config.dim), np.float32)
            for _ in range(RUNS_TO_RECORD):
                self.forward(x, zeros, zeros)
                if OUTPUT_NORM in self._weights:
                    self.logits(x)
                if EMBEDDING in self._weights:
                    self.embed(zeros, zeros)
        on_progress("compile", len(self._sizes), len(self._sizes))
        kinds = 1 + (OUTPUT_NORM in self._weights) + (EMBEDDING in self._weights)
        return len(self._sizes) * kinds

    def _embed_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self._weights[EMBEDDING].rows(ids)
        return (x + self._weights[POSITIONS].rows(positions) if POSITIONS in self._weights else x).realize()

    def _run_blocks(self, x: Tensor, slots: Tensor, positions: Tensor, upto: UOp) -> tuple[Tensor, ...]:
        """The last block's output, then the traced block's steps."""
        rows = self._rows(slots, positions, upto)
        kept: tuple[Tensor, ...] = ()
        for i in self._blocks:
            steps = self._run(i, x, rows)
            if i in self._traced:
                kept = (x.clone(), *steps[1:])  # x may be the caller's, which a replay does not return
            x = steps.y
        Tensor.realize(x, *kept)
        return x, *kept

    def _run(self, i: int, x: Tensor, rows: Rows) -> Steps:
        return block(x, self._blocks[i], self._cache[i], rows, self._config, self._config.windows[i])

    def _rows(self, slots: Tensor, positions: Tensor, upto: UOp) -> Rows:
        angles = None if self._rope is None else self._rope[positions].unsqueeze(1)
        return Rows(slots, positions, angles, upto)

    def _read_out(self, x: Tensor) -> Tensor:
        head = EMBEDDING if self._config.tied else OUTPUT
        x = NORMS[self._config.norm](x, self._weights, OUTPUT_NORM.removesuffix(".weight"), self._config.norm_eps)
        return linear(x, self._weights, head.removesuffix(".weight")).realize()

    def _inputs(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor, Tensor, UOp]:
        n = self._bucket(len(x))
        where = _padded(slots, n, self._spare, np.int32), _padded(positions, n, 0, np.int32)
        return (
            _padded(x, n, 0, np.float32),
            *where,
            UOp.variable("upto", 1, self._context).bind(int(positions.max()) + 1),
        )

    def _block_weights(self, i: int) -> Weights:
        prefix = f"blk.{i}."
        return {name.removeprefix(prefix): w for name, w in self._weights.items() if name.startswith(prefix)}

    def _on_device(self, weight: Weight) -> OnDevice:
        """On the CPU the array itself, elsewhere a copy on the device."""
        dtype = TENSOR_TYPES.get(weight.dtype, dtypes.uint8)
        if Device.DEFAULT == "CPU":
            self._memory.append(weight.data)
            tensor = Tensor.from_blob(weight.data.ctypes.data, weight.data.shape, dtype=dtype)
        else:
            bits = weight.data.view(np.uint16) if weight.dtype == "BF16" else weight.data  # tinygrad knows no ml_dtypes
            tensor = Tensor(bits).bitcast(dtype).contiguous().realize()
        return OnDevice(tensor, weight.dtype, weight.shape)

    def _by_portions(self, order: np.ndarray, run: Callable[[np.ndarray], Sequence[Tensor]]) -> list[np.ndarray]:
        """`run` for the rows in that order, as many at a time as fit; what it returns, in the rows' own order."""
        n, portions = self._sizes[-1], []
        for first in range(0, len(order), n):
            rows = order[first : first + n]
            portions.append([tensor.numpy()[: len(rows)] for tensor in run(rows)])
        own_order = np.argsort(order)
        return [np.concatenate(arrays)[own_order] for arrays in zip(*portions, strict=True)]

    def _bucket(self, rows: int) -> int:
        return next(n for n in self._sizes if n >= rows)


def _causal_order(positions: np.ndarray) -> np.ndarray:
    """Earlier positions first: a row attends over those of its own call too."""
    return np.argsort(positions, kind="stable")


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return Tensor.zeros(*shape).contiguous().realize()


def _copied(cache: Tensor, at: tuple[int, int], n: int) -> np.ndarray:
    """float32 (n, KV * Hd): of a cache, `n` positions from `at` (slot, position) on. A copy of memory, no kernel."""
    try:
        return _part(cache, at, n).numpy().reshape(n, -1)
    except NotImplementedError:  # OpenCL and WebGPU name no part of a buffer
        slot, first = at
        return cache.numpy()[slot, first : first + n].reshape(n, -1)


def _copy(cache: Tensor, source: int, slot: int, n: int) -> None:
    """`n` positions from the start of one slot to another, on the device."""
    try:
        _part(cache, (slot, 0), n).copy_from(_part(cache, (source, 0), n))
    except NotImplementedError:
        whole = cache.numpy().copy()
        whole[slot, :n] = whole[source, :n]
        cache.assign(Tensor(whole)).realize()


def _part(cache: Tensor, at: tuple[int, int], n: int) -> Any:
    """The buffer of those positions. NotImplementedError where a device cannot name a part of one."""
    _, context, kv_heads, head_dim = cache.shape
    width, (slot, first) = int(kv_heads * head_dim), at
    part = cache.uop.buffer.view(n * width, dtypes.float32, 4 * (slot * int(context) + first) * width)
    return part.ensure_allocated()


def _sizes(max_rows: int) -> list[int]:
    if Device.DEFAULT == "CPU":
        return sorted({1, min(CPU_ROWS, max_rows)})
    sizes = [1]
    while sizes[-1] < max_rows:
        sizes.append(min(sizes[-1] * BUCKET_GROWTH, max_rows))
    return sizes


def _padded(rows: np.ndarray, n: int, fill: int, dtype: type) -> Tensor:
    """The rows and then `fill`, n in all, on the device."""
    out = np.full((n, *rows.shape[1:]), fill, dtype)
    out[: len(rows)] = rows
    return Tensor(out).realize()
