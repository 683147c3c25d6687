"""Qwen2 and 2.5: Llama with biases on q, k and v. Qwen3: without them, with a norm of each head's q and k."""

from dataclasses import replace

from pptasks.families.base import Family, Fields, Shapes
from pptasks.families.llama import LLAMA, NORMS, config_from_gguf, config_from_hf, linear, norm
from pptasks.modelinfo import ModelConfig


def _from_hf(architecture: str, fields: Fields, shapes: Shapes) -> ModelConfig:
    """`sliding_window` is given in all of them, and is in force only where `use_sliding_window` says so."""
    fields.neutral({"use_sliding_window": (False, True)})
    if not fields.get("use_sliding_window"):
        unused = ("sliding_window", "layer_types", "max_window_layers")
        fields = replace(fields, values={k: v for k, v in fields.values.items() if k not in unused})
    else:  # transformers' defaults of keys that are not there
        fields = replace(fields, values={"sliding_window": 4096, "max_window_layers": 28, **fields.values})
    return config_from_hf(architecture, fields, shapes, windowed=True)


QWEN2: Family = replace(
    LLAMA,
    name="qwen2",
    hf_model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    config_from_hf=lambda fields, shapes: _from_hf("qwen2", fields, shapes),
    config_from_gguf=lambda fields, shapes: config_from_gguf("qwen2", fields, shapes),
    block=(*NORMS, *linear(interleaved=False)),
)

QWEN3: Family = replace(
    LLAMA,
    name="qwen3",
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    config_from_hf=lambda fields, shapes: _from_hf("qwen3", fields, shapes),
    config_from_gguf=lambda fields, shapes: config_from_gguf("qwen3", fields, shapes),
    block=(
        *NORMS,
        norm("attn_q_norm", "self_attn.q_norm", "Hd"),
        norm("attn_k_norm", "self_attn.k_norm", "Hd"),
        *linear(interleaved=False),
    ),
)
