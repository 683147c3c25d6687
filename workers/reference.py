"""A model's forward pass in numpy alone, one published formula after the other: the second opinion on every kernel.

It shares no code with what serves a model and is written for clarity, not for speed. All arithmetic is float64, so
what differs from it is the other side's rounding, or a mistake. A whole sequence goes through at once: there is no
cache. T rows at the positions 0 .. T-1; D, H, KV, Hd, F and V are the fields of ModelConfig.

    attention, residuals   Vaswani et al. 2017, arXiv:1706.03762; norms before the layers as in GPT-2 (Radford 2019)
    rotary positions       Su et al. 2021, arXiv:2104.09864
      scaled, "linear"     position interpolation: Chen et al. 2023, arXiv:2306.15595
      scaled, "llama3"     the rule that Meta published with Llama 3.1 (llama-models, models/llama3/model.py)
    grouped queries        Ainslie et al. 2023, arXiv:2305.13245
    sliding window         Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825
    norm of q and k        Henry et al. 2020, arXiv:2010.04245; with RMSNorm: Qwen3, arXiv:2505.09388
    LayerNorm, RMSNorm     Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467
    GELU, SwiGLU           Hendrycks & Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202
    tied embedding         Press & Wolf 2017, arXiv:1608.05859

`weights` maps canonical names (pptasks/modelinfo.py) to arrays of any float type: matrices (out, in), q, k and v apart,
heads in half-split order (dimension i turns with i + Hd/2). A bias, or a norm of q and k, counts where it is present.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pptasks.errors import Unsupported
from pptasks.modelinfo import EMBEDDING, OUTPUT, POSITIONS, ROPE_FACTORS, ModelConfig, Rope

Floats = NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]

CHUNK = 1 << 14  # elements of a matrix that are float64 at one time: 128 KiB, too little for BLAS to start threads


def forward(config: ModelConfig, weights: Weights, ids: Sequence[int]) -> Floats:
    """(T, V): the logits that follow each token of `ids`, the first of which is at position 0."""
    x = embed(config, weights, ids, range(len(ids)))
    for i in range(config.n_blocks):
        x = block(config, i, weights, x, weights.get(ROPE_FACTORS))
    return logits(config, weights, x)


def embed(config: ModelConfig, weights: Weights, ids: Sequence[int], positions: Sequence[int]) -> Floats:
    """(T, D): each token's row of the embedding; with learned positions, its position's row is added."""
    x = _f64(weights[EMBEDDING][list(ids)])
    return x if config.rope else x + _f64(weights[POSITIONS][list(positions)])


def block(
    config: ModelConfig, i: int, weights: Weights, x: NDArray[Any], factors: NDArray[Any] | None = None
) -> Floats:
    """(T, D): block `i` over the rows `x` (T, D), each of which attends to itself and those before it.

    `factors` (Hd/2,) divide the rotary frequencies: the tensor `rope_freqs.weight` of a file that has one.
    """
    name = f"blk.{i}."
    x = _f64(x)
    x = x + _attention(config, i, weights, _norm(config, weights, name + "attn_norm", x), factors)
    return x + _feed_forward(config, name, weights, _norm(config, weights, name + "ffn_norm", x))


def logits(config: ModelConfig, weights: Weights, x: NDArray[Any]) -> Floats:
    """(T, V): the final norm of the rows `x` (T, D) times the output head, which may be the embedding."""
    head = EMBEDDING if config.tied else OUTPUT
    return _matmul(_norm(config, weights, "output_norm", _f64(x)), weights[head])


def rope_angles(rope: Rope, head_dim: int, positions: Iterable[int], factors: ArrayLike | None = None) -> Floats:
    """(n, Hd/2): the angles in radians by which each position turns a head's pairs: m theta_i, theta_i = b^(-2i/Hd).

    Frequencies are scaled as `rope.scaling` says and divided by `factors` (Hd/2,). Unsupported for another scaling.
    """
    frequencies = rope.theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    match rope.scaling:
        case "none":
            pass
        case "linear":  # f(x, m / s): a position s times as far gets the same angle
            frequencies = frequencies / rope.factor
        case "llama3":
            frequencies = np.array([_llama3(rope, float(f)) for f in frequencies])
        case other:
            raise Unsupported(f"RoPE scaling {other!r} has no reference; known: none, linear, llama3")
    if factors is not None:
        frequencies = frequencies / np.asarray(factors, np.float64)
    return np.outer(np.fromiter(positions, np.float64), frequencies)


def _llama3(rope: Rope, frequency: float) -> float:
    """Short waves stay, long ones become `factor` times as long, and between the two the frequencies are mixed."""
    turns = rope.original_context * frequency / (2 * math.pi)  # wave lengths within the context of the training
    if turns > rope.high:
        return frequency
    if turns < rope.low:
        return frequency / rope.factor
    kept = (turns - rope.low) / (rope.high - rope.low)
    return kept * frequency + (1 - kept) * frequency / rope.factor


def _attention(config: ModelConfig, i: int, weights: Weights, x: Floats, factors: NDArray[Any] | None) -> Floats:
    """Attention of all heads over the normed rows `x` (T, D), projected back to D."""
    name = f"blk.{i}."
    q = _heads(_linear(weights, name + "attn_q", x), config.n_heads)
    k = _heads(_linear(weights, name + "attn_k", x), config.n_kv_heads)
    v = _heads(_linear(weights, name + "attn_v", x), config.n_kv_heads)
    q = _normed_heads(config, weights, name + "attn_q_norm.weight", q)
    k = _normed_heads(config, weights, name + "attn_k_norm.weight", k)
    if config.rope:
        angles = rope_angles(config.rope, config.head_dim, range(len(x)), factors)
        q = [_rotate(head, angles) for head in q]
        k = [_rotate(head, angles) for head in k]
    group = config.n_heads // config.n_kv_heads  # consecutive query heads that share a key and a value head
    window = config.windows[i]
    heads = [_attend(q[h], k[h // group], v[h // group], window) for h in range(config.n_heads)]
    return _linear(weights, name + "attn_output", np.concatenate(heads, axis=1))


def _heads(x: Floats, n: int) -> list[Floats]:
    """(T, n Hd) as n times (T, Hd)."""
    return np.split(x, n, axis=1)


def _normed_heads(config: ModelConfig, weights: Weights, name: str, heads: list[Floats]) -> list[Floats]:
    """Each head's RMSNorm over its own Hd dimensions, with one weight for all heads, where the model has it."""
    return [_rms_norm(head, weights[name], config.norm_eps) for head in heads] if name in weights else heads


def _rotate(head: Floats, angles: Floats) -> Floats:
    """Turn the pair (i, i + Hd/2) of each row (T, Hd), taken as one complex number, by its angle (T, Hd/2)."""
    half = head.shape[1] // 2
    turned = (head[:, :half] + 1j * head[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _attend(q: Floats, k: Floats, v: Floats, window: int) -> Floats:
    """softmax(q k^T / sqrt(Hd)) v of one head, all (T, Hd). A row sees the `window` last positions up to its own."""
    rows = []
    for p in range(len(q)):
        first = max(0, p - window + 1) if window else 0
        scores = k[first : p + 1] @ q[p] / math.sqrt(q.shape[1])
        odds = np.exp(scores - scores.max())
        rows.append((odds / odds.sum()) @ v[first : p + 1])
    return np.stack(rows)


def _feed_forward(config: ModelConfig, name: str, weights: Weights, x: Floats) -> Floats:
    """SwiGLU: down(silu(gate x) * up x). GELU: down(gelu(up x))."""
    up = _linear(weights, name + "ffn_up", x)
    hidden = _silu(_linear(weights, name + "ffn_gate", x)) * up if config.ffn == "swiglu" else _gelu(up)
    return _linear(weights, name + "ffn_down", hidden)


def _silu(x: Floats) -> Floats:
    """x sigmoid(x), with sigmoid(x) = exp(-log(1 + e^-x)), which cannot overflow."""
    return x * np.exp(-np.logaddexp(0.0, -x))


def _gelu(x: Floats) -> Floats:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _norm(config: ModelConfig, weights: Weights, name: str, x: Floats) -> Floats:
    if config.norm == "rms":
        return _rms_norm(x, weights[name + ".weight"], config.norm_eps)
    return _layer_norm(x, weights[name + ".weight"], weights[name + ".bias"], config.norm_eps)


def _rms_norm(x: Floats, weight: NDArray[Any], eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * w, over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * _f64(weight)


def _layer_norm(x: Floats, weight: NDArray[Any], bias: NDArray[Any], eps: float) -> Floats:
    """(x - mean) / sqrt(variance + eps) * w + b, over the last axis, with the mean of the squares as the variance."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * _f64(weight) + _f64(bias)


def _linear(weights: Weights, name: str, x: Floats) -> Floats:
    """x W^T + b, the bias where there is one."""
    y = _matmul(x, weights[name + ".weight"])
    bias = weights.get(name + ".bias")
    return y if bias is None else y + _f64(bias)


def _matmul(x: Floats, weight: NDArray[Any]) -> Floats:
    """x (T, in) times the transpose of `weight` (out, in), which is widened a few rows at a time."""
    step = max(1, CHUNK // weight.shape[1])
    chunks = [x @ _f64(weight[at : at + step]).T for at in range(0, weight.shape[0], step)]
    return np.concatenate(chunks, axis=1)


def _f64(x: NDArray[Any]) -> Floats:
    return np.asarray(x, np.float64)
