"""open_model: what it reads, and that nothing it would get wrong is opened."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pptasks.errors import ModelError, ModelFileError, ModelNotFound, PlanError, Unsupported
from pptasks.modelinfo import Rope
from pptasks.models import Model, fingerprint, nbytes, open_model
from tests.gguf_files import write_gguf as write_gguf_of

TIED, UNTIED = "llama-tied", "llama-untied-sharded-bf16"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tied(goldens: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(goldens / TIED, tmp_path / TIED, copy_function=shutil.copyfile))


@pytest.fixture
def sharded(goldens: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(goldens / UNTIED, tmp_path / UNTIED, copy_function=shutil.copyfile))


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the header of a safetensors file and leave its data."""
    data = file.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    change(header)
    write_safetensors(file, json.dumps(header).encode(), data[8 + n :])


def write_safetensors(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


# --- What it reads --------------------------------------------------------------------------------------------------


def test_reads_a_folder(goldens: Path, tmp_path: Path) -> None:
    model = open_model(goldens / TIED, tmp_path)
    c = model.config
    assert (c.architecture, c.n_blocks, c.dim, c.n_heads, c.n_kv_heads, c.head_dim) == ("llama", 6, 64, 4, 2, 16)
    assert (c.ffn_dim, c.vocab_size, c.context, c.norm_eps, c.rope) == (176, 512, 256, 1e-5, Rope(10000.0))
    assert c.tied
    assert (model.name, model.path, dict(model.metadata)) == (TIED, goldens / TIED, {})
    assert len(model.tensors) == 2 + 9 * c.n_blocks


def test_byte_ranges_hold_the_tensors(goldens: Path, tmp_path: Path) -> None:
    model = open_model(goldens / TIED, tmp_path)
    data = (goldens / TIED / "model.safetensors").read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    names = {"blk.3.attn_k.weight": "model.layers.3.self_attn.k_proj.weight", "output_norm.weight": "model.norm.weight"}
    for ours, theirs in names.items():
        ref, (begin, end) = model.tensors[ours], header[theirs]["data_offsets"]
        assert data[ref.offset : ref.offset + ref.nbytes] == data[8 + n :][begin:end]
        assert list(ref.shape) == header[theirs]["shape"]
        assert ref.nbytes == 4 * np.prod(ref.shape)


def test_reads_shards(goldens: Path, tmp_path: Path) -> None:
    model = open_model(str(goldens / UNTIED), tmp_path)
    assert not model.config.tied
    assert {ref.dtype for ref in model.tensors.values()} == {"BF16"}
    assert len({ref.file for ref in model.tensors.values()}) == 5
    assert model.nbytes == json.loads((goldens / UNTIED / INDEX).read_text())["metadata"]["total_size"]


def test_reads_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    model = open_model(smollm2_gguf, tmp_path)
    c = model.config
    assert (c.n_blocks, c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.ffn_dim) == (30, 576, 9, 3, 64, 1536)
    assert (c.vocab_size, c.context, c.rope, c.tied) == (49152, 8192, Rope(100000.0), True)
    heads = {name.split(".", 2)[-1]: ref.interleaved_heads for name, ref in model.tensors.items()}
    assert heads.pop("attn_q.weight") == 9
    assert heads.pop("attn_k.weight") == 3
    assert set(heads.values()) == {0}
    assert model.tensors["blk.0.attn_k.weight"].shape == (192, 576)
    assert model.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
    assert model.metadata["tokenizer.ggml.pre"] == "smollm"


def test_both_spellings_of_rope(tied: Path, tmp_path: Path) -> None:
    new = open_model(tied, tmp_path).config
    edit(tied / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": "default"})
    assert open_model(tied, tmp_path).config == new
    edit(
        tied / "config.json",
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_scaling=None, rope_theta=None,
    )  # fmt: skip
    assert open_model(tied, tmp_path).config == replace(new, rope=Rope(5e5))


def test_head_width_follows_from_the_heads(tied: Path, tmp_path: Path) -> None:
    edit(tied / "config.json", head_dim=None)
    assert open_model(tied, tmp_path).config.head_dim == 16


def test_tied_is_what_the_files_say(sharded: Path, tied: Path, tmp_path: Path) -> None:
    edit(sharded / "config.json", tie_word_embeddings=True)  # it has a head of its own: that one counts
    model = open_model(sharded, tmp_path)
    assert not model.config.tied
    assert "output.weight" in model.tensors
    edit(tied / "config.json", tie_word_embeddings=None)
    assert open_model(tied, tmp_path).config.tied
    edit(tied / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        open_model(tied, tmp_path)


# --- Fingerprint and stages -----------------------------------------------------------------------------------------


def test_fingerprint_is_the_models_own(goldens: Path, tied: Path, tmp_path: Path) -> None:
    model = open_model(goldens / TIED, tmp_path)
    assert model.fingerprint == "7a1a8ff5768a" + model.fingerprint[12:]  # the same on every machine, in every version
    assert open_model(tied, tmp_path).fingerprint == model.fingerprint
    assert open_model(goldens / UNTIED, tmp_path).fingerprint != model.fingerprint
    name, file = "blk.0.attn_v.weight", tied / "model.safetensors"
    header = [(file, min(ref.offset for ref in model.tensors.values()))]
    assert fingerprint(model.config, model.tensors, header) == model.fingerprint
    changed = {
        "config": (replace(model.config, rope=Rope(1e6)), model.tensors, header),
        "shape": (model.config, {**model.tensors, name: replace(model.tensors[name], shape=(64, 32))}, header),
        "type": (model.config, {**model.tensors, name: replace(model.tensors[name], dtype="F16")}, header),
        "tensors": (model.config, {n: ref for n, ref in model.tensors.items() if n != name}, header),
        "header": (model.config, model.tensors, [(file, header[0][1] - 1)]),
    }
    for what, (config, tensors, headers) in changed.items():
        assert fingerprint(config, tensors, headers) != model.fingerprint, what
    moved = {
        n: replace(ref, file=Path("/elsewhere"), offset=0) for n, ref in sorted(model.tensors.items(), reverse=True)
    }
    assert fingerprint(model.config, moved, header) == model.fingerprint


def test_the_headers_own_text_is_part_of_the_fingerprint(tied: Path, tmp_path: Path) -> None:
    """Two models of one shape differ, if only in what their headers say of themselves."""
    before = open_model(tied, tmp_path)
    rewrite(tied / "model.safetensors", lambda h: h.update({"__metadata__": {"format": "pt", "note": "fine-tuned"}}))
    after = open_model(tied, tmp_path)
    assert (after.config, list(after.tensors)) == (before.config, list(before.tensors))
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_stages_load_everything_once(goldens: Path, tmp_path: Path, name: str) -> None:
    model = open_model(goldens / name, tmp_path)
    n, tied = model.config.n_blocks, model.config.tied
    head = model.stage_tensors(0, 2, embedding=True, readout=tied)
    middle = model.stage_tensors(2, 5, embedding=False, readout=False)
    last = model.stage_tensors(5, n, embedding=False, readout=not tied)
    names = [ref.name for ref in (*head, *middle, *last)]
    assert sorted(names) == sorted(model.tensors)
    assert nbytes(head) + nbytes(middle) + nbytes(last) == model.nbytes
    assert all(ref.name.startswith(("blk.2.", "blk.3.", "blk.4.")) for ref in middle)
    assert middle == model.block_tensors(2) + model.block_tensors(3) + model.block_tensors(4)
    assert len(model.block_tensors(n - 1)) == 9


def test_readout_of_a_tied_model_is_the_embedding(goldens: Path, tmp_path: Path) -> None:
    model = open_model(goldens / TIED, tmp_path)
    readout = {ref.name for ref in model.stage_tensors(6, 6, embedding=False, readout=True)}
    assert readout == {"output_norm.weight", "token_embd.weight"}
    both = [ref.name for ref in model.stage_tensors(0, 0, embedding=True, readout=True)]
    assert sorted(both) == sorted(readout)
    untied = open_model(goldens / UNTIED, tmp_path).stage_tensors(7, 7, embedding=False, readout=True)
    assert {ref.name for ref in untied} == {"output_norm.weight", "output.weight"}


def test_block_1_is_not_block_10(smollm2_gguf: Path, tmp_path: Path) -> None:
    model = open_model(smollm2_gguf, tmp_path)
    assert {ref.name.rsplit(".", 2)[0] for ref in model.block_tensors(1)} == {"blk.1"}


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 7)])
def test_a_span_outside_the_model(goldens: Path, tmp_path: Path, span: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="6 blocks"):
        open_model(goldens / TIED, tmp_path).stage_tensors(*span, embedding=False, readout=False)


# --- What it refuses: specs and configurations ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["smollm3:9b", "/nowhere/model.gguf", "x" * 5000, "nul\0", ""])
def test_no_such_model(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ModelNotFound):
        open_model(spec, tmp_path)


def test_an_unknown_name_gets_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'smollm3:9b'.*smollm2:135m"):
        open_model("smollm3:9b", tmp_path)


def test_what_is_no_model(tmp_path: Path, tied: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        open_model(tmp_path, tmp_path)
    with pytest.raises(ModelNotFound, match="give the folder"):
        open_model(tied / "model.safetensors", tmp_path)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        open_model(tied / "config.json", tmp_path)
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="only safetensors"):
        open_model(tied, tmp_path)


def test_other_architectures_are_named(tied: Path, tmp_path: Path) -> None:
    edit(tied / "config.json", model_type="gemma3")
    with pytest.raises(Unsupported, match="architecture 'gemma3'; supported: gpt2, llama, mistral, qwen2, qwen3"):
        open_model(tied, tmp_path)


UNSUPPORTED: dict[str, Any] = {
    "hidden_act": "gelu",
    "sliding_window": 4096,
    "quantization_config": {"quant_method": "gptq"},
    "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention"] * 6,
    "architectures": ["LlamaForSequenceClassification"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_property_that_we_do_not_compute(tied: Path, tmp_path: Path, field: str) -> None:
    edit(tied / "config.json", **{field: UNSUPPORTED[field]})
    with pytest.raises(Unsupported, match=field) as caught:
        open_model(tied, tmp_path)
    assert "supported:" in str(caught.value)


def test_rope_scaling_in_the_old_spelling(tied: Path, tmp_path: Path) -> None:
    edit(tied / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert open_model(tied, tmp_path).config.rope == Rope(5e5, "linear", 2.0)
    edit(tied / "config.json", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(Unsupported, match=r"rope_scaling\.type is 'dynamic'; supported: 'default' or"):
        open_model(tied, tmp_path)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(tied / "config.json", rope_scaling={**scaling, "original_max_position_embeddings": 8192})
    assert open_model(tied, tmp_path).config.rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def test_two_ropes_that_differ_are_refused(tied: Path, tmp_path: Path) -> None:
    """transformers takes one of them; a yarn that was added to a newer configuration must not go unseen."""
    edit(tied / "config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(Unsupported, match="rope_parameters and rope_scaling say different things"):
        open_model(tied, tmp_path)
    edit(tied / "config.json", rope_scaling={})
    assert open_model(tied, tmp_path).config.rope == Rope(10000.0)


def test_what_is_not_said_is_transformers_default(goldens: Path, tmp_path: Path) -> None:
    mistral = Path(shutil.copytree(goldens / "mistral-no-window", tmp_path / "m", copy_function=shutil.copyfile))
    assert set(open_model(mistral, tmp_path).config.windows) == {0}
    config = json.loads((mistral / "config.json").read_text())
    del config["sliding_window"]
    (mistral / "config.json").write_text(json.dumps(config))
    assert set(open_model(mistral, tmp_path).config.windows) == {4096}
    qwen = Path(shutil.copytree(goldens / "qwen2-bias", tmp_path / "q", copy_function=shutil.copyfile))
    edit(qwen / "config.json", use_sliding_window=True, layer_types=None, sliding_window=16, max_window_layers=2.0)
    with pytest.raises(ModelFileError, match="max_window_layers"):
        open_model(qwen, tmp_path)


def test_a_mask_of_any_type_is_no_weight(goldens: Path, tmp_path: Path) -> None:
    """GPT-2's oldest exports keep the causal mask, some of them as bytes."""
    folder = Path(shutil.copytree(goldens / "gpt2-no-prefix", tmp_path / "g", copy_function=shutil.copyfile))

    def as_bytes(header: dict[str, Any]) -> None:
        entry = header["h.0.attn.bias"]
        entry["dtype"], entry["shape"] = "U8", [*entry["shape"][:-1], 4 * entry["shape"][-1]]

    rewrite(folder / "model.safetensors", as_bytes)
    assert open_model(folder, tmp_path).config.architecture == "gpt2"


def test_windows_are_what_the_configuration_says(goldens: Path, tmp_path: Path) -> None:
    mistral = Path(shutil.copytree(goldens / "mistral-window", tmp_path / "m", copy_function=shutil.copyfile))
    assert open_model(mistral, tmp_path).config.windows == (8, 8, 8, 8)
    edit(mistral / "config.json", layer_types=["full_attention", "sliding_attention"] * 2)
    assert open_model(mistral, tmp_path).config.windows == (0, 8, 0, 8)
    edit(mistral / "config.json", layer_types=["chunked_attention"] * 4)
    with pytest.raises(Unsupported, match="'chunked_attention'; supported: full_attention, sliding_attention"):
        open_model(mistral, tmp_path)
    qwen = Path(shutil.copytree(goldens / "qwen2-bias", tmp_path / "q", copy_function=shutil.copyfile))
    edit(qwen / "config.json", sliding_window=16, layer_types=None, max_window_layers=4)
    assert open_model(qwen, tmp_path).config.windows == (0,) * 6
    edit(qwen / "config.json", use_sliding_window=True)
    assert open_model(qwen, tmp_path).config.windows == (0, 0, 0, 0, 16, 16)


def test_conv1d_or_linear_is_what_the_file_holds(goldens: Path, tmp_path: Path) -> None:
    """GPT-2's square matrices do not tell how they are stored; the others of the same file do."""
    model = open_model(goldens / "gpt2", tmp_path)
    assert all(model.tensors[f"blk.0.{name}.weight"].transposed for name in ("attn_qkv", "attn_output", "ffn_down"))
    assert not model.tensors["token_embd.weight"].transposed
    file = write_gguf_of(goldens / "gpt2", tmp_path / "gpt2.gguf")
    assert not any(ref.transposed for ref in open_model(file, tmp_path).tensors.values())
    assert open_model(file, tmp_path).tensors["blk.0.attn_qkv.weight"].parts == (
        ("blk.0.attn_q.weight", 64),
        ("blk.0.attn_k.weight", 64),
        ("blk.0.attn_v.weight", 64),
    )


def test_the_oldest_spelling_of_gpt2(goldens: Path, tmp_path: Path) -> None:
    """No prefix, and the causal mask among the tensors."""
    model = open_model(goldens / "gpt2-no-prefix", tmp_path)
    assert model.config.tied
    assert not any(name.endswith(".attn.bias") for name in model.tensors)


def test_a_bias_that_one_block_lost(goldens: Path, tmp_path: Path) -> None:
    qwen = Path(shutil.copytree(goldens / "qwen2-bias", tmp_path / "q", copy_function=shutil.copyfile))
    rewrite(
        qwen / "model.safetensors",
        lambda h: h.update({"model.layers.3.x": h.pop("model.layers.3.self_attn.k_proj.bias")}),
    )
    with pytest.raises(ModelFileError, match=r"layers\.3\.self_attn\.k_proj\.bias' is missing, and other blocks"):
        open_model(qwen, tmp_path)


FAMILIES = [
    "llama-tied",
    "llama-bias",
    "llama3-rope",
    "llama-linear-rope",
    "mistral-window",
    "qwen2-bias",
    "qwen3-tied",
    "gpt2",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_of_a_folder_is_the_same_model(goldens: Path, tmp_path: Path, name: str) -> None:
    folder = open_model(goldens / name, tmp_path)
    file = open_model(write_gguf_of(goldens / name, tmp_path / "x.gguf"), tmp_path)
    architecture, rope = file.config.architecture, folder.config.rope
    if name == "llama3-rope":
        rope = Rope(500000.0)  # GGUF has the scaling as a tensor
        assert file.tensors["rope_freqs.weight"].shape == (12,)
    if name == "mistral-window":
        assert architecture == "llama"
    expected = replace(folder.config, architecture=architecture, rope=rope, norm_eps=file.config.norm_eps)
    assert file.config == expected
    assert file.config.norm_eps == pytest.approx(folder.config.norm_eps)
    assert set(file.tensors) - {"rope_freqs.weight"} == set(folder.tensors)
    assert {n: r.shape for n, r in file.tensors.items() if n in folder.tensors} == {
        n: r.shape for n, r in folder.tensors.items()
    }


def test_a_split_gguf_is_one_model(goldens: Path, tmp_path: Path) -> None:
    whole = open_model(write_gguf_of(goldens / "llama-tied", tmp_path / "whole.gguf"), tmp_path)
    first = write_gguf_of(goldens / "llama-tied", tmp_path / "cut.gguf", split=3)
    cut = open_model(first, tmp_path)
    assert cut.config == whole.config
    assert list(cut.tensors) == list(whole.tensors)
    assert len({ref.file for ref in cut.tensors.values()}) == 3
    assert cut.nbytes == whole.nbytes
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    data = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelFileError, match="is not part 2 of 3"):
        open_model(first, tmp_path)
    second.unlink()
    with pytest.raises(ModelFileError, match="00002"):
        open_model(first, tmp_path)
    second.write_bytes(data)
    with pytest.raises(ModelNotFound, match="give the part named"):
        open_model(second, tmp_path)


def test_every_stage_turns_by_the_files_own_factors(goldens: Path, tmp_path: Path) -> None:
    model = open_model(write_gguf_of(goldens / "llama3-rope", tmp_path / "x.gguf"), tmp_path)
    for lo, hi in ((0, 1), (1, 3)):
        names = {ref.name for ref in model.stage_tensors(lo, hi, embedding=False, readout=False)}
        assert "rope_freqs.weight" in names
    assert "rope_freqs.weight" not in {ref.name for ref in model.stage_tensors(4, 4, embedding=True, readout=True)}


INCONSISTENT: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"num_hidden_layers": "6"},
    "hidden_size": {"hidden_size": True},
    "vocab_size": {"vocab_size": 1 << 40},
    "rms_norm_eps": {"rms_norm_eps": -1},
    "rope_theta": {"rope_parameters": {"rope_theta": float("inf")}},
    "rope_parameters is 'x'": {"rope_parameters": "x"},
    "layer_types is": {"layer_types": ["full_attention"] * 5},
    "intermediate_size": {"intermediate_size": None},
    "model_type": {"model_type": None},
    "head width 15": {"head_dim": 15},
    "3 key/value heads": {"num_key_value_heads": 3},
    "not a multiple of 5 heads": {"num_attention_heads": 5, "head_dim": None, "num_key_value_heads": None},
    "q_proj.weight' has shape": {"head_dim": 32},
    "layers.6.input_layernorm.weight' is missing": {"num_hidden_layers": 7},
}


@pytest.mark.parametrize("message", INCONSISTENT)
def test_a_configuration_that_does_not_hold(tied: Path, tmp_path: Path, message: str) -> None:
    edit(tied / "config.json", **INCONSISTENT[message])
    with pytest.raises(ModelFileError, match=message):
        open_model(tied, tmp_path)


def test_more_tensors_than_blocks(tied: Path, tmp_path: Path) -> None:
    edit(tied / "config.json", num_hidden_layers=5)
    with pytest.raises(Unsupported, match=r"model\.layers\.5"):
        open_model(tied, tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": "\\ud800"}', '{"a": 1, "a": 2}', "[" * 200_000, '{"a": 1' + "0" * 5000 + "}"]
)
def test_json_that_is_none(tied: Path, tmp_path: Path, text: str) -> None:
    (tied / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_model(tied, tmp_path)


# --- What it refuses: safetensors -----------------------------------------------------------------------------------

KEY = "model.layers.2.self_attn.k_proj.weight"
Header = dict[str, Any]


def swap(header: Header, field: str, value: Any) -> None:
    header[KEY][field] = value


def shift(header: Header, by: int) -> None:
    begin, end = header[KEY]["data_offsets"]
    header[KEY]["data_offsets"] = [begin + by, end + by]


CHANGES: dict[str, tuple[Callable[[Header], object], type[ModelError], str]] = {
    "a missing tensor": (
        lambda h: h.update({"model.norm.bias": h.pop("model.norm.weight")}),
        ModelFileError,
        "norm.weight",
    ),
    "an unknown type": (lambda h: swap(h, "dtype", "F6_E3M2"), Unsupported, "F6_E3M2"),
    "a type that is no weight's": (lambda h: swap(h, "dtype", "I32"), Unsupported, "I32"),
    "another shape": (lambda h: swap(h, "shape", [64, 32]), ModelFileError, "shape"),
    "a size that is not the shape's": (lambda h: swap(h, "shape", [31, 64]), ModelFileError, "cannot be 8192 bytes"),
    "a negative size": (lambda h: swap(h, "shape", [-32, -64]), ModelFileError, "malformed"),
    "a size that is no number": (lambda h: swap(h, "shape", [32.0, 64]), ModelFileError, "malformed"),
    "an entry that is none": (lambda h: h.update({KEY: 7}), ModelFileError, "malformed"),
    "overlap": (lambda h: shift(h, -4), ModelFileError, "overlap"),
    "a hole": (lambda h: shift(h, 4), ModelFileError, "hole|overlap"),
    "beyond the file": (lambda h: shift(h, 1 << 40), ModelFileError, "hole"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_safetensors_header_that_does_not_hold(tied: Path, tmp_path: Path, case: str) -> None:
    change, error, message = CHANGES[case]
    rewrite(tied / "model.safetensors", change)
    with pytest.raises(error, match=message) as caught:
        open_model(tied, tmp_path)
    assert "model.safetensors" in str(caught.value) or str(tied) in str(caught.value)


def test_a_tensor_that_nobody_uses(tied: Path, tmp_path: Path) -> None:
    def add(header: Header, name: str) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        header[name] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}

    rewrite(tied / "model.safetensors", lambda h: add(h, "model.layers.0.self_attn.rotary_emb.inv_freq"))
    open_model(tied, tmp_path)
    rewrite(tied / "model.safetensors", lambda h: add(h, "model.layers.0.self_attn.q_norm.weight"))
    with pytest.raises(Unsupported, match=r"q_norm\.weight"):
        open_model(tied, tmp_path)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, struct.pack("<Q", 1 << 62), struct.pack("<Q", 99) + b"{}"])
def test_a_safetensors_file_that_is_none(tied: Path, tmp_path: Path, data: bytes) -> None:
    (tied / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match="truncated, or not a safetensors file"):
        open_model(tied, tmp_path)


def test_a_truncated_safetensors_file(tied: Path, tmp_path: Path) -> None:
    file = tied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        open_model(tied, tmp_path)


def test_a_tensor_twice(tied: Path, tmp_path: Path) -> None:
    entry = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_safetensors(tied / "model.safetensors", b"{" + entry + b"," + entry + b"}", bytes(4))
    with pytest.raises(ModelFileError, match="twice"):
        open_model(tied, tmp_path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/model.safetensors", "..", "a\\b.safetensors", ".safetensors"]
)
def test_an_index_that_points_elsewhere(sharded: Path, tmp_path: Path, file: str) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded / INDEX, weight_map={**weight_map, "lm_head.weight": file})
    with pytest.raises(ModelFileError, match=r"no \.safetensors file of this folder"):
        open_model(sharded, tmp_path)


def test_an_index_that_does_not_hold(sharded: Path, tmp_path: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    edit(sharded / INDEX, weight_map={**weight_map, "lm_head.weight": other})
    with pytest.raises(ModelFileError, match=r"lm_head\.weight.*does not hold it"):
        open_model(sharded, tmp_path)
    edit(sharded / INDEX, weight_map=weight_map)
    (sharded / other).unlink()
    with pytest.raises(ModelFileError, match="which is missing"):
        open_model(sharded, tmp_path)
    edit(sharded / INDEX, weight_map=["lm_head.weight"])
    with pytest.raises(ModelFileError, match="no weight_map"):
        open_model(sharded, tmp_path)


# --- GGUF: a tiny model, written by the format's own package --------------------------------------------------------

DIM, HEADS, KV_HEADS, FFN, VOCAB, BLOCKS = 64, 4, 2, 96, 32, 2


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], architecture: str = "llama"
) -> None:
    """A tied llama with `metadata` and `tensors` changed or added; None and () leave one out."""
    w = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": BLOCKS, "context_length": 128, "embedding_length": DIM, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in ({f"{architecture}.{k}": v for k, v in values.items()} | metadata).items():
        kind = {int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool, list: w.add_array}
        if value is not None:
            kind[type(value)](key, value)
    q, kv = DIM, DIM // HEADS * KV_HEADS
    block = {
        "attn_norm": (DIM,), "attn_q": (q, DIM), "attn_k": (kv, DIM), "attn_v": (kv, DIM), "attn_output": (DIM, q),
        "ffn_norm": (DIM,), "ffn_gate": (FFN, DIM), "ffn_up": (FFN, DIM), "ffn_down": (DIM, FFN),
    }  # fmt: skip
    shapes = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(BLOCKS) for name, shape in block.items()}
    for name, shape in (shapes | tensors).items():
        if shape:
            w.add_tensor(name, np.zeros(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def open_gguf(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Model:
    write_gguf(tmp_path / "tiny.gguf", metadata, tensors)
    return open_model(tmp_path / "tiny.gguf", tmp_path)


def test_reads_a_tiny_gguf(tmp_path: Path) -> None:
    model = open_gguf(tmp_path, {}, {})
    c = model.config
    assert (c.n_blocks, c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.ffn_dim) == (
        BLOCKS,
        DIM,
        HEADS,
        KV_HEADS,
        16,
        FFN,
    )
    assert (c.vocab_size, c.context, c.rope, c.tied, model.name) == (VOCAB, 128, Rope(10000.0), True, "tiny")
    untied = open_gguf(tmp_path, {"llama.vocab_size": VOCAB}, {"output.weight": (VOCAB, DIM)})
    assert not untied.config.tied
    assert untied.tensors["output.weight"].shape == (VOCAB, DIM)


def test_head_width_of_its_own(tmp_path: Path) -> None:
    wide = {"attn_q": (96, DIM), "attn_k": (48, DIM), "attn_v": (48, DIM), "attn_output": (DIM, 96)}
    tensors: dict[str, tuple[int, ...]] = {
        f"blk.{i}.{name}.weight": shape for i in range(BLOCKS) for name, shape in wide.items()
    }
    lengths = {"llama.attention.key_length": 24, "llama.attention.value_length": 24, "llama.rope.dimension_count": 24}
    assert open_gguf(tmp_path, lengths, tensors).config.head_dim == 24


GGUF_REFUSED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], type[ModelError]]] = {
    "rope_freqs.weight' has shape": ({}, {"rope_freqs.weight": (7,)}, ModelFileError),
    "blk.1.attn_q.bias' is missing": ({}, {"blk.0.attn_q.bias": (DIM,)}, ModelFileError),
    "ffn_gate_inp": ({}, {"blk.0.ffn_gate_inp.weight": (8, DIM)}, Unsupported),
    "rope.scaling.type is 'yarn'": ({"llama.rope.scaling.type": "yarn"}, {}, Unsupported),
    "rope.scaling.factor is 4.0": ({"llama.rope.scaling.factor": 4.0}, {}, Unsupported),
    "expert_count is 8": ({"llama.expert_count": 8}, {}, Unsupported),
    "sliding_window is -4": ({"llama.attention.sliding_window": -4.0}, {}, ModelFileError),
    "rope.dimension_count is 8": ({"llama.rope.dimension_count": 8}, {}, Unsupported),
    "value_length is 8": ({"llama.attention.value_length": 8}, {}, Unsupported),
    "general.type is 'adapter'": ({"general.type": "adapter"}, {}, Unsupported),
    "00001-of-00003": ({"split.count": 3}, {}, ModelFileError),
    "head_count is": ({"llama.attention.head_count": [4, 4]}, {}, ModelFileError),
    "block_count is missing": ({"llama.block_count": None}, {}, ModelFileError),
    "blk.1.ffn_up.weight' is missing": ({}, {"blk.1.ffn_up.weight": ()}, ModelFileError),
    "blk.1.ffn_up.weight' has shape": ({}, {"blk.1.ffn_up.weight": (DIM, FFN)}, ModelFileError),
    "token_embd.weight' has shape": ({"llama.vocab_size": VOCAB + 1}, {}, ModelFileError),
}


@pytest.mark.parametrize("message", GGUF_REFUSED)
def test_a_gguf_that_we_would_get_wrong(tmp_path: Path, message: str) -> None:
    metadata, tensors, error = GGUF_REFUSED[message]
    with pytest.raises(error, match=message) as caught:
        open_gguf(tmp_path, metadata, tensors)
    assert "tiny.gguf" in str(caught.value)


def test_other_architectures_in_gguf_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", {}, {}, "gemma3")
    with pytest.raises(Unsupported, match="architecture 'gemma3'; supported: gpt2, llama, qwen2, qwen3"):
        open_model(tmp_path / "x.gguf", tmp_path)
