"""The vocabulary of a Hugging Face folder: tokenizer.json, and what the JSON files beside it say about its use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pptasks import vocab
from pptasks.errors import ModelFileError, Unsupported
from pptasks.stfile import read_json

MAX_TOKENIZER = 1 << 28  # bytes of tokenizer.json
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read(folder: Path) -> vocab.Vocabulary:
    """Unsupported: no tokenizer.json, or a decoder that we do not know. ModelFileError: a file that cannot be read."""
    path = folder / "tokenizer.json"
    tokenizer = _load(path)
    settings = _optional_json(folder / "tokenizer_config.json")
    configs = [_optional_json(folder / name) for name in ("generation_config.json", "config.json")]
    names = {name: text for name in NAMES if (text := _content(settings.get(name))) is not None}

    def token_ids(name: str) -> list[int]:
        """What the files say, the tokenizer's own configuration first."""
        named = tokenizer.token_to_id(names.get(name, ""))
        listed = [i for config in configs for i in _ids(config.get(f"{name}_id"))]
        return listed if named is None else [named, *listed]

    bos_id = next(iter(token_ids("bos_token")), None)
    asks = settings.get("add_bos_token")
    return vocab.make(
        tokenizer,
        bos_id=bos_id,
        add_bos=asks if isinstance(asks, bool) else tokenizer.encode("").ids[:1] == [bos_id],  # its post-processor's
        eos_ids=token_ids("eos_token"),
        template=_template(folder, settings),
        names=names,
        source=path,
    )


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        remedy = "convert its tokenizer with transformers (use_fast=True) first"
        raise Unsupported(f"{path.parent}: holds no tokenizer.json; {remedy}")
    size = path.stat().st_size
    if size > MAX_TOKENIZER:
        raise ModelFileError(f"{path}: {size} bytes; the limit is {MAX_TOKENIZER}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: cannot be read: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(value: Any) -> str | None:
    """A token in tokenizer_config.json: its spelling, or an object that holds it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0]


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or `chat_template` in tokenizer_config.json: one, or a list with one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            with file.open(encoding="utf-8") as f:
                return f.read(vocab.MAX_TEMPLATE + 1)
        except (OSError, UnicodeDecodeError) as e:
            raise ModelFileError(f"{file}: cannot be read: {e}") from e
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None
