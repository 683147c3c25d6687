"""Whatever the bytes, opening a GGUF file gives a model or one of our errors, soon and without much memory."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.errors import ModelError
from pptasks.gguf import Array, read_header
from pptasks.models import open_model
from pptasks.text import open_text

DIM, FFN, WORDS = 32, 32, ["<|im_end|>", "a", "b", "ab", "Ġ", "Ġa"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


@pytest.fixture(scope="module")
def valid(path: Path) -> bytes:
    """A one-block llama of 2 heads with a vocabulary of 6 entries."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(64)
    w.add_embedding_length(DIM)
    w.add_feed_forward_length(FFN)
    w.add_head_count(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(WORDS)
    w.add_token_types([3, 1, 1, 1, 1, 4])
    w.add_token_merges(["a b", "Ġ a"])
    w.add_eos_token_id(0)
    w.add_tensor("token_embd.weight", np.zeros((len(WORDS), DIM), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        w.add_tensor(f"blk.0.{name}.weight", np.zeros((DIM, DIM), np.float16))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        w.add_tensor(f"{name}.weight", np.zeros(DIM, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.read_bytes()


def test_the_valid_file_opens(valid: bytes, path: Path) -> None:
    path.write_bytes(valid)
    model = open_model(path, path.parent)
    assert open_text(model).decode([3, 5]) == "abĠa"  # a user-defined token is spelled as it stands


integers = st.sampled_from(
    [0, 1, 2, 8, 9, 12, 13, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1]
)
changes = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),  # where in the header
        st.one_of(
            st.binary(min_size=1, max_size=8),
            integers.map(lambda n: struct.pack("<Q", n)),
            integers.map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
        ),
    ),
    max_size=4,
)


def open_everything(path: Path) -> str | None:
    """The message that refuses the file, if one does."""
    try:
        for value in read_header(path).metadata.values():
            if isinstance(value, Array):
                value.decode()
        text = open_text(open_model(path, path.parent))
        text.decode(text.encode("ab a"))
    except ModelError as error:
        return str(error)
    return None


@settings(max_examples=1500, deadline=5000)
@given(changes=changes, cut=st.one_of(st.none(), st.floats(0, 1)))
def test_damaged_files(valid: bytes, path: Path, changes: list[tuple[float, bytes]], cut: float | None) -> None:
    data = bytearray(valid)
    header = valid.rindex(b"output_norm.weight") + 64
    for where, new in changes:
        at = int(where * header)
        data[at : at + len(new)] = new
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    tracemalloc.start()
    try:
        refused = open_everything(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused is None or (refused.isprintable() and str(path) in refused)
    assert peak < 4 << 20
