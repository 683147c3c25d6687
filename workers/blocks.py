"""One transformer block as tinygrad expressions, for every family.

What is computed follows from the configuration's fields and from which tensors are there, not from an architecture's
name. Shapes: R rows, D width of the hidden state, H heads, KV key/value heads, G = H / KV, Hd width of a head,
F width of the feed-forward layer, T positions.

Of tinygrad's internals this uses `UOp.range`, `index`, `store`, `end`, `sink`, `KernelInfo` and `Tensor.custom_kernel`
in `write_rows`, and `ggml_data_to_tensor`; the rest is its public interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import gguf
from tinygrad import Tensor, UOp, dtypes
from tinygrad.llm.gguf import ggml_data_to_tensor
from tinygrad.uop.ops import KernelInfo

from pptasks.modelinfo import ModelConfig

TENSOR_TYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}


@dataclass(frozen=True)
class OnDevice:
    """A weight on the device, in the type that it has in memory."""

    data: Tensor  # as Weight.data
    dtype: str
    shape: tuple[int, ...]

    def values(self) -> Tensor:
        """float32 of that shape: an expression, widened inside the kernel that uses it."""
        return _widened(self.data, self.dtype, self.shape)

    def rows(self, index: Tensor) -> Tensor:
        """A matrix's rows at `index` (R,), as float32 (R, in)."""
        return _widened(self.data[index], self.dtype, (index.shape[0], self.shape[1]))


def _widened(data: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if dtype in TENSOR_TYPES:
        return data.cast(dtypes.float32)
    return ggml_data_to_tensor(data.flatten(), prod(shape), gguf.GGMLQuantizationType[dtype]).reshape(shape)


Weights = Mapping[str, OnDevice]  # one block's, by the part of the name after "blk.{i}."


@dataclass(frozen=True)
class Rows:
    """Where the rows of a step stand."""

    slots: Tensor  # int32 (R,)
    positions: Tensor  # int32 (R,)
    angles: Tensor | None  # float32 (R, 1, Hd): each row's line of the RoPE table; None: nothing turns
    upto: UOp  # bound variable, 1 to context, above every position: no more of the cache is read


class Steps(NamedTuple):
    """What one block computes, float32; see `trace.Trace`."""

    x: Tensor  # (R, D)
    q: Tensor  # (R, H * Hd)
    k: Tensor  # (R, KV * Hd)
    v: Tensor  # (R, KV * Hd)
    o: Tensor  # (R, H * Hd)
    h: Tensor  # (R, D)
    a: Tensor  # (R, F)
    y: Tensor  # (R, D)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].values().T  # (R, in) -> (R, out)
    return y + w[f"{name}.bias"].values() if f"{name}.bias" in w else y


def rms_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[f"{name}.weight"].values()


def layer_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return rms_norm(x, w, name, eps) + w[f"{name}.bias"].values()


def swiglu(h: Tensor, w: Weights) -> Tensor:
    return linear(h, w, "ffn_gate").silu() * linear(h, w, "ffn_up")


def gelu(h: Tensor, w: Weights) -> Tensor:
    return linear(h, w, "ffn_up").gelu(approximate="tanh")


NORMS = {"rms": rms_norm, "layer": layer_norm}  # by ModelConfig.norm
FFNS = {"swiglu": swiglu, "gelu": gelu}  # by ModelConfig.ffn


def heads(h: Tensor, w: Weights, name: str, rows: Rows, c: ModelConfig) -> Tensor:
    """Queries or keys: h (R, D) -> (R, heads, Hd), each head normed if the model norms them, and turned."""
    x = linear(h, w, name).reshape(h.shape[0], -1, c.head_dim)
    if f"{name}_norm.weight" in w:
        x = rms_norm(x, w, f"{name}_norm", c.norm_eps)
    return x if rows.angles is None else rotate(x, rows.angles)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE in the half-split layout: dimension i turns with dimension i + Hd/2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.chunk(2, dim=-1)  # (R, 1, Hd/2)
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)


def write_rows(cache: Tensor, new: Tensor, rows: Rows) -> Tensor:
    """The cache (slots, T, KV, Hd), changed in place: new[r] (R, KV, Hd) now stands at (slots[r], positions[r]).

    Work for R rows only. An indexed setitem rewrites the whole cache, and a sliced one needs a kernel for each row.
    """

    def kernel(cache: UOp, new: UOp, slots: UOp, positions: UOp) -> UOp:
        r, k, d = (UOp.range(size, axis) for axis, size in enumerate(new.shape))
        at = cache.index(slots[r].cast(dtypes.weakint), positions[r].cast(dtypes.weakint), k, d)
        return at.store(new[r, k, d].load()).end(r, k, d).sink(arg=KernelInfo(name="write_rows"))

    return cache.custom_kernel(new.contiguous(), rows.slots, rows.positions, fxn=kernel)[0]


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, window: int) -> Tensor:
    """q (R, H, Hd) over the caches (slots, T, KV, Hd) -> (R, H * Hd); G heads share a key/value head (GQA).

    A row attends over the positions up to its own: the last `window` of them, or all if that is 0.
    """
    n_rows, n_heads, width = q.shape
    kv_heads = keys.shape[2]
    k = keys[:, : rows.upto][rows.slots].permute(0, 2, 3, 1)  # (R, KV, Hd, upto)
    v = values[:, : rows.upto][rows.slots].permute(0, 2, 1, 3)  # (R, KV, upto, Hd)
    scores = q.reshape(n_rows, kv_heads, n_heads // kv_heads, width) @ k * width**-0.5  # (R, KV, G, upto)
    own, position = rows.positions.reshape(n_rows, 1, 1, 1), Tensor.arange(keys.shape[1])[: rows.upto]
    seen = position <= own
    if window:
        seen = seen & (position > own - window)
    return (seen.where(scores, -float("inf")).softmax(-1) @ v).reshape(n_rows, n_heads * width)


def block(x: Tensor, w: Weights, cache: tuple[Tensor, Tensor], rows: Rows, c: ModelConfig, window: int) -> Steps:
    """One transformer block: x (R, D) -> y (R, D), and what lies between."""
    norm = NORMS[c.norm]
    h = norm(x, w, "attn_norm", c.norm_eps)
    q, k = heads(h, w, "attn_q", rows, c), heads(h, w, "attn_k", rows, c)
    v = linear(h, w, "attn_v").reshape(-1, c.n_kv_heads, c.head_dim)
    o = attend(q, write_rows(cache[0], k, rows), write_rows(cache[1], v, rows), rows, window)
    between = x + linear(o, w, "attn_output")
    h = norm(between, w, "ffn_norm", c.norm_eps)
    a = FFNS[c.ffn](h, w)
    return Steps(x, q.flatten(1), k.flatten(1), v.flatten(1), o, h, a, between + linear(a, w, "ffn_down"))
