"""Mistral: Llama with a sliding window in some versions. A GGUF file of it calls itself llama."""

from dataclasses import replace

from pptasks.families.llama import LLAMA, config_from_hf

MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_model_type="mistral",
    hf_class="MistralForCausalLM",
    config_from_hf=lambda fields, shapes: config_from_hf("mistral", fields, shapes, windowed=True),
    in_gguf=False,
)
