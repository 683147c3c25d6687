"""A request, from what a command was given."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pptasks.errors import UsageError
from pptasks.request import Request

_ANSWER = (
    "max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logprobs",
)  # fmt: skip


def request(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, given: Mapping[str, Any]) -> Request:
    """Raises UsageError for a wrong combination, RequestError for a request that cannot be served."""
    if sum(x is not None for x in (prompt, chat, tokens)) > 1:
        raise UsageError("give one of PROMPT, --chat and --tokens")
    if raw and chat is not None:
        raise UsageError("--raw and --chat: a chat is always put into the model's template; give a PROMPT or --tokens")
    system, wanted = given.get("system"), answer(given)
    if system is not None and (raw or tokens is not None):
        other = "--raw" if raw else "--tokens"
        raise UsageError(f"--system and {other}: only the model's chat template has a place for it; leave one out")
    if chat is not None:
        return Request(messages=_with_system(system, chat, _messages(chat)), **wanted)
    if tokens is not None:
        return Request(tokens=_token_ids(tokens), **wanted)
    if prompt is None:
        prompt = piped()
        if prompt is None:
            raise UsageError('give a PROMPT, such as pp run "Say hello", or pipe one in')
    made = Request(prompt=prompt, raw=raw, **wanted)
    if system is None:
        return made
    messages = ({"role": "system", "content": system}, {"role": "user", "content": prompt})
    return replace(made, prompt=None, messages=messages)


def answer(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command was told about the answer, as keyword arguments of `Request`."""
    return {name: given[name] for name in _ANSWER if name in given}


def piped() -> str | None:
    """What is piped in; None at a terminal. Raises UsageError for what is no text."""
    try:
        return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as e:
        raise UsageError(f"what is piped in is not {e.encoding} text: {e.reason} at byte {e.start}") from None


def _messages(file: Path) -> tuple[Any, ...]:
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"--chat {file} is not readable JSON: {e}") from None
    if not isinstance(messages, list):
        raise UsageError(f'--chat {file} must hold a list: [{{"role": "user", "content": "..."}}]')
    return tuple(messages)


def _with_system(system: str | None, chat: Path, messages: tuple[Any, ...]) -> tuple[Any, ...]:
    if system is None:
        return messages
    if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
        raise UsageError(f"--system and --chat {chat}: it has a system message already; leave one out")
    return ({"role": "system", "content": system}, *messages)


def _token_ids(tokens: str) -> tuple[int, ...]:
    try:
        return tuple(int(t) for t in tokens.replace(",", " ").split())
    except ValueError:
        raise UsageError('--tokens takes whole numbers: --tokens "1,2,3"') from None
