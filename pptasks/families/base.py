"""What we know about each family of models, as data: how its configuration is spelled, and which tensors it has.

A new family is a new `Family` beside LLAMA and an entry in FAMILIES. Nothing here reads a file: `models.py` does, and
asks. A property that changes the result and that we do not compute is refused by name; ignored, it would still write
fluent text.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pptasks.errors import ModelFileError, Unsupported
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ModelConfig

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
            raise ModelFileError(f"{self.source}: {self.prefix}{name} is {_short(value)}, not an integer of 1 to {hi}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or value is None or not 0 < value < math.inf:
            raise ModelFileError(f"{self.source}: {self.prefix}{name} is {_short(value)}, not a number above 0")
        return float(value)

    def neutral(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Unsupported if a field has a value other than those allowed; an absent or null field is fine."""
        for name, values in allowed.items():
            value = self.get(name)
            if value is not None and value not in values:
                wanted = " or ".join(_short(v) for v in values) or "nothing"
                raise Unsupported(f"{self.source}: {self.prefix}{name} is {_short(value)}; supported: {wanted}")


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a family. `{i}` in a name stands for the block."""

    name: str  # canonical, and GGUF's
    hf: str
    shape: tuple[str, ...]  # row-major, in the words of `dims`
    rotary_heads: str = ""  # "n_heads" or "n_kv_heads": GGUF stores its rows with interleaved rotary pairs


@dataclass(frozen=True)
class Family:
    architecture: str  # the canonical name, and GGUF's `general.architecture`
    hf_model_type: str
    hf_class: str
    config_from_hf: Callable[[Fields, Shapes], ModelConfig]  # config.json
    config_from_gguf: Callable[[Fields, Shapes], ModelConfig]  # metadata under "{architecture}."
    embedding: TensorSpec
    block: tuple[TensorSpec, ...]
    readout: tuple[TensorSpec, ...]  # the output head last
    hf_ignored: tuple[str, ...] = ()  # suffixes of tensors that carry no weight

    def specs(self, config: ModelConfig) -> Iterator[TensorSpec]:
        """Every tensor a model of this configuration has, with `{i}` filled in."""
        yield self.embedding
        for i in range(config.n_blocks):
            for s in self.block:
                yield TensorSpec(s.name.format(i=i), s.hf.format(i=i), s.shape, s.rotary_heads)
        yield from self.readout[:-1] if config.tied else self.readout


def dims(config: ModelConfig) -> Mapping[str, int]:
    """The words in which a TensorSpec gives its shape."""
    c = config
    return {"V": c.vocab_size, "D": c.dim, "Q": c.n_heads * c.head_dim, "KV": c.n_kv_heads * c.head_dim, "F": c.ffn_dim}


def check(config: ModelConfig, source: Path) -> ModelConfig:
    """`config`, if its numbers agree with each other."""
    if config.n_heads % config.n_kv_heads:
        raise ModelFileError(
            f"{source}: {config.n_heads} heads cannot share {config.n_kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{source}: head width {config.head_dim} is odd; rotary pairs need an even one")
    return config


def _head_dim(fields: Fields, name: str, dim: int, n_heads: int) -> int:
    if fields.get(name) is None and dim % n_heads:
        raise ModelFileError(
            f"{fields.source}: width {dim} is not a multiple of {n_heads} heads, and {fields.prefix}{name} is missing"
        )
    return fields.integer(name, MAX_WIDTH, max(1, dim // n_heads))


def _hf_rope_theta(fields: Fields) -> float:
    """Both spellings: `rope_theta` + `rope_scaling`, and since transformers 5 `rope_parameters`."""
    theta = fields.number("rope_theta", 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelFileError(f"{fields.source}: {name} is {_short(rope)}, not an object")
        inner = Fields(fields.source, {f"{name}.{k}": v for k, v in rope.items()}, f"{name}.")
        inner.neutral(
            {"rope_type": ("default",), "type": ("default",), "factor": (1.0,), "partial_rotary_factor": (1.0,)}
        )
        if any(isinstance(v, dict) for v in rope.values()):
            raise Unsupported(f"{fields.source}: {name} differs from layer to layer; supported: one for all")
        theta = inner.number("rope_theta", theta)
    return theta


def _llama_from_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.neutral({
        "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (),
        "quantization_config": (), "partial_rotary_factor": (1.0,), "tie_word_embeddings": (False, True),
    })  # fmt: skip
    if any(kind != "full_attention" for kind in fields.get("layer_types") or ()):
        raise Unsupported(
            f"{fields.source}: layer_types is {_short(fields.get('layer_types'))}; supported: full_attention"
        )
    dim, n_heads = fields.integer("hidden_size", MAX_WIDTH), fields.integer("num_attention_heads", MAX_WIDTH)
    tied = fields.get("tie_word_embeddings")
    return ModelConfig(
        architecture="llama",
        n_blocks=fields.integer("num_hidden_layers", MAX_BLOCKS),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", MAX_WIDTH, n_heads),
        head_dim=_head_dim(fields, "head_dim", dim, n_heads),
        ffn_dim=fields.integer("intermediate_size", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        context=fields.integer("max_position_embeddings", MAX_CONTEXT, 2048),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_hf_rope_theta(fields),
        tied="lm_head.weight" not in shapes if tied is None else bool(tied),
    )


def _llama_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.neutral({
        "rope.scaling.type": ("none",), "rope.scaling.factor": (1.0,), "rope.scale_linear": (1.0,),
        "rope.scaling.attn_factor": (1.0,), "expert_count": (0,), "use_parallel_residual": (False,),
        "attention.sliding_window": (0,), "attention.causal": (True,), "attention.clamp_kqv": (0.0,),
        "attention.scale": (0.0,), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
    })  # fmt: skip
    dim, n_heads = fields.integer("embedding_length", MAX_WIDTH), fields.integer("attention.head_count", MAX_WIDTH)
    head_dim = _head_dim(fields, "attention.key_length", dim, n_heads)
    fields.neutral({"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)})
    rows = shapes.get(EMBEDDING, (0,))[0]
    return ModelConfig(
        architecture="llama",
        n_blocks=fields.integer("block_count", MAX_BLOCKS),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", MAX_WIDTH, n_heads),
        head_dim=head_dim,
        ffn_dim=fields.integer("feed_forward_length", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB, rows),
        context=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        tied=OUTPUT not in shapes,
    )


LLAMA = Family(
    architecture="llama",
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    config_from_hf=_llama_from_hf,
    config_from_gguf=_llama_from_gguf,
    embedding=TensorSpec(EMBEDDING, "model.embed_tokens.weight", ("V", "D")),
    block=(
        TensorSpec("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight", ("D",)),
        TensorSpec("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight", ("Q", "D"), "n_heads"),
        TensorSpec("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight", ("KV", "D"), "n_kv_heads"),
        TensorSpec("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight", ("KV", "D")),
        TensorSpec("blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight", ("D", "Q")),
        TensorSpec("blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight", ("D",)),
        TensorSpec("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight", ("F", "D")),
        TensorSpec("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight", ("F", "D")),
        TensorSpec("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight", ("D", "F")),
    ),
    readout=(
        TensorSpec(OUTPUT_NORM, "model.norm.weight", ("D",)),
        TensorSpec(OUTPUT, "lm_head.weight", ("V", "D")),
    ),
    hf_ignored=("rotary_emb.inv_freq",),  # a table that older exports stored; it follows from rope_theta
)

FAMILIES: tuple[Family, ...] = (LLAMA,)
