"""The vocabulary of a GGUF file, rebuilt from its `tokenizer.*` metadata.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer". Two kinds of `tokenizer.ggml.model`:

- "gpt2": BPE over bytes. How a text is split into words before its merges is named (`tokenizer.ggml.pre`) and not
  described: a name that we do not know is refused, since any other split yields other ids.
- "llama": SentencePiece's BPE over characters. No words, and no list of merges: the entries' scores are their order.

Where the format says nothing, we do as llama.cpp does (src/llama-vocab.cpp), but for one thing: there a text that
spells a control token may become one by merges, here never.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pptasks import vocab
from pptasks.errors import ModelFileError, Unsupported
from pptasks.gguf import Array

# tokenizer.ggml.token_type, llama.cpp's enum llama_token_type; an entry of any other type is ordinary text.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
STOPS = ("eos", "eot", "eom")
IDS = dict.fromkeys((*NAMES.values(), *STOPS))
LLAMA_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where a file of kind "llama" does not say

MAX_ENTRY = 1 << 10  # characters; a longest one of 48 is usual. Cutting an entry everywhere takes their square

Entries = tuple[tuple[str, int], ...]  # spelling and type, by id


def read(metadata: Mapping[str, Any], path: Path) -> vocab.Vocabulary:
    """Unsupported: a tokenizer that we do not know, by name. ModelFileError: arrays that do not fit each other."""
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre"))
    if kind != "llama" and (kind != "gpt2" or pre not in PRESETS):
        known = f"'llama', and 'gpt2' with {', '.join(PRESETS)}"
        raise Unsupported(f"{path}: has tokenizer {kind!r} with pre-tokenizer {pre!r}; supported: {known}")
    entries = _entries(metadata, path)
    ids = _ids(metadata, LLAMA_IDS if kind == "llama" else {}, len(entries))
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, entries, ids.get("unknown"), path)
    else:
        tokenizer = _byte_level(metadata, entries, PRESETS[pre], path)
    add_bos = kind == "llama" or PRESETS[pre].add_bos
    template = metadata.get("tokenizer.chat_template")
    return vocab.make(
        tokenizer,
        unused=[i for i, (_, t) in enumerate(entries) if t == UNUSED],
        bos_id=ids.get("bos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        eos_ids=[ids[name] for name in STOPS if name in ids],
        template=template if isinstance(template, str) else None,
        names={name: entries[ids[short]][0] for name, short in NAMES.items() if short in ids},
        source=path,
    )


def _entries(metadata: Mapping[str, Any], path: Path) -> Entries:
    tokens = _array(metadata, "tokens", str, path)
    types = _array(metadata, "token_type", int, path)
    different = len(set(tokens))
    if different != len(tokens) or len(types) != len(tokens):
        raise ModelFileError(f"{path}: {len(tokens)} tokens, {different} of them different, and {len(types)} types")
    return tuple(zip(tokens, types, strict=True))


def _ids(metadata: Mapping[str, Any], defaults: Mapping[str, int], count: int) -> dict[str, int]:
    """The ids of "bos", "eos", ...: of those that the file names, and that it has."""
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name)) for name in IDS}
    return {name: i for name, i in named.items() if type(i) is int and 0 <= i < count}


@dataclass(frozen=True)
class Preset:
    """What a `tokenizer.ggml.pre` stands for. The patterns are those of the models' own tokenizer.json."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False  # a whole word that is an entry is that entry, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _words(digits: str) -> str:
    """As the tokenizer.json of Llama 3 and of Qwen2 have it; they differ in the digits that one word may have."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


# As the tokenizer.json of mistralai/Mistral-Nemo-Instruct-2407 has it: a word may begin with capitals, and changes from
# small letters to a capital only at a new word.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3 = Preset(lambda: _split(_words(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)

PRESETS: Mapping[str, Preset] = {
    "gpt-2": Preset(_gpt2),
    "smollm": Preset(lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,  # earlier names of the same
    "llama-v3": _LLAMA3,
    "qwen2": Preset(lambda: _split(_words(r"\p{N}")), normalizer=normalizers.NFC),
    "tekken": Preset(lambda: _split(_TEKKEN), ignore_merges=True, add_bos=True),
}


def _byte_level(metadata: Mapping[str, Any], entries: Entries, preset: Preset, path: Path) -> Tokenizer:
    merges = _array(metadata, "merges", str, path)
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    except ValueError:
        raise ModelFileError(f"{path}: a merge in tokenizer.ggml.merges is no pair") from None
    tokenizer = _bpe(entries, pairs, path, ignore_merges=preset.ignore_merges)
    if preset.normalizer:
        tokenizer.normalizer = preset.normalizer()
    tokenizer.pre_tokenizer = preset.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], entries: Entries, unknown: int | None, path: Path) -> Tokenizer:
    """Spaces are written "▁"; a character without an entry is written in bytes, "<0xE2>"; else it is unknown.

    A text, and what follows a control or user-defined token, begins with a space that nobody typed, unless the file
    says otherwise (`add_space_prefix`).
    """
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{name}"):
            raise Unsupported(f"{path}: its tokenizer has {name}; supported: texts as they are")
    scores = _array(metadata, "scores", float, path)
    if len(scores) != len(entries) or not all(map(isfinite, scores)):
        raise ModelFileError(f"{path}: {len(entries)} tokens, and {len(scores)} scores, which must be finite numbers")
    apart = (UNKNOWN, CONTROL, UNUSED, BYTE)  # these come into a text in another way, or never
    pieces = {token: score for (token, t), score in zip(entries, scores, strict=True) if t not in apart}
    if max(map(len, pieces), default=0) > MAX_ENTRY:
        raise ModelFileError(f"{path}: a token has over {MAX_ENTRY} characters")
    if len(set(pieces.values())) < 2:  # what converters write that had no tokenizer.model
        raise Unsupported(f"{path}: its tokens have one score, so their order is lost; convert it from tokenizer.model")
    unk = None if unknown is None else entries[unknown][0]
    tokenizer = _bpe(entries, _merges(pieces), path, unk_token=unk, fuse_unk=True, byte_fallback=True)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    before = [normalizers.Prepend("▁")] if prefix else []
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, best score of the latter first.

    SentencePiece merges the best pair of a text, and of equals the first. A list of merges has no equals: here the
    longer left half goes first, so that a run of one character (spaces: their pieces have one score) grows from the
    left. Both halves are pieces, so a character that is none is never merged.
    """
    pairs = [
        (score, left, right)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    return [(left, right) for _, left, right in pairs]


def _bpe(entries: Entries, merges: Sequence[tuple[str, str]], path: Path, **options: Any) -> Tokenizer:
    """A tokenizer that knows which entries are control tokens and which are found as they are written."""
    try:
        bpe = models.BPE(vocab={token: i for i, (token, _) in enumerate(entries)}, merges=merges, **options)
    except Exception as e:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: its vocabulary cannot be built: {e}") from e
    tokenizer = Tokenizer(bpe)
    control = [AddedToken(token, special=True, normalized=False) for token, t in entries if t in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, t in entries if t == USER_DEFINED])
    return tokenizer


def _array(metadata: Mapping[str, Any], name: str, kind: type, path: Path) -> tuple[Any, ...]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    items = value.decode() if isinstance(value, Array) else ()
    if not items or type(items[0]) is not kind:
        raise ModelFileError(f"{path}: tokenizer.ggml.{name} is missing, empty, or of another type")
    return items
