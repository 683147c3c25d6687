"""The running audit: now and then one row of a live step is computed again, in numpy and float64, from copies.

What is copied at load time, as the weights pass by: a few random rows of every linear layer, in their own type, and all
norms and biases. Of the block that a step traced, those channels of one row are computed again, each product from what
the step itself had before it, so that a mistake is found where it happened: q, k and v from the block's input, what
of them the KV cache holds, the attention from the cache, the normed input of the feed-forward layer, its inner
activation, the block's output. The formulas are those of workers/reference.py. One row of the cache is kept until the
next audit, and must then be what it was.

Every value carries a bound of what float32 may lose on the way, whatever the order of its sums (workers/bounds.py).
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pptasks.errors import AuditFailed
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ModelConfig
from workers.bounds import STEPS, UNIT_ROUNDOFF, Floats, Known, activated, exact, lost
from workers.reference import rope_angles
from workers.trace import Trace
from workers.weights import Weight

CHANNELS = 4  # rows of each linear layer that are copied
ADDITIONS = 4  # roundings of a layer's output, its bias and what it is added to, in whatever order
MOST_SEEN = 4096  # positions of a head's attention that is computed again; no more than a few ms
GROUPS = {"attn_output": "d", "ffn_down": "d", "ffn_gate": "f", "ffn_up": "f"}  # layers whose channels belong together


@dataclass(frozen=True)
class Sample:
    """Some rows of a matrix: which, and a copy of them."""

    index: NDArray[np.int64]
    weight: Weight


Cached = Callable[[int, int, int, int], tuple[np.ndarray, np.ndarray]]  # `Backend.cached`


@dataclass(frozen=True)
class Witness:
    """What stood in the KV cache at one place."""

    block: int
    slot: int
    position: int
    keys: np.ndarray  # (1, KV * Hd)
    values: np.ndarray


class Audit:
    """Of one stage. `rate` is the share of calls that are audited, `names` the tensors of the stage.

    The caller shows it every weight (`see`), asks before a call whether it is `due`, tells it after each what was
    written to the KV cache (`wrote`), and shows it what came out.
    """

    def __init__(
        self,
        config: ModelConfig,
        rate: float,
        rng: np.random.Generator,
        *,
        traced: Sequence[int],
        names: Container[str],
        factors: np.ndarray | None = None,
    ):
        """traced: the blocks whose weights are sampled. factors: the file's `rope_freqs.weight`, if it has one."""
        self._config, self._rate, self._rng, self._traced = config, rate, rng, traced
        self._factors, self._names = factors, names
        self._channels: dict[str, NDArray[np.int64]] = {}  # by block and group
        self._samples: dict[str, Sample] = {}  # by tensor
        self._vectors: dict[str, Floats] = {}
        self._witness: Witness | None = None

    def see(self, name: str, weight: Weight) -> None:
        """Copy what the audit needs of a weight."""
        part = name.rpartition(".")[0]
        if part.startswith("blk.") and int(part.split(".")[1]) not in self._traced:
            return
        if len(weight.shape) == 1:
            self._vectors[name] = weight.data.astype(np.float64)
        elif part.startswith("blk.") or (OUTPUT_NORM in self._names and name == self._head):
            index = self._choose(part, weight.shape[0])
            rows = weight.data[index]
            self._samples[name] = Sample(index, Weight(rows, weight.dtype, (len(index), *weight.shape[1:])))

    def due(self) -> bool:
        return self._rng.random() < self._rate

    def choose(self) -> int | None:
        """One of the blocks that can be traced; None if there is none."""
        return int(self._rng.choice(self._traced)) if self._traced else None

    def wrote(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """A call has written these places of the KV cache, int32 (R,): they may hold something else now."""
        w = self._witness
        if w is not None and np.any((slots == w.slot) & (positions == w.position)):
            self._witness = None

    def check_block(self, trace: Trace, slots: np.ndarray, positions: np.ndarray, cached: Cached) -> None:
        """A random row of a traced call; slots and positions int32 (R,). Raises AuditFailed."""
        self._check_witness(cached)
        r, name = int(self._rng.integers(len(trace.x))), f"blk.{trace.block}."
        slot, position = int(slots[r]), int(positions[r])
        where = f"position {position}"
        keys, values = cached(trace.block, slot, position, position)
        x, o, h, a = (exact(rows[r]) for rows in (trace.x, trace.o, trace.h, trace.a))
        normed = self._norm(name + "attn_norm", x)
        for part, got in (
            ("attn_q", [trace.q[r]]),
            ("attn_k", [trace.k[r], keys[0]]),
            ("attn_v", [trace.v[r], values[0]]),
        ):
            known = self._dot(name + part, normed)
            if part != "attn_v":
                known = self._turn(name + part, self._head_norm(name + part, known), position)
            for row in got:
                self._compare(where, name + part, row, known)
        self._check_attention(where, trace, slot, position, r, cached)
        middle = self._added(x.at(self._samples[name + "ffn_down.weight"].index), name + "attn_output", o)
        self._check_norm(where, name + "ffn_norm", middle, h)
        self._compare(where, name + "ffn_up", trace.a[r], self._inner(name, h))
        self._compare(where, name + "ffn_down", trace.y[r], self._added(middle, name + "ffn_down", a))
        self._witness = Witness(trace.block, slot, position, keys.copy(), values.copy())

    def check_logits(self, x: np.ndarray, logits: np.ndarray) -> None:
        """A random row of a read-out: x (R, D), logits (R, V). Raises AuditFailed."""
        r = int(self._rng.integers(len(x)))
        normed = self._norm(OUTPUT_NORM.removesuffix(".weight"), exact(x[r]))
        known = self._dot(self._head.removesuffix(".weight"), normed)
        self._compare(f"row {r} of the call", self._head.removesuffix(".weight"), logits[r], known)

    # ---- which rows ----

    @property
    def _head(self) -> str:
        return EMBEDDING if self._config.tied else OUTPUT

    def _choose(self, part: str, rows: int) -> NDArray[np.int64]:
        block, _, layer = part.rpartition(".")
        key = f"{block}.{GROUPS.get(layer, layer)}"
        if key not in self._channels:
            rotary = layer in ("attn_q", "attn_k")
            whole_head = f"{part}_norm.weight" in self._names
            self._channels[key] = (
                _pairs(self._rng, rows, self._config.head_dim, whole_head)
                if rotary
                else self._rng.choice(rows, CHANNELS, replace=rows < CHANNELS)
            )
        return self._channels[key]

    # ---- the formulas ----

    def _dot(self, name: str, x: Known) -> Known:
        """The sampled channels of a linear layer."""
        sample = self._samples[f"{name}.weight"]
        w = sample.weight.rows(np.arange(len(sample.index))).astype(np.float64)
        value, size = w @ x.value, np.abs(w) @ np.abs(x.value)
        bias = self._vectors.get(f"{name}.bias")
        if bias is not None:
            value, size = value + bias[sample.index], size + np.abs(bias[sample.index])
        return Known(value, np.abs(w) @ x.slack + lost(w.shape[1]) * size)

    def _added(self, x: Known, name: str, inputs: Known) -> Known:
        """A layer's sampled channels, added to x."""
        y, bias = self._dot(name, inputs), self._vectors.get(f"{name}.bias")
        size = np.abs(x.value) + np.abs(y.value)
        if bias is not None:
            size += np.abs(bias[self._samples[f"{name}.weight"].index])
        return Known(x.value + y.value, x.slack + y.slack + ADDITIONS * UNIT_ROUNDOFF * size)

    def _norm(self, name: str, x: Known) -> Known:
        """Of an x without slack."""
        weight, bias, n = self._vectors[f"{name}.weight"], self._vectors.get(f"{name}.bias", 0.0), len(x.value)
        layer = self._config.norm == "layer"
        centred = x.value - (x.value.mean() if layer else 0.0)
        deviation = np.sqrt((centred * centred).mean() + self._config.norm_eps)
        scaled = centred / deviation * weight
        slack = lost(n) * (np.abs(scaled) + np.abs(bias))
        if layer:  # the mean of nearly equal values is rounded the same way at each step: all n may count
            drift = (n + STEPS) * UNIT_ROUNDOFF * np.abs(x.value).mean() / deviation
            slack += drift * (np.abs(weight) + drift * np.abs(scaled))
        return Known(scaled + bias, slack)

    def _head_norm(self, name: str, raw: Known) -> Known:
        """The norm of a whole head's q or k, where the model has one."""
        weight = self._vectors.get(f"{name}_norm.weight")
        if weight is None:
            return raw
        power = (raw.value * raw.value).mean() + self._config.norm_eps
        value, factor = raw.value / np.sqrt(power) * weight, np.abs(weight) / np.sqrt(power)
        drift = (np.abs(raw.value) * raw.slack).mean() / power + lost(len(value))  # of the head's scale, relative
        return Known(value, raw.slack * factor + np.abs(value) * drift)

    def _turn(self, name: str, x: Known, position: int) -> Known:
        """RoPE of sampled pairs: the first half of the values with the second."""
        c = self._config
        if c.rope is None:
            return x
        low, high = np.split(x.value, 2)
        dims = self._samples[f"{name}.weight"].index[: len(low)] % c.head_dim
        angles = rope_angles(c.rope, c.head_dim, [position], self._factors)[0, dims]
        cos, sin = np.cos(angles), np.sin(angles)
        slack = np.sum(np.split(x.slack + STEPS * UNIT_ROUNDOFF * np.abs(x.value), 2), axis=0)
        return Known(np.concatenate([low * cos - high * sin, high * cos + low * sin]), np.tile(slack, 2))

    def _inner(self, name: str, h: Known) -> Known:
        """What `ffn_down` multiplies."""
        up = self._dot(name + "ffn_up", h)
        if self._config.ffn == "gelu":
            return activated(up, lambda v: 0.5 * v * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (v + 0.044715 * v**3))))
        gate = activated(self._dot(name + "ffn_gate", h), lambda v: v * np.exp(-np.logaddexp(0.0, -v)))
        slack = np.abs(up.value) * gate.slack + (np.abs(gate.value) + gate.slack) * up.slack
        value = gate.value * up.value
        return Known(value, slack + STEPS * UNIT_ROUNDOFF * np.abs(value))

    def _check_witness(self, cached: Cached) -> None:
        w = self._witness
        if w is None:
            return
        keys, values = cached(w.block, w.slot, w.position, w.position)
        if keys.tobytes() != w.keys.tobytes() or values.tobytes() != w.values.tobytes():
            raise AuditFailed(
                f"audit: block {w.block}, KV cache, position {w.position} of slot {w.slot}: it is no longer what was "
                "written: the device or its memory is at fault"
            )

    def _check_attention(self, where: str, trace: Trace, slot: int, position: int, r: int, cached: Cached) -> None:
        """One head's output of row r, unless it sees too many positions."""
        c, window = self._config, self._config.windows[trace.block]
        first = max(0, position - window + 1) if window else 0
        if position - first >= MOST_SEEN:
            return
        keys, values = cached(trace.block, slot, first, position)
        head = int(self._rng.integers(c.n_heads))
        mine, group = _head(head, c.head_dim), _head(head * c.n_kv_heads // c.n_heads, c.head_dim)
        q, k, v = (m.astype(np.float64) for m in (trace.q[r, mine], keys[:, group], values[:, group]))
        scores = k @ q / np.sqrt(c.head_dim)
        odds = np.exp(scores - scores.max())
        odds /= odds.sum()
        blur = 2 * lost(c.head_dim) * (np.abs(k) @ np.abs(q)).max() / np.sqrt(c.head_dim) + lost(len(k))
        known = Known(odds @ v, 2 * blur * (odds @ np.abs(v)))
        self._compare(where, f"blk.{trace.block}.attention", trace.o[r], known, np.arange(mine.start, mine.stop))

    def _check_norm(self, where: str, name: str, x: Known, normed: Known) -> None:
        """A few channels of a norm whose mean and scale, which need all of them, are fitted: one factor for x * w and,
        in a LayerNorm, one for w."""
        index = self._samples[name.replace("ffn_norm", "ffn_down") + ".weight"].index
        weight, bias = self._vectors[f"{name}.weight"][index], self._vectors.get(f"{name}.bias")
        shift = 0.0 if bias is None else bias[index]
        basis = np.stack([x.value * weight, weight][: 2 if self._config.norm == "layer" else 1], axis=1)
        factors = np.linalg.lstsq(basis, normed.value[index] - shift, rcond=None)[0]
        fitted = basis @ factors + shift
        lost = np.abs(factors[0] * weight) * x.slack + STEPS * UNIT_ROUNDOFF * (np.abs(basis) @ np.abs(factors))
        slack = np.linalg.norm(lost + STEPS * UNIT_ROUNDOFF * np.abs(shift))
        self._compare(where, name, normed.value, Known(fitted, np.full(len(index), slack)), index)

    def _compare(
        self, where: str, name: str, got: np.ndarray, known: Known, index: NDArray[np.int64] | None = None
    ) -> None:
        """got: all channels of the row; known: those of `index`, by default the sampled ones of the layer `name`."""
        index = self._samples[f"{name}.weight"].index if index is None else index
        off = np.abs(got[index] - known.value)
        wrong = np.flatnonzero(~(off <= known.slack))  # a NaN is wrong
        if len(wrong):
            i = wrong[0]
            raise AuditFailed(
                f"audit: {_product(name)}, row {index[i]} ({where}): got {got[index[i]]:.9g}, expected "
                f"{known.value[i]:.9g} within {known.slack[i]:.2g}: the device, its memory or its kernel is at fault"
            )


def _product(name: str) -> str:
    """ "block 7, product ffn_up" of "blk.7.ffn_up"."""
    _, _, block_and_layer = name.rpartition("blk.")
    block, _, layer = block_and_layer.rpartition(".")
    return f"block {block}, product {layer}" if block else f"product {name}"


def _head(i: int, width: int) -> slice:
    return slice(i * width, (i + 1) * width)


def _pairs(rng: np.random.Generator, rows: int, head_dim: int, whole_head: bool) -> NDArray[np.int64]:
    """Rows of q or k: rotary pairs, the low halves first; or all of one head, which its norm needs."""
    heads, half = rows // head_dim, head_dim // 2
    if whole_head:
        return rng.integers(heads) * head_dim + np.arange(head_dim)
    pairs = rng.choice(heads * half, CHANNELS // 2, replace=heads * half < CHANNELS // 2)
    low = pairs // half * head_dim + pairs % half
    return np.concatenate([low, low + half])
