"""The vocabulary of a GGUF file, rebuilt from its `tokenizer.*` metadata.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer". How a text is split into words before
its merges is named there (`tokenizer.ggml.pre`) and not described: a name that we do not know is refused, since any
other split yields other ids.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pptasks import vocab
from pptasks.errors import ModelFileError, Unsupported
from pptasks.gguf import Array

# tokenizer.ggml.token_type, llama.cpp's enum llama_token_type; an entry of any other type is ordinary text.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
STOPS = ("eos", "eot", "eom")


def read(metadata: Mapping[str, Any], path: Path) -> vocab.Vocabulary:
    """Unsupported: a tokenizer that we do not know, by name. ModelFileError: arrays that do not fit each other."""
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre"))
    if kind != "gpt2" or pre not in PRESETS:
        known = ", ".join(PRESETS)
        raise Unsupported(f"{path}: has tokenizer {kind!r} with pre-tokenizer {pre!r}; supported: 'gpt2' with {known}")
    tokens = _array(metadata, "tokens", str, path)
    types = _array(metadata, "token_type", int, path)
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ModelFileError(
            f"{path}: {len(tokens)} tokens, {len(set(tokens))} of them different, and {len(types)} types"
        )
    tokenizer = _build(tokens, types, _array(metadata, "merges", str, path), PRESETS[pre], path)

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    template = metadata.get("tokenizer.chat_template")
    return vocab.make(
        tokenizer,
        unused=[i for i, t in enumerate(types) if t == UNUSED],
        bos_id=token_id("bos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", PRESETS[pre].add_bos)),
        eos_ids=[i for name in STOPS if (i := token_id(name)) is not None],
        template=template if isinstance(template, str) else None,
        names={name: tokens[i] for name, short in NAMES.items() if (i := token_id(short)) is not None},
        source=path,
    )


@dataclass(frozen=True)
class Preset:
    """What a `tokenizer.ggml.pre` stands for. The patterns are those of the models' own tokenizer.json."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False  # a whole word that is an entry is that entry, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _split(digits: str) -> Any:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


PRESETS: Mapping[str, Preset] = {
    "gpt-2": Preset(_gpt2),
    "smollm": Preset(lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])),
    "llama-bpe": Preset(lambda: _split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": Preset(lambda: _split(r"\p{N}"), normalizer=normalizers.NFC),
}


def _build(
    tokens: tuple[str, ...], types: tuple[int, ...], merges: tuple[str, ...], preset: Preset, path: Path
) -> Tokenizer:
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=preset.ignore_merges)
    except Exception as e:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: its vocabulary cannot be built: {e}") from e
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = preset.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if preset.normalizer:
        tokenizer.normalizer = preset.normalizer()
    typed = list(zip(tokens, types, strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, t in typed if t in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, t in typed if t == USER_DEFINED])
    return tokenizer


def _array(metadata: Mapping[str, Any], name: str, kind: type, path: Path) -> tuple[Any, ...]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    items = value.decode() if isinstance(value, Array) else ()
    if not items or type(items[0]) is not kind:
        raise ModelFileError(f"{path}: tokenizer.ggml.{name} is missing, empty, or of another type")
    return items
