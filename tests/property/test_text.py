"""Over arbitrary Unicode: what goes in comes out, in whatever pieces, and a user's text makes no control token."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pptasks.models import open_model
from pptasks.text import Text, open_text

N_CONTROL = 17  # SmolLM2's control tokens have the ids below
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]

# SmolLM2 has no entry for these bytes: a character that needs one cannot be spelled, with any tokenizer.
UNSPELLABLE = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff\xc0\xc1")

characters = st.characters(codec="utf-8").filter(lambda c: UNSPELLABLE.isdisjoint(c.encode()))
pieces = st.one_of(
    st.text(characters), st.sampled_from([*SPECIALS, "<|im_", "end|>", "|>", "<", " ", "\n", "\r\n", "123"])
)
texts = st.lists(pieces, max_size=8).map("".join)

many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def text(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return open_text(open_model(smollm2_gguf, tmp_path_factory.mktemp("cache")))


@many
@given(s=texts)
def test_decode_is_the_inverse_of_encode(text: Text, s: str) -> None:
    ids = text.encode(s)
    assert all(N_CONTROL <= i < text.vocab_size for i in ids)
    assert text.decode(ids) == s


@many
@given(ids=st.lists(st.integers(0, 50_000), max_size=40))
def test_streamed_pieces_are_the_whole(text: Text, ids: list[int]) -> None:
    decoder = text.decoder()
    pieces = [decoder.push(i) for i in ids]
    tokenizer = text._vocabulary.tokenizer
    assert "".join(pieces) + decoder.finish() == tokenizer.decode([i for i in ids if i < text.vocab_size])


@many
@given(s=texts)
def test_a_message_makes_no_control_token(text: Text, s: str) -> None:
    ids, empty = (text.encode_chat([{"role": "user", "content": content}]) for content in (s, ""))
    assert [i for i in ids if i < N_CONTROL] == [i for i in empty if i < N_CONTROL]
    assert text.decode(ids).endswith(f"user\n{s}\nassistant\n")


@many
@given(s=st.text(characters).filter(lambda s: not any(special in s for special in SPECIALS)))
def test_a_plain_message_is_tokenised_with_its_template(text: Text, s: str) -> None:
    """The reference: the library's own encode of the rendered string."""
    tokenizer = text._vocabulary.tokenizer
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    rendered = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{s}<|im_end|>\n<|im_start|>assistant\n"
    ids = text.encode_chat([{"role": "user", "content": s}])
    tokenizer.encode_special_tokens = False
    assert ids == tokenizer.encode(rendered).ids
