"""Tokenizers in the shapes of the model families: what is in their files is what comes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from pptasks import gguf, vocab_gguf, vocab_hf
from pptasks.errors import ModelFileError, RequestError, Unsupported
from pptasks.text import Text
from tests import vocabularies as made

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set first = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set first = none %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{% if loop.index0 == 0 and first %}{% set text = '<<SYS>>\n' + first + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set text = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%Y') %}{%- endif %}"
    "{{- bos_token }}{%- if tools is not none %}tools{%- endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}"
    "{%- if m.role == 'user' and ns.last < 0 %}{%- set ns.last = loop.revindex0 %}{%- endif %}{%- endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined %}?{% endif %}{{ ns.last }}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant, not ' + m['role']) }}{% endif %}{% endfor %}"
)
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

# Family: tokenizer, tokenizer_config.json, whether a raw text begins with bos.
FAMILIES: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], bool]] = {
    "llama2": (made.llama2, {**SPM, "add_bos_token": True, "chat_template": LLAMA2}, True),
    "mistral3": (made.mistral3, {**SPM, "add_bos_token": True, "chat_template": MISTRAL}, True),
    "tekken": (made.tekken, {**SPM, "chat_template": MISTRAL}, True),
    "llama3": (
        made.llama3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "chat_template": LLAMA3},
        True,
    ),
    "qwen2": (
        made.qwen2,
        {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": QWEN},
        False,
    ),
    "gpt2": (made.gpt2, {"model_max_length": 1024}, False),
}
TYPED = "</s> <s>[INST]<|im_end|>\n<|eot_id|><|endoftext|><unk>"


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def open_hf(folder: Path, family: str, **settings: Any) -> tuple[Text, Tokenizer]:
    make, values, _ = FAMILIES[family]
    tokenizer = make()
    made.write_hf(folder, tokenizer, tokenizer_config={**values, **settings})
    return Text(vocab_hf.read(folder)), tokenizer


def open_spm(path: Path, **settings: Any) -> Text:
    made.write_spm(path, **settings)
    return Text(vocab_gguf.read(gguf.read_header(path).metadata, path))


# --- Each family's tokenizer.json ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_text_is_what_the_library_makes_of_it(tmp_path: Path, family: str) -> None:
    text, tokenizer = open_hf(tmp_path, family)
    for s in ("", " ", "the cat", " the  cat\n", "HelloWorld 12345 naïve 你好 \U0001f680", "\n\n\tx  "):
        ids = text.encode(s)
        assert ids == tokenizer.encode(s).ids
        assert text.decode(ids) == tokenizer.decode(ids) == (s.removeprefix(" ") if family == "mistral3" else s)
    assert (text.encode("a")[0] == text.bos_id) is FAMILIES[family][2]


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_control_tokens_stay_text(tmp_path: Path, family: str) -> None:
    text, _ = open_hf(tmp_path, family)
    control = set(text._vocabulary.control.values())
    ids = text.encode(TYPED)
    assert control.intersection(ids) <= {text.bos_id}
    assert ids.count(text.bos_id) == int(FAMILIES[family][2])
    assert text.decode(ids) == TYPED
    typed, plain = text.encode_chat(user(f"the cat{TYPED}")), text.encode_chat(user("the cat"))
    assert [i for i in typed if i in control] == [i for i in plain if i in control]


@pytest.mark.parametrize("family", set(FAMILIES) - {"gpt2"})
def test_a_chat_is_what_the_library_makes_of_it(tmp_path: Path, family: str) -> None:
    text, tokenizer = open_hf(tmp_path, family)
    rendered = {
        "llama2": "<s>[INST] the cat [/INST]",
        "mistral3": "<s>[INST] the cat [/INST]",
        "tekken": "<s>[INST] the cat [/INST]",
        "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe cat<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "qwen2": "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n0",
    }[family]
    assert text.encode_chat(user("the cat")) == tokenizer.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("family", ["llama2", "mistral3"])
def test_spaces_do_not_depend_on_what_is_typed(tmp_path: Path, family: str) -> None:
    """Texts with a control token's spelling go another way; what stands before it must come out the same."""
    text, _ = open_hf(tmp_path, family, chat_template="{{ bos_token }}{{ messages[0].content }}")
    for s in ("the cat", " the cat", "\nthe cat"):
        plain, typed = text.encode_chat(user(f"{s}\n")), text.encode_chat(user(f"{s}\n</s>"))
        assert typed[: len(plain)] == plain
    first = text.encode("the")  # the first of all: bos comes from the tokenizer, not from the text
    assert first == [1, text._vocabulary.tokenizer.token_to_id("▁the")]
    assert (text.encode_chat(user("the")) == first) is (
        family == "llama2"
    )  # mistral3: a text after <s> is no first one


# --- One bos, every end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("family", ["llama2", "mistral3", "llama3", "tekken"])
def test_one_bos(tmp_path: Path, family: str, asked: bool | None, written: bool) -> None:
    """None: the tokenizer's post-processor decides, and these add it."""
    template = ("{{ bos_token }}" if written else "") + "{{ messages[0].content }}"
    text, _ = open_hf(tmp_path, family, add_bos_token=asked, chat_template=template)
    bos = text.bos_id
    assert [text.encode(s).count(bos) for s in ("the cat", "", TYPED)] == [int(asked is not False)] * 3
    for content in ("the cat", TYPED):
        ids = text.encode_chat(user(content))
        assert ids.count(bos) == int(written or asked is not False)
        assert bos not in ids[1:]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
def test_one_bos_of_gguf(tmp_path: Path, asked: bool | None, written: bool) -> None:
    template = ("{{ bos_token }}" if written else "") + "{{ messages[0].content }}"
    settings = {} if asked is None else {"add_bos_token": asked}
    text = open_spm(tmp_path / "v.gguf", chat_template=template, **settings)
    assert text.bos_id == 1
    assert [text.encode(s).count(1) for s in ("the cat", "", TYPED)] == [int(asked is not False)] * 3
    for content in ("the cat", TYPED):
        ids = text.encode_chat(user(content))
        assert ids.count(1) == int(written or asked is not False)
        assert 1 not in ids[1:]


def test_every_end_that_the_files_name(tmp_path: Path) -> None:
    tokenizer = made.llama3()
    ids = {t: tokenizer.token_to_id(t) for t in ("<|end_of_text|>", "<|eot_id|>", "<|end_header_id|>")}
    config = {"eos_token_id": ids["<|end_of_text|>"], "bos_token_id": 3}
    generation = {"eos_token_id": [ids["<|end_of_text|>"], ids["<|end_header_id|>"]]}
    folder = made.write_hf(tmp_path, tokenizer, config=config, generation_config=generation)
    text = Text(vocab_hf.read(folder))
    assert text.stop_ids == frozenset(ids.values())  # <|eot_id|> by its name
    assert text.bos_id == 3


def test_every_end_of_gguf(tmp_path: Path) -> None:
    extra = [("<|im_end|>", 4), ("<|stop|>", 3), ("<|more|>", 3)]
    settings = {"eot_token_id": made_id("<|stop|>", extra), "eom_token_id": made_id("<|more|>", extra)}
    text = open_spm(tmp_path / "v.gguf", extra=extra, **settings)
    assert text.stop_ids == {2, *(made_id(token, extra) for token, _ in extra)}
    assert text._vocabulary.silent.isdisjoint(text.encode("a<|im_end|>")[1:])  # though the file has it as plain text


def made_id(token: str, extra: list[tuple[str, int]]) -> int:
    return len(made.SPM_CONTROL) + len(made.BYTES) + len(made.PIECES) + [t for t, _ in extra].index(token)


@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_an_end_that_was_added_as_text_is_a_control_token(tmp_path: Path, family: str) -> None:
    tokenizer = FAMILIES[family][0]()
    tokenizer.add_tokens([AddedToken("<end>", normalized=False)])
    template = "{{ messages[0].content }}<end>"
    settings = {**FAMILIES[family][1], "eos_token": "<end>", "chat_template": template}
    text = Text(vocab_hf.read(made.write_hf(tmp_path, tokenizer, tokenizer_config=settings)))
    end = tokenizer.token_to_id("<end>")
    assert end in text.stop_ids
    assert end not in text.encode("a<end>")
    assert text.encode_chat(user("a<end>")).count(end) == 1


# --- SentencePiece in GGUF ------------------------------------------------------------------------------------------


def test_spaces_that_nobody_typed(tmp_path: Path) -> None:
    extra = [("<tool>", 4)]
    text, plain = (
        open_spm(tmp_path / "a.gguf", extra=extra),
        open_spm(tmp_path / "b.gguf", extra=extra, add_space_prefix=False),
    )
    entries = {token: i for i, token in enumerate([*made.SPM_CONTROL, *made.BYTES, *made.PIECES, "<tool>"])}
    assert text.encode("the") == [1, entries["▁the"]]
    assert plain.encode(" the") == [1, entries["▁the"]]
    assert text.encode("the<tool>the") == [1, entries["▁the"], entries["<tool>"], entries["▁the"]]
    for either in (text, plain):
        assert [either.decode(either.encode(s)) for s in ("the", " the", "  ", "")] == ["the", " the", "  ", ""]
        assert either.decode([entries["<tool>"], entries["<0xC3>"], entries["<0xA9>"]]) == "<tool>é"


def test_kinds_of_entries(tmp_path: Path) -> None:
    """A text cannot lead to control, unused and byte entries; "the c" would merge of "▁the" and "▁c"."""
    unused = [("▁the▁c", 5), ("▁the▁cat", 3)]
    text, without = open_spm(tmp_path / "a.gguf", extra=unused), open_spm(tmp_path / "b.gguf")
    assert text.encode("the cat the c <0x41>") == without.encode("the cat the c <0x41>")
    assert text.decode([1, made_id("▁the▁c", unused), 2]) == ""
    used = open_spm(tmp_path / "c.gguf", extra=[("▁the▁c", 1)])
    assert used.encode("the c")[1:] == [made_id("▁the▁c", [("▁the▁c", 1)])]  # so that this test can fail


def test_spaces_in_an_entry_that_was_added(tmp_path: Path) -> None:
    extra = [("a▁b", 4)]
    assert open_spm(tmp_path / "v.gguf", extra=extra).decode([made_id("a▁b", extra)]) == "a b"


def test_of_pairs_with_one_score_the_longer_left_half_goes_first() -> None:
    """So that "aaaa" is "aaa", "a", as when the first pair always goes first."""
    pieces = {"a": -1.0, "b": -2.0, "aa": -1.0, "aaa": -1.0, "ab": 0.0}
    assert vocab_gguf._merges(pieces) == [("a", "b"), ("aa", "a"), ("a", "aa"), ("a", "a")]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"remove_extra_whitespaces": True}, Unsupported, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2]}, Unsupported, "precompiled_charsmap"),
        ({"extra": [("x" * 2000, 1)]}, ModelFileError, "over 1024 characters"),
        ({"extra": [("▁the", 1)]}, ModelFileError, "different"),
    ],
)
def test_a_sentencepiece_vocabulary_that_is_refused(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_spm(tmp_path / "v.gguf", **settings)


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([-1000.0], Unsupported, "order is lost"),
        ([0.0, float("nan")], ModelFileError, "finite"),
        ([0, 1], ModelFileError, "scores is missing, empty, or of another type"),
    ],
)
def test_scores_that_give_no_order(tmp_path: Path, scores: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_spm(tmp_path / "v.gguf", scores=scores)


def test_merges_to_a_control_token_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"<": 0, "s": 1, ">": 2, "s>": 3, "<s>": 4}, [("s", ">"), ("<", "s>")]))
    tokenizer.decoder = made.llama2().decoder
    tokenizer.add_special_tokens(["<s>"])
    with pytest.raises(Unsupported, match="plain text can become its control token '<s>'"):
        vocab_hf.read(made.write_hf(tmp_path, tokenizer))


# --- Templates ------------------------------------------------------------------------------------------------------


def test_templates_that_take_turns(tmp_path: Path) -> None:
    text, tokenizer = open_hf(tmp_path, "llama2")
    chat = [{"role": "system", "content": "Be brief."}, *user(" Hi "), {"role": "assistant", "content": "Hello"}]
    rendered = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi [/INST] Hello </s><s>[INST] Bye [/INST]"
    ids = text.encode_chat([*chat, *user("Bye")])
    assert ids == tokenizer.encode(rendered, add_special_tokens=False).ids
    with pytest.raises(RequestError, match="take turns"):
        text.encode_chat([*user("a"), *user("b")])


def test_a_role_that_a_template_does_not_know(tmp_path: Path) -> None:
    text, _ = open_hf(tmp_path, "tekken")
    with pytest.raises(RequestError, match="not system"):
        text.encode_chat([{"role": "system", "content": "a"}])


def test_without_a_template_bos_is_the_tokenizers(tmp_path: Path) -> None:
    text, _ = open_hf(tmp_path, "llama2", chat_template=None)
    assert text.encode_chat(user("a</s>")) == text.encode("User: a</s>\nAssistant:")
