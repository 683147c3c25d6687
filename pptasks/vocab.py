"""A model's vocabulary in one form, whatever file it came from: `vocab_gguf.read` and `vocab_hf.read` make it.

Either way the `tokenizers` library does the encoding. Decoding goes by bytes: each entry stands for some, which is what
lets a stream of ids be cut anywhere.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from pptasks.errors import ModelFileError, Unsupported

MAX_TEMPLATE = 1 << 20  # characters of a chat template

# Tokens that end a turn, whatever a file says about eos (files often name only one of the two in use) or about their
# kind (some have them as text that was added to the vocabulary).
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>",
    "<end_of_turn>", "<|EOT|>", "<|eot|>", "</s>",
)  # fmt: skip

Spell = Callable[[str], bytes]


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    continued: Tokenizer  # for text that follows a control token; the same, unless a space begins the first text only
    size: int  # highest id + 1
    control: Mapping[str, int]  # tokens that stand for no text: spelling -> id
    control_pattern: re.Pattern[str]  # finds the longest of them, with the white space that it swallows
    silent: frozenset[int]  # ids that decode to nothing: the control tokens and unused entries
    verbatim: frozenset[int]  # entries that were added as plain text, and stand for it as they are written
    spell: Spell  # any other entry -> the UTF-8 bytes it stands for
    strip_first_space: bool  # the text's first space belongs to the encoding, not to the text
    bos_id: int | None
    add_bos: bool  # a text begins with bos; False without one
    stop_ids: frozenset[int]
    template: str | None  # Jinja2 source of the chat template
    names: Mapping[str, str]  # "bos_token", "eos_token", ...: spellings, as a template refers to them

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes that `token` adds to a text: none for an id that is silent or has no entry."""
        if token in self.silent or not 0 <= token < self.size:
            return b""
        entry = self.tokenizer.id_to_token(token)
        if entry is None:
            return b""
        return entry.encode() if token in self.verbatim else self.spell(entry)


def make(
    tokenizer: Tokenizer,
    *,
    unused: Collection[int] = (),
    bos_id: int | None,
    add_bos: bool,
    eos_ids: Collection[int],
    template: str | None,
    names: Mapping[str, str],
    source: Path,
) -> Vocabulary:
    """The vocabulary of a loaded tokenizer and what the files say beside it; errors name `source`.

    Unsupported: a decoder that we do not know, or a control token that plain text can become. ModelFileError: a
    template over the limit.
    """
    if template is not None and len(template) > MAX_TEMPLATE:
        raise ModelFileError(f"{source}: its chat template has over {MAX_TEMPLATE} characters")
    _promote(tokenizer, {bos_id, *eos_ids})
    added = tokenizer.get_added_tokens_decoder()
    control = {token.content: i for i, token in added.items() if token.special}
    _check_plain_text(tokenizer, control, names.get("unk_token"), source)
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    spell, strip_first_space = _spelling(decoder, source)
    return Vocabulary(
        tokenizer=tokenizer,
        continued=_continued(tokenizer),
        size=max([tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)]),
        control=control,
        control_pattern=_pattern(added[i] for i in control.values()),
        silent=frozenset(control.values()).union(unused),
        verbatim=frozenset(i for i, t in added.items() if not t.special and spell is _spell_byte_level),
        spell=spell,
        strip_first_space=strip_first_space,
        bos_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        stop_ids=frozenset(eos_ids).union(control[text] for text in TURN_ENDS if text in control),
        template=template,
        names=names,
    )


def _promote(tokenizer: Tokenizer, ids: Collection[int | None]) -> None:
    """Make control tokens of those that begin or end a text or a turn, where the file has them as added text."""
    for i, token in tokenizer.get_added_tokens_decoder().items():
        if not token.special and (i in ids or token.content in TURN_ENDS):
            token.special = True
            tokenizer.add_special_tokens([token])


def _check_plain_text(tokenizer: Tokenizer, control: Mapping[str, int], unknown: str | None, source: Path) -> None:
    """Refuse merges that lead to a control token: a user could type it."""
    tokenizer.encode_special_tokens = True
    for spelling, i in control.items():
        for text in (spelling, f"\n{spelling}"):  # behind a newline no space of the encoding's own stands before it
            if spelling != unknown and i in tokenizer.encode(text, add_special_tokens=False).ids:
                raise Unsupported(f"{source}: plain text can become its control token {spelling!r}")


def _continued(tokenizer: Tokenizer) -> Tokenizer:
    pre = tokenizer.pre_tokenizer
    if not isinstance(pre, pre_tokenizers.Metaspace) or pre.prepend_scheme != "first":
        return tokenizer
    continued = Tokenizer(tokenizer.model)  # shared, not copied
    if tokenizer.normalizer:
        continued.normalizer = tokenizer.normalizer
    continued.pre_tokenizer = pre_tokenizers.Metaspace(pre.replacement, prepend_scheme="never", split=pre.split)
    continued.add_tokens([token for token in tokenizer.get_added_tokens_decoder().values() if not token.special])
    return continued


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda t: len(t.content), reverse=True)
    return re.compile(
        "|".join(
            (r"\s*" if t.lstrip else "") + re.escape(t.content) + (r"\s*" if t.rstrip else "") for t in longest_first
        )
        or r"(?!)"
    )


def _spelling(decoder: Mapping[str, Any], source: Path) -> tuple[Spell, bool]:
    """(entry -> bytes, whether the first space goes) for a decoder as tokenizer.json describes it.

    Two ways to spell are known: by bytes (GPT-2 and all that came after it), and SentencePiece's, with "▁" for a space
    and "<0x0A>" for a byte.
    """
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _spell_byte_level, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return _spell_metaspace, steps[0].get("prepend_scheme") != "never"
    replaced = [(step.get("pattern"), step.get("content")) for step in steps if step.get("type") == "Replace"]
    stripped = [tuple(map(step.get, ("content", "start", "stop"))) for step in steps if step.get("type") == "Strip"]
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    if known and replaced == [({"String": "▁"}, " ")] and stripped in ([], [(" ", 1, 0)]):
        return (_spell_byte_fallback if "ByteFallback" in kinds else _spell_metaspace), bool(stripped)
    found = " + ".join(map(str, kinds))
    raise Unsupported(
        f"{source}: has decoder {found}; supported: ByteLevel, Metaspace, SentencePiece's with ByteFallback"
    )


def _alphabet() -> dict[str, int]:
    """GPT-2's: a byte that prints stands for itself, the others for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()


def _spell_byte_level(entry: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in entry)
    except KeyError:  # outside the alphabet: no text can be encoded to it
        return entry.encode()


def _spell_metaspace(entry: str) -> bytes:
    return entry.replace("▁", " ").encode()


def _spell_byte_fallback(entry: str) -> bytes:
    if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
        try:
            return bytes.fromhex(entry[3:5])
        except ValueError:
            pass
    return _spell_metaspace(entry)
