"""What the tests write as GGUF is what the format's own package reads, and holds the folder's numbers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pptasks.gguf import Array, read_header
from tests.gguf_files import interleaved, read_folder, write_gguf
from tests.gguf_quants import quantize_k

# Root mean square of a type's errors over that of the weights, which are normally distributed; measured, and a little
# room. A nibble, a high bit or a scale in the wrong place makes it about 1.
ERRORS = {
    "F32": 0.0, "F16": 1e-6, "BF16": 0.0, "Q8_0": 0.006, "Q5_0": 0.045, "Q5_1": 0.041, "Q4_0": 0.09, "Q4_1": 0.082,
    "Q4_K": 0.082, "Q5_K": 0.041, "Q6_K": 0.02,
}  # fmt: skip
HEADERS = ("llama-tied", "mistral-window", "qwen2-bias", "qwen3-tied", "llama3-rope", "llama-bias", "gpt2-no-prefix")
WIDE = "llama-wide-bf16"  # rows of 256: a block of the K types


def tensors_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and float32 values of each tensor, read by the format's own package."""
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type))
        for t in gguf.GGUFReader(path).tensors
    }


def metadata_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", HEADERS)
def test_our_header_agrees_with_the_package(goldens: Path, tmp_path: Path, name: str) -> None:
    path = write_gguf(goldens / name, tmp_path / "m.gguf")
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.dtype, t.shape[::-1], t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    assert {k: list(v.decode()) if isinstance(v, Array) else v for k, v in ours.metadata.items()} == {
        k: v for k, v in metadata_of(path).items() if not k.startswith("GGUF.")
    }


def test_llama_keeps_every_number(goldens: Path, tmp_path: Path) -> None:
    stored = read_folder(goldens / "llama-bias")
    written = tensors_of(write_gguf(goldens / "llama-bias", tmp_path / "m.gguf"))
    assert len(written) == len(stored)
    assert {kind for kind, _ in written.values()} == {"F32"}
    layer, block = "model.layers.1.", "blk.1."
    for hf, name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        layer + "input_layernorm.weight": block + "attn_norm.weight",
        layer + "post_attention_layernorm.weight": block + "ffn_norm.weight",
        layer + "self_attn.v_proj.bias": block + "attn_v.bias",
        layer + "self_attn.o_proj.bias": block + "attn_output.bias",
        layer + "mlp.gate_proj.weight": block + "ffn_gate.weight",
        layer + "mlp.up_proj.weight": block + "ffn_up.weight",
        layer + "mlp.down_proj.bias": block + "ffn_down.bias",
    }.items():
        assert np.array_equal(written[name][1], stored[hf]), name
    for part, heads in (("q", 4), ("k", 2)):
        for kind in ("weight", "bias"):
            values = stored[f"{layer}self_attn.{part}_proj.{kind}"]
            got = written[f"{block}attn_{part}.{kind}"][1]
            assert np.array_equal(got, interleaved(values, heads))
            head = got.reshape(heads, -1, *got.shape[1:])[-1]  # its row 2i + h is row i of half h
            half = head.shape[0] // 2
            assert np.array_equal(np.concatenate([head[0::2], head[1::2]]), values[-2 * half :])


def test_qwen_keeps_the_order_of_its_rows(goldens: Path, tmp_path: Path) -> None:
    stored = read_folder(goldens / "qwen3-tied")
    written = tensors_of(write_gguf(goldens / "qwen3-tied", tmp_path / "m.gguf", "F16"))
    assert "output.weight" not in written
    for part in ("q_norm", "k_norm"):
        values = stored[f"model.layers.2.self_attn.{part}.weight"]
        assert np.array_equal(written[f"blk.2.attn_{part}.weight"][1], values)
    assert written["blk.2.attn_q.weight"][0] == "F16"
    assert np.array_equal(written["blk.2.attn_q.weight"][1], stored["model.layers.2.self_attn.q_proj.weight"])


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("gpt2-no-prefix", "")])
def test_gpt2_is_transposed(goldens: Path, tmp_path: Path, name: str, prefix: str) -> None:
    stored = read_folder(goldens / name)
    written = tensors_of(write_gguf(goldens / name, tmp_path / "m.gguf", "BF16"))
    qkv = stored[f"{prefix}h.1.attn.c_attn.weight"]
    assert written["blk.1.attn_qkv.weight"][1].shape == qkv.shape[::-1]
    assert np.allclose(written["blk.1.attn_qkv.weight"][1], qkv.T, rtol=2**-8)
    assert np.array_equal(written["blk.1.ffn_up.bias"][1], stored[f"{prefix}h.1.mlp.c_fc.bias"])
    kind, positions = written["position_embd.weight"]
    assert kind == "F32"
    assert np.array_equal(positions, stored[f"{prefix}wpe.weight"])
    assert not any("mask" in n or n.endswith("attn.bias") for n in written)


def test_untied_models_have_their_readout(goldens: Path, tmp_path: Path) -> None:
    for name, hf in (("gpt2-untied-bf16", "lm_head.weight"), ("qwen2-untied-f16", "lm_head.weight")):
        written = tensors_of(write_gguf(goldens / name, tmp_path / f"{name}.gguf"))
        assert np.array_equal(written["output.weight"][1], read_folder(goldens / name)[hf])


def test_settings_of_the_families(goldens: Path, tmp_path: Path) -> None:
    def settings(name: str) -> dict[str, Any]:
        return metadata_of(write_gguf(goldens / name, tmp_path / f"{name}.gguf"))

    mistral = settings("mistral-window")
    assert mistral["general.architecture"] == "llama"
    assert mistral["llama.attention.sliding_window"] == 8
    assert "llama.attention.sliding_window" not in settings("mistral-no-window")
    linear = settings("llama-linear-rope")
    assert (linear["llama.rope.scaling.type"], linear["llama.rope.scaling.factor"]) == ("linear", 4.0)
    head_dim = settings("llama-headdim-f16")
    assert (head_dim["llama.attention.key_length"], head_dim["llama.rope.dimension_count"]) == (24, 24)
    assert (head_dim["llama.attention.head_count"], head_dim["llama.attention.head_count_kv"]) == (4, 1)
    gpt2 = settings("gpt2-untied-bf16")
    assert (gpt2["gpt2.feed_forward_length"], gpt2["gpt2.context_length"]) == (96, 128)


def test_rope_factors_are_llama_3s(goldens: Path, tmp_path: Path) -> None:
    """Head of 24, base 500000, 32 positions: waves of 6.3 (kept), 18.8 (between), 56 and more (slowed, 8 times)."""
    written = tensors_of(write_gguf(goldens / "llama3-rope", tmp_path / "m.gguf", "F16"))
    kind, factors = written["rope_freqs.weight"]
    assert (kind, factors.shape) == ("F32", (12,))
    assert factors[0] == 1
    smooth = (32 / (2 * np.pi * 500000 ** (2 / 24)) - 1) / 3
    assert factors[1] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))
    assert (factors[2:] == 8).all()


@pytest.mark.parametrize("dtype", ERRORS)
def test_types_hold_the_weights(goldens: Path, tmp_path: Path, dtype: str) -> None:
    """Types of whole blocks where the rows allow it; vectors stay F32, and rows of 16 or 64 fall back."""
    path = write_gguf(goldens / WIDE, tmp_path / "m.gguf", dtype)
    written, exact = tensors_of(path), tensors_of(write_gguf(goldens / WIDE, tmp_path / "exact.gguf"))
    assert written["blk.0.attn_norm.weight"][0] == "F32"
    assert {written[f"blk.0.{n}.weight"][0] for n in ("attn_q", "attn_v", "ffn_gate", "ffn_up")} == {dtype}
    assert written["token_embd.weight"][0] == dtype
    fallback = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}.get(dtype, dtype)
    assert written["blk.1.ffn_down.weight"][0] == fallback
    for name in (n for n, (kind, _) in written.items() if kind == dtype):
        values, error = exact[name][1], written[name][1] - exact[name][1]
        assert np.sqrt((error**2).mean() / (values**2).mean()) <= ERRORS[dtype], name
    assert [t.dtype for t in read_header(path).tensors] == [kind for kind, _ in written.values()]


def test_rows_of_no_whole_group_stay_f16(goldens: Path, tmp_path: Path) -> None:
    written = tensors_of(write_gguf(goldens / "llama-odd", tmp_path / "m.gguf", "Q4_K"))
    assert {kind for kind, _ in written.values()} == {"F32", "F16"}


@pytest.mark.parametrize(("dtype", "least", "most"), [("Q4_K", -7, 8), ("Q5_K", -15, 16), ("Q6_K", -32, 31)])
def test_k_types_are_exact_where_they_can_be(dtype: str, least: int, most: int) -> None:
    """A whole number for each step, with a scale of its own for each group, comes back as it was; so do zeros."""
    groups = 16 if dtype == "Q6_K" else 8
    numbers = np.stack([np.linspace(least, most, 256 // groups).round() for _ in range(groups)])
    numbers *= np.r_[127 if dtype == "Q6_K" else 63, 1:groups][:, None]  # the shared scale is then 1, or close
    values = np.stack([numbers.ravel(), np.zeros(256)]).astype(np.float32)
    assert np.array_equal(gguf.quants.dequantize(quantize_k(values, dtype), gguf.GGMLQuantizationType[dtype]), values)


@pytest.mark.parametrize("files", [2, 3])
def test_split_files_hold_the_same(goldens: Path, tmp_path: Path, files: int) -> None:
    whole = tensors_of(write_gguf(goldens / "llama-tied", tmp_path / "whole.gguf"))
    first = write_gguf(goldens / "llama-tied", tmp_path / "m.gguf", split=files)
    assert first.name == f"m-00001-of-0000{files}.gguf"
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == files
    parts = [metadata_of(path) for path in paths]
    assert [p["split.no"] for p in parts] == list(range(files))
    assert {(p["split.count"], p["split.tensors.count"]) for p in parts} == {(files, len(whole))}
    assert "llama.block_count" in parts[0]
    assert "llama.block_count" not in parts[1]
    together = [item for path in paths for item in tensors_of(path).items()]
    assert [name for name, _ in together] == list(whole)
    assert all(np.array_equal(values, whole[name][1]) for name, (_, values) in together)


def test_a_split_that_cannot_be_is_refused(goldens: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be split into 40 files"):
        write_gguf(goldens / "llama-tied", tmp_path / "m.gguf", split=40)


def test_the_vocabulary_is_the_folders(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "llama-tied"
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    written = metadata_of(write_gguf(folder, tmp_path / "m.gguf"))
    tokens, types = written["tokenizer.ggml.tokens"], written["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 512
    assert all(tokens[i] == word for word, i in vocabulary.items())
    assert types == [3] * 3 + [1] * (len(vocabulary) - 3) + [5] * (512 - len(vocabulary))
    assert written["tokenizer.ggml.eos_token_id"] == 2
    assert "<|im_start|>" in str(written["tokenizer.chat_template"])
