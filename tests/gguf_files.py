"""Write a model's Hugging Face folder as a GGUF file, as llama.cpp's converter would: for tests, with tiny models.

Names of tensors and keys come from the `gguf` package, not from `pptasks`: a reader is tested against them. What the
converter (convert_hf_to_gguf.py) does beyond renaming:

- "llama": the rows of q and k, and their biases, are reordered, since there the pairs that RoPE turns lie side by side
  and in the folder half a head apart.
- "gpt2": Conv1D weights, (in, out) in the folder, are transposed.
- Llama 3's RoPE scaling becomes a tensor, rope_freqs.weight: what each frequency is divided by.
- Vectors and learned positions stay F32. A row that is no whole number of a type's groups gets the type in FALLBACKS.
"""

import json
from collections.abc import Iterator
from math import tau
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_quants import quantize_k

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2"}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # in the folders of GPT-2's first export; no parameters
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # llama-quant.cpp, tensor_type_fallback; else F16


def write_gguf(folder: Path, out: Path, dtype: str = "F32", split: int | None = None) -> Path:
    """Convert `folder` to the file `out` and return its path.

    dtype: of the matrices; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K. split: so many files,
    named STEM-00001-of-0000N.gguf; the first of them is returned. ValueError: the tensors cannot be split so.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    tensors = dict(_converted(folder, config, arch))
    per_file = -(-len(tensors) // (split or 1))
    if split and -(-len(tensors) // per_file) != split:
        raise ValueError(f"{len(tensors)} tensors cannot be split into {split} files of {per_file} and a rest")
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=per_file if split else 0)
    writer.add_name(folder.name)
    (_add_gpt2_config if config["model_type"] == "gpt2" else _add_config)(writer, config)
    _add_tokenizer(writer, folder, config)
    for name, values in tensors.items():
        data, kind = _encode(values, "F32" if name == "position_embd.weight" else dtype)
        writer.add_tensor(name, data, raw_dtype=kind)
    files = writer.format_shard_names(out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return files[0]


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder's safetensors files, as float32 (exact: the files hold F32, F16 or BF16)."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = info["data_offsets"]
                values = _floats(data[start + begin : start + end], info["dtype"])
                tensors[name] = values.reshape(info["shape"])
    return tensors


def _floats(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")


def _converted(folder: Path, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> Iterator[tuple[str, np.ndarray]]:
    """(GGUF's name, float32 values) of every tensor of the file, in the folder's order."""
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or config["n_layer"])
    gpt2 = arch == gguf.MODEL_ARCH.GPT2
    for hf, values in read_folder(folder).items():
        if gpt2 and hf.endswith(GPT2_MASKS):
            continue
        full = hf if not gpt2 or hf.startswith(("transformer.", "lm_head.")) else f"transformer.{hf}"
        name = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{folder}: {hf!r} has no name in GGUF")
        if gpt2 and hf.endswith(CONV1D):
            values = np.ascontiguousarray(values.T)
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in hf:
            values = interleaved(values, config["num_attention_heads"])
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in hf:
            values = interleaved(values, config["num_key_value_heads"])
        yield name, values
    if not gpt2 and _rope(config)["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_factors(_rope(config), _head_dim(config))


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k with the two of each rotary pair side by side: within a head of D rows, 0, D/2, 1, D/2 + 1, ..."""
    pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """1 for short waves, `factor` for long ones, between them a blend of both that is linear in the frequency."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / tau  # within the context of the first training
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The folder's RoPE parameters, as transformers 5 or, at the top of the configuration, 4 wrote them."""
    rope = config.get("rope_parameters")
    rope = rope or {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = _rope(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if ARCHITECTURES[config["model_type"]] == "LLAMA":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(_head_dim(config))
        if config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_gpt2_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """The folder's byte-level BPE; entries that only the embedding has are unused ones."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {t["id"]: t["content"] for t in tokenizer["added_tokens"]}
    words = {i: word for word, i in tokenizer["model"]["vocab"].items()} | special
    ids = range(config["vocab_size"])
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types(
        [kinds.CONTROL if i in special else kinds.NORMAL if i in words else kinds.UNUSED for i in ids]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _encode(values: np.ndarray, dtype: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    if values.ndim == 1:
        dtype = "F32"
    while values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][0]:
        dtype = FALLBACKS.get(dtype, "F16")
    kind = gguf.GGMLQuantizationType[dtype]
    return (quantize_k(values, dtype) if dtype.endswith("_K") else gguf.quants.quantize(values, kind)), kind
