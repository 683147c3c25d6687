"""The blocks in plain tinygrad, for every device; on the CPU also what the C kernels are checked against.

Shapes: R rows, D width of the hidden state, H heads, KV key/value heads, G = H / KV, Hd width of a head, T positions.

Of tinygrad's internals this uses `UOp.range`, `index`, `store`, `end`, `sink`, `KernelInfo` and `Tensor.custom_kernel`
in `write_rows`; the rest is its public interface.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from pptasks.errors import Unsupported
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ModelConfig
from workers.weights import OnProgress, Weight

Weights = Mapping[str, Tensor]  # one block's, by the part of the name after "blk.{i}."
BUCKET_GROWTH = 4  # rows are padded to 1, 4, 16, ...: compiling a size costs seconds, a padding row next to nothing
RUNS_TO_RECORD = 3  # a TinyJit runs, records, and replays from its third call on
TENSOR_TYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}


@dataclass(frozen=True)
class Rows:
    """Where the rows of a step stand."""

    slots: Tensor  # int32 (R,)
    positions: Tensor  # int32 (R,)
    angles: Tensor  # float32 (R, 1, Hd): each row's line of the RoPE table
    upto: UOp  # bound variable, 1 to context, above every position: no more of the cache is read


@dataclass(frozen=True)
class Family:
    """In what the blocks of one architecture differ from another's; `block` is the same for all."""

    norm: Callable[[Tensor, Weights, str, float], Tensor]  # x, weights, the norm's name, epsilon
    turn: Callable[[Tensor, Rows], Tensor]  # queries or keys (R, heads, Hd) -> the same, with their position
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
    """The cache (slots, T, KV, Hd), changed in place: new[r] (R, KV, Hd) now stands at (slots[r], positions[r]).

    Work for R rows only. An indexed setitem rewrites the whole cache, and a sliced one needs a kernel for each row.
    """

    def kernel(cache: UOp, new: UOp, slots: UOp, positions: UOp) -> UOp:
        r, k, d = (UOp.range(size, axis) for axis, size in enumerate(new.shape))
        at = cache.index(slots[r].cast(dtypes.weakint), positions[r].cast(dtypes.weakint), k, d)
        return at.store(new[r, k, d].load()).end(r, k, d).sink(arg=KernelInfo(name="write_rows"))

    return cache.custom_kernel(new.contiguous(), rows.slots, rows.positions, fxn=kernel)[0]


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """q (R, H, Hd) over the caches (slots, T, KV, Hd) -> (R, H * Hd); G heads share a key/value head (GQA)."""
    n_rows, heads, width = q.shape
    kv_heads = keys.shape[2]
    k = keys[:, : rows.upto][rows.slots].permute(0, 2, 3, 1)  # (R, KV, Hd, upto)
    v = values[:, : rows.upto][rows.slots].permute(0, 2, 1, 3)  # (R, KV, upto, Hd)
    scores = q.reshape(n_rows, kv_heads, heads // kv_heads, width) @ k * width**-0.5  # (R, KV, G, upto)
    seen = Tensor.arange(keys.shape[1])[: rows.upto] <= rows.positions.reshape(n_rows, 1, 1, 1)
    return (seen.where(scores, -float("inf")).softmax(-1) @ v).reshape(n_rows, heads * width)


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
    """The blocks, the embedding and the read-out on tinygrad's default device. See `model.Backend`."""

    name = "tinygrad"

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
        if config.architecture not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise Unsupported(f"architecture {config.architecture!r} cannot be computed; supported: {known}")
        self._config, self._family = config, FAMILIES[config.architecture]
        self._memory: list[np.ndarray] = []  # what tensors on the CPU point to
        self._tensors = {name: self._tensor(weight) for name, weight in weights}
        self._blocks = {i: self._block_weights(i) for i in blocks}  # by the block's index in the whole model
        self._rope, self._context, self._spare = Tensor(rope).realize(), len(rope), n_slots
        cache = (n_slots + 1, len(rope), config.n_kv_heads, config.head_dim)  # the spare slot takes the padding rows
        self._cache = {i: (_zeros(cache), _zeros(cache)) for i in blocks}  # keys, values
        self._sizes = _buckets(max_rows)
        self._embed = {n: TinyJit(self._embed_rows) for n in self._sizes}
        self._forward = {n: TinyJit(self._run_blocks) for n in self._sizes}
        self._logits = {n: TinyJit(self._read_out) for n in self._sizes}

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
        for done, n in enumerate(self._sizes):
            on_progress("compile", done, len(self._sizes))
            zeros, x = np.zeros(n, np.int32), np.zeros((n, self._config.dim), np.float32)
            for _ in range(RUNS_TO_RECORD):
                self.forward(x, zeros, zeros)
                if OUTPUT_NORM in self._tensors:
                    self.logits(x)
                if EMBEDDING in self._tensors:
                    self.embed(zeros)
        on_progress("compile", len(self._sizes), len(self._sizes))

    def _embed_rows(self, ids: Tensor) -> Tensor:
        return self._tensors[EMBEDDING][ids].cast(dtypes.float32).realize()

    def _run_blocks(self, x: Tensor, slots: Tensor, positions: Tensor, upto: UOp) -> Tensor:
        rows = Rows(slots, positions, self._rope[positions].unsqueeze(1), upto)
        for i, weights in self._blocks.items():
            x = block(x, weights, self._cache[i], rows, self._config, self._family)
        return x.realize()

    def _read_out(self, x: Tensor) -> Tensor:
        head = EMBEDDING if self._config.tied else OUTPUT
        x = self._family.norm(x, self._tensors, OUTPUT_NORM.removesuffix(".weight"), self._config.norm_eps)
        return linear(x, self._tensors, head.removesuffix(".weight")).realize()

    def _block_weights(self, i: int) -> Weights:
        prefix = f"blk.{i}."
        return {name.removeprefix(prefix): t for name, t in self._tensors.items() if name.startswith(prefix)}

    def _tensor(self, weight: Weight) -> Tensor:
        """On the CPU the array itself, elsewhere a copy on the device."""
        dtype = TENSOR_TYPES[weight.dtype]
        if Device.DEFAULT == "CPU":
            self._memory.append(weight.data)
            return Tensor.from_blob(weight.data.ctypes.data, weight.data.shape, dtype=dtype)
        bits = weight.data.view(np.uint16) if weight.dtype == "BF16" else weight.data  # tinygrad knows no ml_dtypes
        return Tensor(bits).bitcast(dtype).contiguous().realize()

    def _bucket(self, rows: int) -> int:
        return next(n for n in self._sizes if n >= rows)


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return Tensor.zeros(*shape).contiguous().realize()


def _buckets(max_rows: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < max_rows:
        sizes.append(min(sizes[-1] * BUCKET_GROWTH, max_rows))
    return sizes


def _padded(rows: np.ndarray, n: int, fill: int) -> Tensor:
    """The rows and then `fill`, n in all, on the device."""
    out = np.full((n, *rows.shape[1:]), fill, rows.dtype)
    out[: len(rows)] = rows
    return Tensor(out).realize()
