"""Mistral: Llama with a sliding window in some versions. A GGUF file of it calls itself llama."""

from dataclasses import replace

from pptasks.families.base import Fields, Shapes
from pptasks.families.llama import LLAMA, config_from_hf
from pptasks.modelinfo import ModelConfig


def _from_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """A configuration without the key has transformers' default window; null is none."""
    fields = replace(fields, values={"sliding_window": 4096, **fields.values})
    return config_from_hf("mistral", fields, shapes, windowed=True)


MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_model_type="mistral",
    hf_class="MistralForCausalLM",
    config_from_hf=_from_hf,
    in_gguf=False,
)
