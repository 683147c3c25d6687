"""The vocabularies that we rebuild from GGUF, against the ids that llama.cpp makes of the same files."""

import functools
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from pptasks import gguf, vocab_gguf
from pptasks.config import Settings
from pptasks.text import Text
from tests import vocab_cases
from tests.conftest import lacks


@pytest.fixture(scope="session")
def folder() -> Path:
    try:
        return vocab_cases.fetch(Settings.from_env().cache)
    except (RuntimeError, OSError) as error:
        lacks(str(error))


@pytest.fixture(scope="module")
def open_vocab(folder: Path) -> Callable[[str], Text]:
    @functools.cache
    def open_vocab(name: str) -> Text:
        path = folder / f"ggml-vocab-{name}.gguf"
        return Text(vocab_gguf.read(gguf.read_header(path).metadata, path))

    return open_vocab


def bos(text: Text) -> list[int]:
    return text.encode("")


@pytest.mark.parametrize("name", vocab_cases.NAMES)
def test_the_ids_are_those_of_llama_cpp(folder: Path, open_vocab: Callable[[str], Text], name: str) -> None:
    cases, text = vocab_cases.read(folder, name), open_vocab(name)
    assert len(cases.texts) == len(cases.ids) == 46
    assert bos(text) == {"llama-bpe": [128000], "llama-spm": [1], "phi-3": [1]}.get(name, [])
    for case, ids in zip(cases.texts, cases.ids, strict=True):
        assert text.encode(case) == [*bos(text), *ids], case
        assert text.decode(list(ids)) == case


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("gpt-2", "<|endoftext|>"),
        ("llama-bpe", "<|eot_id|><|begin_of_text|>"),
        ("llama-spm", "<s></s> <unk>[INST] <0x0A>"),
        ("phi-3", "<s></s><|end|><|user|>"),
        ("qwen2", "<|im_end|><|endoftext|>"),
    ],
)
def test_what_looks_like_a_control_token_stays_text(open_vocab: Callable[[str], Text], name: str, typed: str) -> None:
    text = open_vocab(name)
    for whole in (typed, f"a{typed}\n{typed}"):
        ids = text.encode(whole)[len(bos(text)) :]
        assert text._vocabulary.silent.isdisjoint(ids)
        assert text.decode(ids) == whole


def best_pair_first(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's merges, slowly: of all neighbours that make a piece, the best score, and of equals the first."""
    parts = list(text)
    while True:
        made = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not made:
            return parts
        i = min(made)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_merges_from_scores(folder: Path, open_vocab: Callable[[str], Text]) -> None:
    metadata = gguf.read_header(folder / "ggml-vocab-llama-spm.gguf").metadata
    tokens, scores, types = (metadata[f"tokenizer.ggml.{x}"].decode() for x in ("tokens", "scores", "token_type"))
    pieces = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    ids = {t: i for i, t in enumerate(tokens)}
    begun = time.perf_counter()
    assert len(vocab_gguf._merges(pieces)) > 60_000
    assert time.perf_counter() - begun < 2
    rng = random.Random(5)
    words = ["the", "aaaa", "Hello", "ing", "re", "1234", "été", "…", "ßß", "привет", "\t", "\n", "€", "==", "for(i=0;"]
    for _ in range(300):
        text = "".join(rng.choice([*words, " " * rng.randint(1, 40)]) for _ in range(rng.randint(1, 8)))
        expected: list[int] = []
        for part in best_pair_first(pieces, "▁" + text.replace(" ", "▁")):
            expected += [ids[part]] if part in pieces else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        assert open_vocab("llama-spm").encode(text) == [1, *expected], text
