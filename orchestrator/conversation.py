"""A conversation: what was said, in order; and the files that keep one, as `pp run --chat` reads them."""

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pptasks.errors import RequestError, StorageError, UsageError
from pptasks.request import Request
from pptasks.shown import line, plain

MAX_BYTES = 64 << 20  # of a file
Message = Mapping[str, str]


@dataclass(frozen=True)
class Conversation:
    """Messages as a request takes them: a system message first, if there is one, then questions and answers."""

    messages: tuple[Message, ...] = ()

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @property
    def said(self) -> tuple[Message, ...]:
        """Without the system message."""
        return self.messages if self.system is None else self.messages[1:]

    def led_by(self, system: str | None) -> "Conversation":
        """The same with this system message; None: without one."""
        return Conversation((*([] if system is None else [_message("system", system)]), *self.said))

    def cleared(self) -> "Conversation":
        return Conversation().led_by(self.system)

    def asked(self, question: str) -> "Conversation":
        return Conversation((*self.messages, _message("user", question)))

    def answered(self, answer: str) -> "Conversation":
        return Conversation((*self.messages, _message("assistant", answer)))

    def before_last(self) -> tuple["Conversation", str] | None:
        """What came before the last question, and that question; None if there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                return Conversation(self.messages[:i]), self.messages[i]["content"]
        return None


def load(path: Path) -> Conversation:
    """Empty if there is no such file. Raises UsageError, saying why, for one that holds no conversation; StorageError
    for one that cannot be read."""
    try:
        if not path.exists():
            return Conversation()
        if not path.is_file():
            raise UsageError(f"{path} is no file: give the name of one")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is no conversation: it is larger than {MAX_BYTES >> 20} MiB")
        raw = json.loads(path.read_bytes())
    except OSError as e:
        raise StorageError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no conversation: it is not JSON") from None
    if not isinstance(raw, list):
        raise UsageError(f'{path} is no conversation: [{{"role": "user", "content": "..."}}, ...]')
    try:
        return Conversation(Request(messages=tuple(raw)).messages or ()) if raw else Conversation()
    except RequestError as e:
        raise UsageError(f"{path} is no conversation: {line(str(e))}") from None


def save(path: Path, conversation: Conversation) -> None:
    """Whole or not at all, in place of what was there; its owner alone may read it. Raises StorageError."""
    path = Path(os.path.realpath(path))  # the file that a link names, and not the link
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        try:
            with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
                file.write(_encode(conversation))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise StorageError(f"cannot write {path}: {e.strerror}") from None


def save_as(path: Path, conversation: Conversation) -> None:
    """Save where nothing is, or another conversation. Raises StorageError."""
    try:
        load(path)
    except UsageError as e:
        raise StorageError(f"{e}; it is left as it is") from None
    save(path, conversation)


def _encode(conversation: Conversation) -> str:
    """A message a line. Characters that command a terminal are escaped: people look at files."""
    plainly = [json.dumps(dict(message), ensure_ascii=False) for message in conversation.messages]
    lines = [text if plain(text) == text else json.dumps(json.loads(text)) for text in plainly]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
