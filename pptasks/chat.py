"""Chat messages to one text, with what the user typed kept apart from what the model's template wrote.

A control token such as "<|im_end|>" ends a turn when the template writes it, and is eleven characters when a user types
it. Both meet in one rendered string, so a spelling inside a message is disguised before rendering: its first character
is exchanged for one of Unicode's private use that occurs nowhere else. Whoever splits the rendered text at control
tokens does not see it, and `Rendered.reveal` puts it back.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from pptasks.errors import RequestError, Unsupported

MAX_RENDERED = 1 << 26  # characters
_PRIVATE = range(0x100000, 0x10FFFE)  # plane 16, private use

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Rendered:
    text: str
    disguise: Mapping[int, int] = field(
        default_factory=dict
    )  # stand-in -> the character it stands for, as str.translate takes it

    def reveal(self, part: str) -> str:
        return part.translate(self.disguise)


def render(template: str | None, messages: Messages, spellings: Iterable[str], names: Mapping[str, str]) -> Rendered:
    """The prompt for the model's next turn.

    `spellings` are the control tokens', `names` the special tokens that a template may refer to ("bos_token": "<s>").
    Without a template: "System: ...", "User: ...", one line each, then "Assistant:". RequestError: messages that are
    none, or that the template refuses. Unsupported: a template that cannot be used.
    """
    checked = [_message(m) for m in messages]
    if not checked:
        raise RequestError("the chat has no messages; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    if template is None:
        return Rendered("".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in checked) + "Assistant:")
    disguise = _Disguise(spellings, used="".join([template, *(text for m in checked for text in m.values())]))
    disguised = [{key: disguise.hide(text) for key, text in m.items()} for m in checked]
    return Rendered(_run(template, disguised, names), disguise.shown)


def _message(message: Any) -> dict[str, str]:
    if (
        not isinstance(message, Mapping)
        or set(message) != {"role", "content"}
        or not all(isinstance(v, str) for v in message.values())
    ):
        raise RequestError("a chat message is an object with the texts 'role' and 'content', and nothing else")
    return dict(message)


class _Disguise:
    """Hides the control tokens' spellings in texts. `shown` says how to undo it."""

    def __init__(self, spellings: Iterable[str], used: str):
        known = sorted(filter(None, spellings), key=len, reverse=True)
        self.whole = re.compile(
            "(?=" + "|".join(map(re.escape, known)) + ")" if known else r"(?!)"
        )  # a lookahead: overlapping ones too
        self.heads = {s[:k] for s in known for k in range(1, len(s))}
        self.tails = {s[-k:] for s in known for k in range(1, len(s))}
        self.longest = len(known[0]) if known else 0
        taken = set(used)
        self.free = (chr(c) for c in _PRIVATE if chr(c) not in taken)
        self.stand_in: dict[str, str] = {}
        self.shown: dict[int, int] = {}

    def hide(self, text: str) -> str:
        """`text` such that no spelling is in it, and none arises where the template's own text touches it."""
        reach = range(1, min(self.longest, len(text) + 1))
        places = {m.start() for m in self.whole.finditer(text)}
        places |= {len(text) - k for k in reach if text[-k:] in self.heads}
        places |= {0 for k in reach if text[:k] in self.tails}
        return "".join(self._exchange(c) if i in places else c for i, c in enumerate(text)) if places else text

    def _exchange(self, char: str) -> str:
        if char not in self.stand_in:
            stand_in = next(self.free, None)
            if stand_in is None:
                raise RequestError("the chat uses every private character of Unicode's plane 16; leave one out")
            self.stand_in[char] = stand_in
            self.shown[ord(stand_in)] = ord(char)
        return self.stand_in[char]


def _run(template: str, messages: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> str:
    """Render as transformers' `apply_chat_template` does, in a sandbox: a model's file may come from anyone."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    parts, length = [], 0
    try:
        compiled = environment.from_string(template)
        for part in compiled.generate(
            **names, messages=messages, tools=None, documents=None, add_generation_prompt=True
        ):
            length += len(part)
            if length > MAX_RENDERED:
                raise RequestError(f"the chat renders to more than {MAX_RENDERED} characters")
            parts.append(part)
    except _Refused as e:
        raise RequestError(f"the model's chat template refuses the messages: {e}") from e
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as e:
        raise Unsupported(
            f"the model's chat template cannot be used: {type(e).__name__}: {e}; send the prompt as raw text"
        ) from e
    return "".join(parts)


class _Refused(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
