"""GPT-2: LayerNorm with a bias, learned positions, q, k and v in one matrix, GELU.

Its folders store linear layers as (in, out) (transformers' Conv1D), its GGUF files as (out, in).
"""

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
    tied,
)
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, OUTPUT_NORM_BIAS, POSITIONS, ModelConfig

_FUSED = (("blk.{{i}}.attn_q.{kind}", "Q"), ("blk.{{i}}.attn_k.{kind}", "KV"), ("blk.{{i}}.attn_v.{kind}", "KV"))


def _norm(name: str, hf: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"blk.{{i}}.{name}.{kind}", f"h.{{i}}.{hf}.{kind}", ("D",)) for kind in ("weight", "bias"))


def _linear(name: str, hf: str, rows: str, columns: str) -> tuple[TensorSpec, ...]:
    def spec(kind: str, shape: tuple[str, ...]) -> TensorSpec:
        parts = tuple((part.format(kind=kind), size) for part, size in _FUSED) if rows == "QKV" else ()
        return TensorSpec(
            f"blk.{{i}}.{name}.{kind}",
            f"h.{{i}}.{hf}.{kind}",
            shape,
            optional=kind == "bias",
            conv1d=kind == "weight",
            parts=parts,
        )

    return spec("weight", (rows, columns)), spec("bias", (rows,))


def _from_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.neutral({
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "quantization_config": (),
        "tie_word_embeddings": (False, True),
    })  # fmt: skip
    dim, n_heads = fields.integer("n_embd", MAX_WIDTH), fields.integer("n_head", MAX_WIDTH)
    return _config(
        dim,
        n_heads,
        head_dim(fields, "head_dim", dim, n_heads),
        n_blocks=fields.integer("n_layer", MAX_BLOCKS),
        ffn_dim=fields.integer("n_inner", MAX_WIDTH, 4 * dim),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        context=fields.integer("n_positions", MAX_CONTEXT),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tied=tied(fields, shapes),
    )


def _from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    dim, n_heads = fields.integer("embedding_length", MAX_WIDTH), fields.integer("attention.head_count", MAX_WIDTH)
    return _config(
        dim,
        n_heads,
        head_dim(fields, "attention.key_length", dim, n_heads),
        n_blocks=fields.integer("block_count", MAX_BLOCKS),
        ffn_dim=fields.integer("feed_forward_length", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB, shapes.get(EMBEDDING, (0,))[0]),
        context=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_epsilon"),
        tied=OUTPUT not in shapes,
    )


def _config(
    dim: int,
    n_heads: int,
    width: int,
    *,
    n_blocks: int,
    ffn_dim: int,
    vocab_size: int,
    context: int,
    norm_eps: float,
    tied: bool,
) -> ModelConfig:
    return ModelConfig(
        architecture="gpt2",
        n_blocks=n_blocks,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=width,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        context=context,
        norm="layer",
        norm_eps=norm_eps,
        ffn="gelu",
        rope=None,
        windows=(0,) * n_blocks,
        tied=tied,
    )


GPT2 = Family(
    name="gpt2",
    hf_model_type="gpt2",
    hf_class="GPT2LMHeadModel",
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    embedding=(TensorSpec(EMBEDDING, "wte.weight", ("V", "D")), TensorSpec(POSITIONS, "wpe.weight", ("T", "D"))),
    block=(
        *_norm("attn_norm", "ln_1"),
        *_linear("attn_qkv", "attn.c_attn", "QKV", "D"),
        *_linear("attn_output", "attn.c_proj", "D", "Q"),
        *_norm("ffn_norm", "ln_2"),
        *_linear("ffn_up", "mlp.c_fc", "F", "D"),
        *_linear("ffn_down", "mlp.c_proj", "D", "F"),
    ),
    readout=(
        TensorSpec(OUTPUT_NORM, "ln_f.weight", ("D",)),
        TensorSpec(OUTPUT_NORM_BIAS, "ln_f.bias", ("D",)),
        TensorSpec(OUTPUT, "lm_head.weight", ("V", "D")),
    ),
    hf_prefixes=("transformer.", ""),
    hf_ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask, which older exports stored
)
