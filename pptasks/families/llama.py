"""Llama 2 and 3.x and what is built like them: SmolLM, TinyLlama. Also what the other families share with it."""

from pptasks.families.base import (
    MAX_BLOCKS,
    MAX_CONTEXT,
    MAX_VOCAB,
    MAX_WIDTH,
    Family,
    Fields,
    Shapes,
    TensorSpec,
    head_dim,
    rope_from_gguf,
    rope_from_hf,
    tied,
    windows_from_hf,
)
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ROPE_FACTORS, ModelConfig

_LINEAR = {  # name, and a folder's name, of each linear layer of a block: (rows, columns)
    ("attn_q", "self_attn.q_proj"): ("Q", "D"),
    ("attn_k", "self_attn.k_proj"): ("KV", "D"),
    ("attn_v", "self_attn.v_proj"): ("KV", "D"),
    ("attn_output", "self_attn.o_proj"): ("D", "Q"),
    ("ffn_gate", "mlp.gate_proj"): ("F", "D"),
    ("ffn_up", "mlp.up_proj"): ("F", "D"),
    ("ffn_down", "mlp.down_proj"): ("D", "F"),
}
_HEADS = {"attn_q": "n_heads", "attn_k": "n_kv_heads"}


def norm(name: str, hf: str, size: str = "D") -> TensorSpec:
    return TensorSpec(f"blk.{{i}}.{name}.weight", f"model.layers.{{i}}.{hf}.weight", (size,))


def linear(*, interleaved: bool) -> tuple[TensorSpec, ...]:
    """The linear layers of a block, each with the bias that a file may have.

    interleaved: GGUF stores the rotary pairs of this architecture's q and k side by side.
    """
    specs = []
    for (name, hf), (rows, columns) in _LINEAR.items():
        heads = _HEADS.get(name, "") if interleaved else ""
        names = f"blk.{{i}}.{name}", f"model.layers.{{i}}.{hf}"
        specs.append(TensorSpec(f"{names[0]}.weight", f"{names[1]}.weight", (rows, columns), heads))
        specs.append(TensorSpec(f"{names[0]}.bias", f"{names[1]}.bias", (rows,), heads, optional=True))
    return tuple(specs)


NORMS = norm("attn_norm", "input_layernorm"), norm("ffn_norm", "post_attention_layernorm")
EMBEDDINGS = (
    TensorSpec(EMBEDDING, "model.embed_tokens.weight", ("V", "D")),
    TensorSpec(ROPE_FACTORS, "", ("Hd/2",), optional=True),  # in GGUF files only
)
READOUT = (
    TensorSpec(OUTPUT_NORM, "model.norm.weight", ("D",)),
    TensorSpec(OUTPUT, "lm_head.weight", ("V", "D")),
)
INV_FREQ = ("rotary_emb.inv_freq",)  # a table that older exports stored; it follows from rope_theta


def config_from_hf(architecture: str, fields: Fields, shapes: Shapes, windowed: bool) -> ModelConfig:
    """windowed: `sliding_window`, where it is given, holds for every block that `layer_types` does not exempt."""
    fields.neutral({
        "hidden_act": ("silu",), "quantization_config": (), "partial_rotary_factor": (1.0,),
        "tie_word_embeddings": (False, True),
    })  # fmt: skip
    dim, n_heads = fields.integer("hidden_size", MAX_WIDTH), fields.integer("num_attention_heads", MAX_WIDTH)
    n_blocks = fields.integer("num_hidden_layers", MAX_BLOCKS)
    first = fields.get("max_window_layers")
    if first:
        first = fields.integer("max_window_layers", MAX_BLOCKS)
    return ModelConfig(
        architecture=architecture,
        n_blocks=n_blocks,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", MAX_WIDTH, n_heads),
        head_dim=head_dim(fields, "head_dim", dim, n_heads),
        ffn_dim=fields.integer("intermediate_size", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        context=fields.integer("max_position_embeddings", MAX_CONTEXT, 2048),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        ffn="swiglu",
        rope=rope_from_hf(fields),
        windows=windows_from_hf(fields, n_blocks, lambda i: windowed and i >= (first or 0)),
        tied=tied(fields, shapes),
    )


def config_from_gguf(architecture: str, fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.neutral({
        "expert_count": (0,), "use_parallel_residual": (False,), "attention.sliding_window_pattern": (),
        "attention.causal": (True,), "attention.clamp_kqv": (0.0,), "attention.scale": (0.0,),
        "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0),
    })  # fmt: skip
    dim, n_heads = fields.integer("embedding_length", MAX_WIDTH), fields.integer("attention.head_count", MAX_WIDTH)
    width = head_dim(fields, "attention.key_length", dim, n_heads)
    fields.neutral({"attention.value_length": (width,), "rope.dimension_count": (width,)})
    n_blocks = fields.integer("block_count", MAX_BLOCKS)
    window = fields.get("attention.sliding_window")
    window = fields.integer("attention.sliding_window", MAX_CONTEXT) if window else 0
    return ModelConfig(
        architecture=architecture,
        n_blocks=n_blocks,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", MAX_WIDTH, n_heads),
        head_dim=width,
        ffn_dim=fields.integer("feed_forward_length", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB, shapes.get(EMBEDDING, (0,))[0]),
        context=fields.integer("context_length", MAX_CONTEXT),
        norm="rms",
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        ffn="swiglu",
        rope=rope_from_gguf(fields),
        windows=(window,) * n_blocks,
        tied=OUTPUT not in shapes,
    )


def _from_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.neutral({"sliding_window": ()})
    return config_from_hf("llama", fields, shapes, windowed=False)


LLAMA = Family(
    name="llama",
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    config_from_hf=_from_hf,
    config_from_gguf=lambda fields, shapes: config_from_gguf("llama", fields, shapes),
    embedding=EMBEDDINGS,
    block=(*NORMS, *linear(interleaved=True)),
    readout=READOUT,
    hf_ignored=INV_FREQ,
)
