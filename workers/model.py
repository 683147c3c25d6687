"""What one stage computes: `Slice`, and the blocks of a model in plain tinygrad, for every device.

A batch is a flat list of rows. A row is one position of one sequence: a prompt's chunk of T tokens is T rows of one slot, a decode step is
one row a lane, and one call may hold both. Slots, lanes and what a row means to a request are other modules' matter.

Shapes: R rows, D width of the hidden state, H heads, KV key/value heads, G = H / KV, Hd width of a head, F feed-forward width, T positions.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from pptasks.errors import Unsupported
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, Model, ModelConfig
from pptasks.plan import Span
from workers import kernels as c_kernels
from workers.weights import OnProgress, Weight, load

log = logging.getLogger(__name__)


class Backend(Protocol):
    """One way to compute. The arrays are checked already; every method returns a new one."""

    name: str

    def embed(self, ids: np.ndarray) -> np.ndarray: ...  # int32 (R,) -> float32 (R, D)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray: ...  # (R, D), (R,), (R,) -> (R, D)

    def logits(self, x: np.ndarray) -> np.ndarray: ...  # (n, D) -> (n, V)

    def warm(self, on_progress: OnProgress) -> None: ...


class Slice:
    """A span of a model with its weights and its KV cache. One thread calls it.

    Loads what `embedding` and `readout` ask for and the span's blocks, nothing else; a tied matrix is held once. `kernels` is "auto" (the C
    kernels where they can run, else tinygrad) or "tinygrad". Raises what `weights.load` raises, and Unsupported for an architecture.
    """

    def __init__(
        self, model: Model, span: Span, *, embedding: bool, readout: bool, n_slots: int, context: int, max_rows: int,
        kernels: str, on_progress: OnProgress,
    ):  # fmt: skip
        config = model.config
        self.dim, self.device, self.weights_bytes = config.dim, Device.DEFAULT, 0
        self._vocab, self._n_slots, self._context, self._max_rows = config.vocab_size, n_slots, context, max_rows
        self._on_progress = on_progress
        refs = model.stage_tensors(span.lo, span.hi, embedding=embedding, readout=readout)
        weights = self._counted(load(refs, on_progress))
        blocks, rope = range(span.lo, span.hi), rope_table(config, context)
        self._backend: Backend = (
            c_kernels.CpuKernels(config, weights, blocks, rope, n_slots, max_rows)
            if _use_c(config, kernels)
            else PlainTinygrad(config, weights, blocks, rope, n_slots, max_rows)
        )
        self.kernels_used = self._backend.name

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """int32 (R,) -> float32 (R, D). ValueError for an id outside the vocabulary."""
        _within("token id", ids, self._vocab)
        return self._backend.embed(ids)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D), 1 <= R <= max_rows.

        Each row's keys and values are written at (slot, position), then the row attends over positions 0 to its own of that slot; a row may
        rely on rows of the same call. Writing a position again is harmless. ValueError for a slot, a position or rows that do not fit.
        """
        self._check_rows(x)
        _within("slot", slots, self._n_slots)
        _within("position", positions, self._context)
        if not len(x) == len(slots) == len(positions):
            raise ValueError(f"{len(x)} rows, {len(slots)} slots and {len(positions)} positions")
        return self._backend.forward(x, slots, positions)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (n, D) -> float32 (n, V), 1 <= n <= max_rows: the final norm and the output head."""
        self._check_rows(x)
        return self._backend.logits(x)

    def warm(self) -> None:
        """Compile and run everything once, before the first request: it writes position 0 of slots."""
        self._backend.warm(self._on_progress)

    def _counted(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            self.weights_bytes += weight.data.nbytes
            yield name, weight

    def _check_rows(self, x: np.ndarray) -> None:
        if not (x.ndim == 2 and 1 <= len(x) <= self._max_rows and x.shape[1] == self.dim):
            raise ValueError(f"hidden state of shape {x.shape}; expected (1 to {self._max_rows}, {self.dim})")


def rope_table(config: ModelConfig, context: int) -> np.ndarray:
    """float32 (context, Hd): cos(p * theta^(-2i/Hd)) for i < Hd/2, then the sines; computed in float64."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)  # (Hd/2,)
    angles = np.outer(np.arange(context), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _use_c(config: ModelConfig, kernels: str) -> bool:
    if kernels != "auto":
        return False
    why = c_kernels.obstacle(config)
    if why is not None:
        (log.warning if Device.DEFAULT == "CPU" else log.info)("tinygrad's own kernels are used: %s", why)
    return why is None


def _within(what: str, values: np.ndarray, end: int) -> None:
    if len(values) and not 0 <= values.min() <= values.max() < end:
        raise ValueError(f"{what} outside 0 to {end - 1}: {values.min()} to {values.max()}")


# ---- the plain path ----

Weights = Mapping[str, Tensor]  # one block's, by the part of the name after "blk.{i}."
BUCKET_GROWTH = 4  # rows are padded to 1, 4, 16, ...: a compilation costs seconds, a padding row next to nothing
TENSOR_TYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}


@dataclass(frozen=True)
class Rows:
    """Where the rows of a step stand. `upto` bounds every position: no more of the cache is read."""

    slots: Tensor  # int32 (R,)
    positions: Tensor  # int32 (R,)
    angles: Tensor  # float32 (R, 1, Hd): each row's line of the RoPE table
    upto: UOp  # a bound variable, 1 to context


@dataclass(frozen=True)
class Family:
    """In what the blocks of one architecture differ from another's; `block` is the same for all."""

    norm: Callable[[Tensor, Weights, str, float], Tensor]
    turn: Callable[[Tensor, Rows], Tensor]  # queries and keys (R, heads, Hd) -> the same, with their position
    ffn: Callable[[Tensor, Weights], Tensor]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[f"{name}.weight"].cast(dtypes.float32).T  # (R, in) -> (R, out)


def rms_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[f"{name}.weight"]


def rotate(x: Tensor, rows: Rows) -> Tensor:
    """RoPE in the half-split layout: dimension i turns with dimension i + Hd/2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rows.angles.chunk(2, dim=-1)  # (R, 1, Hd/2)
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)


def swiglu(x: Tensor, w: Weights) -> Tensor:
    return linear(linear(x, w, "ffn_gate").silu() * linear(x, w, "ffn_up"), w, "ffn_down")


FAMILIES = {"llama": Family(norm=rms_norm, turn=rotate, ffn=swiglu)}


def write_rows(cache: Tensor, new: Tensor, rows: Rows) -> Tensor:
    """The cache (slots, T, KV, Hd) after new[r] (R, KV, Hd) was stored at (slots[r], positions[r]), in place: work for R rows only.

    An indexed setitem would rewrite the whole cache, and a sliced one needs a kernel for each row.
    """

    def kernel(cache: UOp, new: UOp, slots: UOp, positions: UOp) -> UOp:
        r, k, d = (UOp.range(size, axis) for axis, size in enumerate(new.shape))
        at = cache.index(slots[r].cast(dtypes.weakint), positions[r].cast(dtypes.weakint), k, d)
        return at.store(new[r, k, d].load()).end(r, k, d).sink(arg=KernelInfo(name="write_rows"))

    return cache.custom_kernel(new.contiguous(), rows.slots, rows.positions, fxn=kernel)[0]


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """q (R, H, Hd) over the caches (slots, T, KV, Hd) -> (R, H * Hd); heads of a group share a key/value head (GQA)."""
    R, H, Hd = q.shape
    KV = keys.shape[2]
    k = keys[:, : rows.upto][rows.slots].permute(0, 2, 3, 1)  # (R, KV, Hd, upto)
    v = values[:, : rows.upto][rows.slots].permute(0, 2, 1, 3)  # (R, KV, upto, Hd)
    scores = q.reshape(R, KV, H // KV, Hd) @ k * Hd**-0.5  # (R, KV, G, upto)
    seen = Tensor.arange(keys.shape[1])[: rows.upto] <= rows.positions.reshape(R, 1, 1, 1)
    return (seen.where(scores, -float("inf")).softmax(-1) @ v).reshape(R, H * Hd)


def block(x: Tensor, w: Weights, cache: tuple[Tensor, Tensor], rows: Rows, c: ModelConfig, family: Family) -> Tensor:
    """One transformer block: x (R, D) -> (R, D)."""
    h = family.norm(x, w, "attn_norm", c.norm_eps)
    q = linear(h, w, "attn_q").reshape(-1, c.n_heads, c.head_dim)  # (R, H, Hd)
    k = linear(h, w, "attn_k").reshape(-1, c.n_kv_heads, c.head_dim)  # (R, KV, Hd)
    v = linear(h, w, "attn_v").reshape(-1, c.n_kv_heads, c.head_dim)
    keys, values = write_rows(cache[0], family.turn(k, rows), rows), write_rows(cache[1], v, rows)
    x = x + linear(attend(family.turn(q, rows), keys, values, rows), w, "attn_output")
    return x + family.ffn(family.norm(x, w, "ffn_norm", c.norm_eps), w)


class PlainTinygrad:
    """The blocks, the embedding and the read-out on tinygrad's default device. See `Backend`."""

    name = "tinygrad"

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], blocks: range, rope: np.ndarray, n_slots: int, max_rows: int
    ):
        if config.architecture not in FAMILIES:
            raise Unsupported(f"architecture {config.architecture!r} cannot be computed; supported: {', '.join(sorted(FAMILIES))}")
        self._config, self._family, self._spare, self._context = config, FAMILIES[config.architecture], n_slots, len(rope)
        self._tensors, self._memory = {}, []
        for name, weight in weights:
            self._tensors[name] = self._tensor(weight)
        self._blocks = {i: self._weights(f"blk.{i}.") for i in blocks}  # by the block's index in the whole model
        shape = (n_slots + 1, len(rope), config.n_kv_heads, config.head_dim)  # the spare slot takes the padding rows
        self._cache = {i: (Tensor.zeros(*shape).contiguous().realize(), Tensor.zeros(*shape).contiguous().realize()) for i in blocks}
        self._rope = Tensor(rope).realize()
        sizes = [1]
        while sizes[-1] < max_rows:
            sizes.append(min(sizes[-1] * BUCKET_GROWTH, max_rows))
        self._embed, self._forward, self._logits = ({n: TinyJit(f) for n in sizes} for f in (self._embed_rows, self._run, self._read_out))

    def embed(self, ids: np.ndarray) -> np.ndarray:
        n = self._bucket(len(ids))
        return self._embed[n](_padded(ids.astype(np.int32), n, 0)).numpy()[: len(ids)]

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if not self._blocks:
            return x.copy()
        n = self._bucket(len(x))
        where = _padded(slots.astype(np.int32), n, self._spare), _padded(positions.astype(np.int32), n, 0)
        upto = UOp.variable("upto", 1, self._context).bind(int(positions.max()) + 1)
        return self._forward[n](_padded(x.astype(np.float32), n, 0), *where, upto).numpy()[: len(x)]

    def logits(self, x: np.ndarray) -> np.ndarray:
        n = self._bucket(len(x))
        return self._logits[n](_padded(x.astype(np.float32), n, 0)).numpy()[: len(x)]

    def warm(self, on_progress: OnProgress) -> None:
        """A TinyJit records on its second call and replays from the third on."""
        sizes = list(self._forward)
        for done, n in enumerate(sizes):
            on_progress("compile", done, len(sizes))
            zero, x = np.zeros(n, np.int32), np.zeros((n, self._config.dim), np.float32)
            for _ in range(3):
                self.forward(x, zero, zero)
                if OUTPUT_NORM in self._tensors:
                    self.logits(x)
                if EMBEDDING in self._tensors:
                    self.embed(zero)
        on_progress("compile", len(sizes), len(sizes))

    def _embed_rows(self, ids: Tensor) -> Tensor:
        return self._tensors[EMBEDDING][ids].cast(dtypes.float32).realize()

    def _run(self, x: Tensor, slots: Tensor, positions: Tensor, upto: UOp) -> Tensor:
        rows = Rows(slots, positions, self._rope[positions].unsqueeze(1), upto)
        for i, weights in self._blocks.items():
            x = block(x, weights, self._cache[i], rows, self._config, self._family)
        return x.realize()

    def _read_out(self, x: Tensor) -> Tensor:
        head = EMBEDDING if self._config.tied else OUTPUT
        x = self._family.norm(x, self._tensors, OUTPUT_NORM.removesuffix(".weight"), self._config.norm_eps)
        return linear(x, self._tensors, head.removesuffix(".weight")).realize()

    def _weights(self, prefix: str) -> Weights:
        return {name.removeprefix(prefix): t for name, t in self._tensors.items() if name.startswith(prefix)}

    def _tensor(self, weight: Weight) -> Tensor:
        """On the CPU the array itself, elsewhere a copy on the device."""
        dtype = TENSOR_TYPES[weight.dtype]
        if Device.DEFAULT == "CPU":
            self._memory.append(weight.data)
            return Tensor.from_blob(weight.data.ctypes.data, weight.data.shape, dtype=dtype)
        tensor = Tensor(weight.data)
        return (tensor.bitcast(dtype) if weight.dtype == "BF16" else tensor).realize()

    def _bucket(self, rows: int) -> int:
        return next(n for n in self._forward if n >= rows)


def _padded(rows: np.ndarray, n: int, fill: int) -> Tensor:
    """The rows and then `fill`, n in all, on the device."""
    out = np.full((n, *rows.shape[1:]), fill, rows.dtype)
    out[: len(rows)] = rows
    return Tensor(out).realize()
