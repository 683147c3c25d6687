"""A model's numbers and weights for workers/reference.py, read without the project's own readers.

Safetensors by the `safetensors` package, GGUF by `gguf`; names, layouts and configurations are translated here, by
hand, so that a mistake in pptasks/models.py, pptasks/families or workers/weights.py cannot hide on both sides of a
comparison.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import safetensors

from pptasks.modelinfo import ModelConfig, Rope

Weights = dict[str, np.ndarray]

FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
ROTARY_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "transformer.": "",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.": "blk.",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # the causal mask, as early exports kept it beside the parameters
CONV1D = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


# --- a Hugging Face folder ------------------------------------------------------------------------------------------


def from_folder(folder: Path) -> tuple[ModelConfig, Weights]:
    """The configuration and the weights under their canonical names, in the types of the files."""
    raw = json.loads((folder / "config.json").read_text())
    stored = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in _arrays(file)}
    if raw["model_type"] == "gpt2":
        weights = _gpt2_weights(stored)
        return _gpt2_config(raw, weights), weights
    weights = {_renamed(name, ROTARY_NAMES): array for name, array in stored.items()}
    return _rotary_config(raw, weights), weights


def _arrays(file: Path) -> list[tuple[str, np.ndarray]]:
    entries = safetensors.deserialize(file.read_bytes())
    return [(name, np.frombuffer(t["data"], FLOATS[t["dtype"]]).reshape(t["shape"])) for name, t in entries]


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours, 1)
    return name


def _gpt2_weights(stored: Weights) -> Weights:
    """Conv1D keeps (in, out), for all of a block's four layers; `c_attn` is q, k and v side by side."""
    weights: Weights = {}
    for stored_name, array in stored.items():
        if not stored_name.endswith(GPT2_MASKS):
            name = _renamed(stored_name, GPT2_NAMES)
            weights[name] = array.T if name.endswith(CONV1D) else array
    return _split_qkv(weights)


def _split_qkv(weights: Weights) -> Weights:
    split: Weights = {}
    for name, array in weights.items():
        parts = np.split(array, 3) if ".attn_qkv." in name else [array]
        names = [name.replace("attn_qkv", f"attn_{x}") for x in "qkv"] if len(parts) == 3 else [name]
        split |= dict(zip(names, parts, strict=True))
    return split


def _gpt2_config(raw: dict[str, Any], weights: Weights) -> ModelConfig:
    return ModelConfig(
        architecture="gpt2",
        n_blocks=raw["n_layer"],
        dim=raw["n_embd"],
        n_heads=raw["n_head"],
        n_kv_heads=raw["n_head"],
        head_dim=raw["n_embd"] // raw["n_head"],
        ffn_dim=raw.get("n_inner") or 4 * raw["n_embd"],
        vocab_size=raw["vocab_size"],
        context=raw["n_positions"],
        norm="layer",
        norm_eps=raw["layer_norm_epsilon"],
        ffn="gelu",
        rope=None,
        windows=(0,) * raw["n_layer"],
        tied="output.weight" not in weights,
    )


def _rotary_config(raw: dict[str, Any], weights: Weights) -> ModelConfig:
    return ModelConfig(
        architecture=raw["model_type"],
        n_blocks=raw["num_hidden_layers"],
        dim=raw["hidden_size"],
        n_heads=raw["num_attention_heads"],
        n_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        context=raw["max_position_embeddings"],
        norm="rms",
        norm_eps=raw["rms_norm_eps"],
        ffn="swiglu",
        rope=_rope(raw),
        windows=tuple(_window(raw, i) for i in range(raw["num_hidden_layers"])),
        tied="output.weight" not in weights,
    )


def _rope(raw: dict[str, Any]) -> Rope:
    """Either spelling: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    fields = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {}), **raw.get("rope_parameters", {})}
    theta = fields["rope_theta"]
    match fields.get("rope_type", fields.get("type", "default")):
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, "linear", fields["factor"])
        case "llama3":
            low, high = fields["low_freq_factor"], fields["high_freq_factor"]
            return Rope(theta, "llama3", fields["factor"], low, high, fields["original_max_position_embeddings"])
        case other:
            raise ValueError(f"no golden has rope_type {other!r}")


def _window(raw: dict[str, Any], i: int) -> int:
    """Mistral has one in every block; Qwen where it is switched on, in the blocks named or from a first one on."""
    if raw["model_type"] == "mistral":
        return raw["sliding_window"] or 0
    if not raw.get("use_sliding_window"):
        return 0
    slides = raw["layer_types"][i] == "sliding_attention" if "layer_types" in raw else i >= raw["max_window_layers"]
    return raw["sliding_window"] if slides else 0


# --- a GGUF file ----------------------------------------------------------------------------------------------------


def from_gguf(path: Path) -> tuple[ModelConfig, Weights]:
    """The configuration and the weights, dequantised to float32, heads in half-split order."""
    reader = gguf.GGUFReader(path)
    raw = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    weights = _split_qkv(stored)
    config = _gguf_config(raw, weights)
    if config.architecture == "llama":
        for name in weights:
            heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2])
            if heads:
                weights[name] = half_split(weights[name], heads)
    return config, weights


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads Hd, ...) whose pairs lie side by side, (2i, 2i + 1), into pairs half a head apart, (i, i + Hd/2)."""
    return np.concatenate([half for head in np.split(rows, heads) for half in (head[0::2], head[1::2])])


def _gguf_config(raw: dict[str, Any], weights: Weights) -> ModelConfig:
    architecture = raw["general.architecture"]
    own = {name.removeprefix(architecture + "."): value for name, value in raw.items()}
    dim, n_heads, n_blocks = own["embedding_length"], own["attention.head_count"], own["block_count"]
    gpt2 = architecture == "gpt2"
    linear = own.get("rope.scaling.type") == "linear"
    theta = own.get("rope.freq_base", 10000.0)
    return ModelConfig(
        architecture=architecture,
        n_blocks=n_blocks,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=own.get("attention.head_count_kv", n_heads),
        head_dim=own.get("attention.key_length", dim // n_heads),
        ffn_dim=own["feed_forward_length"],
        vocab_size=len(weights["token_embd.weight"]),
        context=own["context_length"],
        norm="layer" if gpt2 else "rms",
        norm_eps=own["attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"],
        ffn="gelu" if gpt2 else "swiglu",
        rope=None if gpt2 else Rope(theta, "linear", own["rope.scaling.factor"]) if linear else Rope(theta),
        windows=(own.get("attention.sliding_window", 0),) * n_blocks,
        tied="output.weight" not in weights,
    )
