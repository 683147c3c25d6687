"""What a family of models is, as data: how its configuration is spelled, and which tensors it has.

Nothing here reads a file: `models.py` does, and asks. A property that changes the result and that we do not compute is
refused by name; ignored, it would still write fluent text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pptasks.errors import ModelFileError, Unsupported
from pptasks.modelinfo import ModelConfig, Rope

Shapes = Mapping[str, tuple[int, ...]]  # the file's own tensor names -> row-major shape

MAX_BLOCKS = 1024
MAX_WIDTH = 1 << 20  # of a hidden state, a head, a feed-forward layer
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 26
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Fields:
    """Named values of a configuration, checked as they are taken. Every error names the file and the field."""

    source: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def integer(self, name: str, hi: int, default: int | None = None) -> int:
        """An integer from 1 to `hi`; absent or null: the default, or ModelFileError where there is none."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= hi:
            raise ModelFileError(f"{self.source}: {self.prefix}{name} is {short(value)}, not an integer of 1 to {hi}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or value is None or not 0 < value < math.inf:
            raise ModelFileError(f"{self.source}: {self.prefix}{name} is {short(value)}, not a number above 0")
        return float(value)

    def neutral(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Unsupported if a field has a value other than those allowed; an absent or null field is fine."""
        for name, values in allowed.items():
            value = self.get(name)
            if value is not None and value not in values:
                wanted = " or ".join(short(v) for v in values) or "nothing"
                raise Unsupported(f"{self.source}: {self.prefix}{name} is {short(value)}; supported: {wanted}")


def short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a family. `{i}` in a name stands for the block."""

    name: str  # canonical, and GGUF's
    hf: str
    shape: tuple[str, ...]  # row-major, in the words of `dims`
    rotary_heads: str = ""  # "n_heads" or "n_kv_heads": GGUF stores its rows with interleaved rotary pairs
    optional: bool = False  # the file decides, for all blocks alike
    conv1d: bool = False  # may be stored as (in, out): the file decides, for all such tensors alike
    parts: tuple[tuple[str, str], ...] = ()  # of a fused tensor: (canonical name, rows in the words of `dims`)

    def of_block(self, i: int) -> "TensorSpec":
        parts = tuple((name.format(i=i), rows) for name, rows in self.parts)
        return replace(self, name=self.name.format(i=i), hf=self.hf.format(i=i), parts=parts)


@dataclass(frozen=True)
class Family:
    """One kind of transformer. Its blocks are computed by the code of all (workers/): ModelConfig says what differs."""

    name: str
    hf_model_type: str
    hf_class: str
    config_from_hf: Callable[[Fields, Shapes], ModelConfig]  # config.json
    config_from_gguf: Callable[[Fields, Shapes], ModelConfig]  # metadata under "{name}."
    embedding: tuple[TensorSpec, ...]
    block: tuple[TensorSpec, ...]
    readout: tuple[TensorSpec, ...]  # the output head last
    in_gguf: bool = True  # GGUF has an architecture of this name
    hf_prefixes: tuple[str, ...] = ("",)  # that stand before all names of a folder's tensors; the first that fits
    hf_ignored: tuple[str, ...] = ()  # suffixes of tensors that carry no weight


def dims(config: ModelConfig) -> Mapping[str, int]:
    """The words in which a TensorSpec gives its shape."""
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    sizes = {"V": c.vocab_size, "D": c.dim, "Q": q, "KV": kv, "QKV": q + 2 * kv, "F": c.ffn_dim}
    return sizes | {"Hd": c.head_dim, "Hd/2": c.head_dim // 2, "T": c.context}


def check(config: ModelConfig, source: Path) -> ModelConfig:
    """`config`, if its numbers agree with each other."""
    if config.n_heads % config.n_kv_heads:
        raise ModelFileError(
            f"{source}: {config.n_heads} heads cannot share {config.n_kv_heads} key/value heads evenly"
        )
    if config.rope and config.head_dim % 2:
        raise ModelFileError(f"{source}: head width {config.head_dim} is odd; rotary pairs need an even one")
    return config


def head_dim(fields: Fields, name: str, dim: int, n_heads: int) -> int:
    """The width of a head that `name` gives, or an even share of the hidden state."""
    if fields.get(name) is None and dim % n_heads:
        raise ModelFileError(
            f"{fields.source}: width {dim} is not a multiple of {n_heads} heads, and {fields.prefix}{name} is missing"
        )
    return fields.integer(name, MAX_WIDTH, max(1, dim // n_heads))


def tied(fields: Fields, shapes: Shapes) -> bool:
    """Whether the output head is the embedding: not where a folder stores a head of its own, whatever it says."""
    return "lm_head.weight" not in shapes and fields.get("tie_word_embeddings") is not False


def rope_from_hf(fields: Fields) -> Rope:
    """Both spellings: `rope_theta` + `rope_scaling`, and since transformers 5 `rope_parameters`."""
    theta = fields.number("rope_theta", 10000.0)
    given = {name: value for name in ("rope_parameters", "rope_scaling") if (value := fields.get(name))}
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise Unsupported(f"{fields.source}: rope_parameters and rope_scaling say different things; remove one")
    if not given:
        return Rope(theta)
    name, values = next(iter(given.items()))
    if not isinstance(values, dict):
        raise ModelFileError(f"{fields.source}: {name} is {short(values)}, not an object")
    if any(isinstance(v, dict) for v in values.values()):
        raise Unsupported(f"{fields.source}: {name} differs from layer to layer; supported: one for all")
    inner = Fields(fields.source, {f"{name}.{k}": v for k, v in values.items()}, f"{name}.")
    inner.neutral({"partial_rotary_factor": (1.0,), "attention_factor": (1.0,)})
    theta = inner.number("rope_theta", theta)
    kind_name = "rope_type" if inner.get("rope_type") is not None else "type"
    inner.neutral({kind_name: ("default", "linear", "llama3")})
    kind = inner.get(kind_name)
    if kind == "linear":
        return Rope(theta, "linear", inner.number("factor"))
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            raise ModelFileError(f"{fields.source}: {name}.high_freq_factor {high} is not above low_freq_factor {low}")
        original = inner.integer("original_max_position_embeddings", MAX_CONTEXT)
        return Rope(theta, "llama3", inner.number("factor"), low, high, original)
    inner.neutral({"factor": (1.0,)})
    return Rope(theta)


def rope_from_gguf(fields: Fields) -> Rope:
    fields.neutral({"rope.scaling.type": ("none", "linear"), "rope.scaling.attn_factor": (1.0,)})
    theta = fields.number("rope.freq_base", 10000.0)
    if fields.get("rope.scaling.type") == "linear":
        return Rope(theta, "linear", fields.number("rope.scaling.factor", 1.0))
    if fields.get("rope.scaling.type") is None and fields.get("rope.scale_linear") is not None:  # older files
        return Rope(theta, "linear", fields.number("rope.scale_linear"))
    fields.neutral({"rope.scaling.factor": (1.0,)})
    return Rope(theta)


def windows_from_hf(fields: Fields, n_blocks: int, windowed: Callable[[int], bool]) -> tuple[int, ...]:
    """Each block's attention window. `windowed` says which blocks have it where there is no `layer_types`."""
    window = fields.integer("sliding_window", MAX_CONTEXT, None) if fields.get("sliding_window") is not None else 0
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(window if windowed(i) else 0 for i in range(n_blocks))
    sizes = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != n_blocks:
        raise ModelFileError(
            f"{fields.source}: layer_types is {short(kinds)}, not one name for each of {n_blocks} blocks"
        )
    for kind in kinds:
        if not isinstance(kind, str) or kind not in sizes or (kind == "sliding_attention" and not window):
            raise Unsupported(f"{fields.source}: layer_types holds {short(kind)}; supported: {', '.join(sizes)}")
    return tuple(sizes[kind] for kind in kinds)
