"""A model's vocabulary, read from its own files into one form: from GGUF's metadata or from a Hugging Face folder.

Either way the `tokenizers` library does the encoding. What differs between files ends here.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pptasks import gguf, stfile
from pptasks.errors import ModelFileError, Unsupported

MAX_TOKENIZER = 1 << 28  # bytes of tokenizer.json
MAX_TEMPLATE = 1 << 20  # characters of a chat template

# Control tokens that end a turn, whatever a file says about eos: files often name only one of the two that their
# template uses.
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>", "<end_of_turn>",
    "<|EOT|>", "<|eot|>", "</s>",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    size: int  # highest id + 1
    control: Mapping[str, AddedToken]  # tokens that stand for no text, by their spelling
    silent: frozenset[int]  # ids that decode to nothing: the control tokens and unused entries
    spell: Callable[[str], bytes]  # an entry -> the UTF-8 bytes it stands for
    strip_first_space: bool  # the text's first space belongs to the encoding, not to the text
    bos_id: int | None
    add_bos: bool  # a text begins with bos
    stop_ids: frozenset[int]
    template: str | None  # Jinja2 source of the chat template
    names: Mapping[str, str]  # "bos_token", "eos_token", ...: spellings, as a template refers to them


def from_gguf(metadata: Mapping[str, Any], path: Path) -> Vocabulary:
    """Rebuild the vocabulary from `tokenizer.*`. Unsupported: a tokenizer that we do not know, by name. ModelFileError:
    inconsistent arrays.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRESETS:
        raise Unsupported(
            f"{path}: has tokenizer {kind!r} with pre-tokenizer {pre!r}; supported: 'gpt2' with {', '.join(_PRESETS)}"
        )
    preset = _PRESETS[pre]
    tokens, types = _array(metadata, "tokenizer.ggml.tokens", path), _array(metadata, "tokenizer.ggml.token_type", path)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelFileError(f"{path}: {len(tokens)} tokens, {len(vocab)} of them different, with {len(types)} types")
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "tokenizer.ggml.merges", path)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=preset.ignore_merges))
    except Exception as e:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: its vocabulary cannot be built: {e}") from e
    tokenizer.pre_tokenizer, tokenizer.decoder = preset.pre_tokenizer(), decoders.ByteLevel()
    if preset.normalizer:
        tokenizer.normalizer = preset.normalizer()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k in _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    ids = {name: token_id(short) for name, short in _GGUF_NAMES.items()}
    template = metadata.get("tokenizer.chat_template")
    return _vocabulary(
        tokenizer,
        unused={i for i, k in enumerate(types) if k == _UNUSED},
        bos_id=ids["bos_token"],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", preset.add_bos)),
        eos_ids=[i for short in ("eos", "eot", "eom") if (i := token_id(short)) is not None],
        template=template if isinstance(template, str) else None,
        names={name: tokens[i] for name, i in ids.items() if i is not None},
        source=path,
    )


def from_folder(folder: Path) -> Vocabulary:
    """Read tokenizer.json and what tokenizer_config.json, generation_config.json and config.json say about it.

    Unsupported: no tokenizer.json, or a way to spell text that we do not know. ModelFileError: a file that cannot be
    read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise Unsupported(
            f"{folder}: holds no tokenizer.json; convert its tokenizer with transformers (use_fast=True) first"
        )
    try:
        if path.stat().st_size > MAX_TOKENIZER:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes; the limit is {MAX_TOKENIZER}")
        tokenizer = Tokenizer.from_file(str(path))
    except ModelFileError:
        raise
    except Exception as e:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: cannot be read: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _optional_json(folder / "tokenizer_config.json")
    sources = [_optional_json(folder / name) for name in ("generation_config.json", "config.json")]
    names = {name: text for name in _HF_NAMES if (text := _content(settings.get(name))) is not None}
    eos_ids = [i for source in sources for i in _ids(source.get("eos_token_id"))]
    eos_ids += [i for i in [tokenizer.token_to_id(names.get("eos_token", ""))] if i is not None]
    bos_ids = [i for i in [tokenizer.token_to_id(names.get("bos_token", ""))] if i is not None]
    bos_ids += [i for source in sources for i in _ids(source.get("bos_token_id"))]
    bos_id = bos_ids[0] if bos_ids else None
    asks = settings.get("add_bos_token")
    return _vocabulary(
        tokenizer,
        unused=set(),
        bos_id=bos_id,
        add_bos=asks if isinstance(asks, bool) else tokenizer.encode("").ids[:1] == [bos_id],
        eos_ids=eos_ids,
        template=_folder_template(folder, settings),
        names=names,
        source=path,
    )


def _vocabulary(
    tokenizer: Tokenizer,
    *,
    unused: set[int],
    bos_id: int | None,
    add_bos: bool,
    eos_ids: Iterable[int],
    template: str | None,
    names: Mapping[str, str],
    source: Path,
) -> Vocabulary:
    added = tokenizer.get_added_tokens_decoder()
    control = {token.content: token for token in added.values() if token.special}
    if template is not None and len(template) > MAX_TEMPLATE:
        raise ModelFileError(f"{source}: its chat template has {len(template)} characters; the limit is {MAX_TEMPLATE}")
    size = max([tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
    ends = {tokenizer.token_to_id(text) for text in TURN_ENDS if text in control}
    spell, strip_first_space = _spelling(
        json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}, source
    )
    return Vocabulary(
        tokenizer=tokenizer,
        size=size,
        control=control,
        silent=frozenset(unused | {i for i, token in added.items() if token.special}),
        spell=spell,
        strip_first_space=strip_first_space,
        bos_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        stop_ids=frozenset(ends.union(eos_ids)),
        template=template,
        names=names,
    )


# --- GGUF -------------------------------------------------------------------------------------------------------------------------------

_UNKNOWN_TYPE, _CONTROL_TYPE, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # llama.cpp's enum llama_token_type
_CONTROL = (_UNKNOWN_TYPE, _CONTROL_TYPE)
_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class _Preset:
    """What `tokenizer.ggml.pre` stands for. The split patterns are those of the models' own tokenizer.json."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False  # a whole word that is an entry is that entry, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


_PRESETS: Mapping[str, _Preset] = {
    "gpt-2": _Preset(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": _Preset(lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])),
    "llama-bpe": _Preset(lambda: _split(_words(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True),
    "qwen2": _Preset(lambda: _split(_words(r"\p{N}")), normalizer=normalizers.NFC),
}  # fmt: skip


def _array(metadata: Mapping[str, Any], key: str, path: Path) -> tuple[Any, ...]:
    value = metadata.get(key)
    items = value.decode() if isinstance(value, gguf.Array) else ()
    wanted = int if key.endswith("token_type") else str
    if not items or type(items[0]) is not wanted:
        raise ModelFileError(f"{path}: {key} is missing or empty")
    return items


# --- Hugging Face -----------------------------------------------------------------------------------------------------------------------

_HF_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _optional_json(path: Path) -> dict[str, Any]:
    return stfile.read_json(path) if path.is_file() else {}


def _content(value: Any) -> str | None:
    """A token in tokenizer_config.json: its spelling, or an object that holds it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0]


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or `chat_template` of tokenizer_config.json: one template, or a list with one named
    "default".
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            with file.open(encoding="utf-8") as f:
                return f.read(MAX_TEMPLATE + 1)
        except (OSError, UnicodeDecodeError) as e:
            raise ModelFileError(f"{file}: cannot be read: {e}") from e
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None


# --- Spelling ---------------------------------------------------------------------------------------------------------------------------


def _spelling(decoder: Mapping[str, Any], source: Path) -> tuple[Callable[[str], bytes], bool]:
    """(entry -> bytes, whether the first space goes) for a decoder as tokenizer.json describes it.

    Two ways to spell are known: byte-level (GPT-2 and all that came after it), and SentencePiece's, with "▁" for a
    space and "<0x0A>" for a byte. Spelling by bytes, and not by the library's decode of a whole text, is what lets a
    stream be cut anywhere.
    """
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _spell_byte_level, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return _spell_metaspace, steps[0].get("prepend_scheme") != "never"
    replaces = [(s.get("pattern"), s.get("content")) for s in steps if s.get("type") == "Replace"]
    strips = [(s.get("content"), s.get("start"), s.get("stop")) for s in steps if s.get("type") == "Strip"]
    if (
        set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and replaces == [({"String": "▁"}, " ")]
        and strips in ([], [(" ", 1, 0)])
    ):
        return (_spell_byte_fallback if "ByteFallback" in kinds else _spell_metaspace), bool(strips)
    raise Unsupported(
        f"{source}: has decoder {', '.join(map(str, kinds))}; supported: ByteLevel, Metaspace, SentencePiece's with ByteFallback"
    )


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a byte that prints stands for itself, the others for the characters from U+0100 on, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_of_char()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[c] for c in token)
    except KeyError:  # an added token that is written as plain text
        return token.encode()


def _spell_metaspace(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _spell_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return _spell_metaspace(token)
