"""Ask and pieces -> what the client reads: one JSON object, or server-sent events. Pure.

An event is a chunk of JSON. Most of a chunk is the same for all of a choice, so it is made once; a piece costs the
encoding of its text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.serve.openai_ask import Ask, Endpoint
from orchestrator.serve.openai_errors import ApiError
from pptasks.stream import Account, Piece, TokenLogprobs

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"  # which clients read over
_TEXT = "\0text"  # stands for what differs from chunk to chunk, while a chunk's frame is made


@dataclass(frozen=True)
class Heading:
    """What is the same in all that is said of one HTTP request. `created`: Unix time; `fingerprint`: of the backend."""

    ask: Ask
    id: str
    created: int
    model: str
    fingerprint: str
    echoes: tuple[str, ...] = ()  # the text of each prompt, if they are to be repeated

    @property
    def is_chat(self) -> bool:
        return self.ask.endpoint is Endpoint.CHAT

    def echo(self, choice: int) -> str:
        return self.echoes[choice // self.ask.n] if self.echoes else ""

    def object(self, choices: list[Any], *, chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass
class Answer:
    """One choice, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    n_tokens: int = 0
    account: Account | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.n_tokens += len(piece.ids)
        self.account = piece.account or self.account


def whole(heading: Heading, answers: Sequence[Answer]) -> bytes:
    """The response to a request that streams nothing."""
    choices = [_choice(heading, i, answer) for i, answer in enumerate(answers)]
    accounts = [answer.account for answer in answers if answer.account is not None]
    return json.dumps(heading.object(choices) | {"usage": usage(heading.ask, accounts)}).encode()


def _choice(heading: Heading, index: int, answer: Answer) -> dict[str, Any]:
    said, reason = "".join(answer.texts), answer.account.finish_reason if answer.account else None
    wants = heading.ask.prompt_of(index).logprobs is not None
    if heading.is_chat:
        logprobs: Any = _chat_logprobs(answer.logprobs) if wants else None
        message = {"role": "assistant", "content": said, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
    logprobs = _text_logprobs(answer.logprobs, len(heading.echo(index))) if wants else None
    return {"index": index, "text": heading.echo(index) + said, "logprobs": logprobs, "finish_reason": reason}


def usage(ask: Ask, accounts: Sequence[Account]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; it was computed for the first of them."""
    prompts = [accounts[i : i + ask.n] for i in range(0, len(accounts), ask.n)]
    prompt, completion = sum(p[0].prompt_tokens for p in prompts), sum(a.completion_tokens for a in accounts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(min(a.cached_tokens for a in p) for p in prompts)},
    }


class Events:
    """Pieces -> server-sent events."""

    def __init__(self, heading: Heading):
        self._heading, self._accounts = heading, dict[int, Account]()
        n = len(heading.ask.prompts) * heading.ask.n
        self._frames = [self._frame(i) for i in range(n)]
        self._offsets = [len(heading.echo(i)) for i in range(n)]  # of the token that comes next, in characters

    def opening(self) -> bytes:
        """What stands before all pieces: the role of a chat's message, or the prompts that are repeated."""
        choices = range(len(self._frames))
        if not self._heading.is_chat:
            return b"".join(self._text(i, self._heading.echo(i)) for i in choices if self._heading.echo(i))
        return b"".join(self._chunk(i, {"delta": {"role": "assistant", "content": ""}}) for i in choices)

    def of(self, choice: int, piece: Piece) -> bytes:
        """What a piece says; b"" for one that says nothing yet."""
        event = b""
        if piece.logprobs:
            event = self._with_logprobs(choice, piece)
        elif piece.text:
            event = self._text(choice, piece.text)
        self._offsets[choice] += sum(len(token.text) for token in piece.logprobs)
        if piece.account is None:
            return event
        self._accounts[choice] = piece.account
        last: dict[str, Any] = {"delta": {}} if self._heading.is_chat else {"text": ""}
        return event + self._chunk(choice, last, finish_reason=piece.account.finish_reason)

    def closing(self) -> bytes:
        """What stands after all of them."""
        if not self._heading.ask.include_usage:
            return DONE
        accounts = [account for _, account in sorted(self._accounts.items())]
        used = {"usage": usage(self._heading.ask, accounts)}
        return _event(json.dumps(self._heading.object([], chunk=True) | used)) + DONE

    def _text(self, choice: int, text: str) -> bytes:
        before, after = self._frames[choice]
        return before + json.dumps(text).encode() + after

    def _with_logprobs(self, choice: int, piece: Piece) -> bytes:
        if self._heading.is_chat:
            return self._chunk(choice, {"delta": {"content": piece.text}}, logprobs=_chat_logprobs(piece.logprobs))
        logprobs = _text_logprobs(piece.logprobs, self._offsets[choice])
        return self._chunk(choice, {"text": piece.text}, logprobs=logprobs)

    def _chunk(self, choice: int, said: Mapping[str, Any], logprobs: Any = None, finish_reason: Any = None) -> bytes:
        one = {"index": choice, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        unused = {"usage": None} if self._heading.ask.include_usage else {}
        return _event(json.dumps(self._heading.object([one], chunk=True) | unused, separators=(",", ":")))

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        """The chunk of a piece that is only text: what stands before the text, and behind it."""
        said = {"delta": {"content": _TEXT}} if self._heading.is_chat else {"text": _TEXT}
        before, _, after = self._chunk(choice, said).partition(json.dumps(_TEXT).encode())
        return before, after


def error(e: ApiError) -> bytes:
    """What goes wrong when the response has begun: the last event, with no [DONE] behind it."""
    return b"data: " + e.to_json() + b"\n\n"


def _event(chunk: str) -> bytes:
    return b"data: " + chunk.encode() + b"\n\n"


def _chat_logprobs(tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content = [
        _token(t.text, t.raw, t.logprob) | {"top_logprobs": [_token(text, text.encode(), p) for _, text, p in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _text_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """`offset`: of the first token's text in all of them, one after the other. A token itself is always among the
    likeliest."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{text: p for _, text, p in t.top} | {t.text: t.logprob} for t in tokens],
        "text_offset": offsets,
    }
