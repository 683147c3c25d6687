"""Over arbitrary Unicode: what goes in comes out, in whatever pieces, and a user's text makes no control token."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pptasks import gguf, vocab_gguf, vocab_hf
from pptasks.models import open_model
from pptasks.text import Text, open_text
from tests import vocabularies as made

N_CONTROL = 17  # SmolLM2's control tokens have the ids below
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]

# SmolLM2 has no entry for these bytes: a character that needs one cannot be spelled, with any tokenizer.
UNSPELLABLE = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff\xc0\xc1")

characters = st.characters(codec="utf-8").filter(lambda c: UNSPELLABLE.isdisjoint(c.encode()))
pieces = st.one_of(
    st.text(characters), st.sampled_from([*SPECIALS, "<|im_", "end|>", "|>", "<", " ", "\n", "\r\n", "123"])
)
texts = st.lists(pieces, max_size=8).map("".join)

# For SentencePiece a "▁" is another spelling of a space, and any other character can be spelled.
spm_pieces = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="▁")),
    st.sampled_from(
        ["</s>", "<s>", "<unk>", "[INST]", "</", "s>", "<0x0A>", " ", "   ", "\n", "the cat", " sat", "🚀"]
    ),
)
spm_texts = st.lists(spm_pieces, max_size=8).map("".join)

many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def text(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return open_text(open_model(smollm2_gguf, tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module", params=["gguf", "llama2", "mistral3"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    """SentencePiece's way, from each kind of file; the template is "<s>" and the message."""
    folder, template = tmp_path_factory.mktemp("spm"), "{{ bos_token }}{{ messages[0].content }}"
    if request.param == "gguf":
        path = made.write_spm(folder / "v.gguf", chat_template=template)
        return Text(vocab_gguf.read(gguf.read_header(path).metadata, path))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    tokenizer = made.llama2() if request.param == "llama2" else made.mistral3()
    return Text(vocab_hf.read(made.write_hf(folder, tokenizer, tokenizer_config=config)))


def first_text_only(spm: Text) -> bool:
    return spm._vocabulary.continued is not spm._vocabulary.tokenizer


def check_stream(text: Text, ids: list[int], whole: str) -> None:
    """At each step the text so far is a beginning of the whole: no part of a character is ever shown."""
    decoder, so_far = text.decoder(), ""
    for i in ids:
        so_far += decoder.push(i)
        assert whole.startswith(so_far)
    assert so_far + decoder.finish() == whole


@many
@given(s=texts)
def test_decode_is_the_inverse_of_encode(text: Text, s: str) -> None:
    ids = text.encode(s)
    assert all(N_CONTROL <= i < text.vocab_size for i in ids)
    check_stream(text, ids, s)


@many
@given(s=spm_texts)
def test_decode_is_the_inverse_of_encode_for_sentencepiece(spm: Text, s: str) -> None:
    """No control token but the one bos. Where the pre-tokenizer adds the first space, it does not add a second."""
    ids = spm.encode(s)
    assert ids[0] == spm.bos_id
    assert all(i > 2 for i in ids[1:])
    check_stream(spm, ids, s.removeprefix(" ") if first_text_only(spm) else s)


@many
@given(s=spm_texts)
def test_a_message_to_sentencepiece_is_text(spm: Text, s: str) -> None:
    ids = spm.encode_chat([{"role": "user", "content": s}])
    if first_text_only(spm):  # what follows <s> is no first text
        assert ids[0] == spm.bos_id
        assert all(i > 2 for i in ids[1:])
        assert spm.decode(ids) == s.removeprefix(" ")
    else:
        assert ids == spm.encode(s)


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
