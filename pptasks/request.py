"""A request as it travels in the Celery message of `pptasks.generate`: what is asked for, checked once at each door."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pptasks.errors import RequestError
from pptasks.wire import MAX_LOGPROBS, Sampling

MAX_PROMPT_CHARS = 4 << 20
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 20
MAX_TOP_K = 1 << 30
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_PENALTY = 2.0
MIN_TOP_P, MAX_TEMPERATURE = 1e-6, 100.0
ROLES = ("system", "user", "assistant")
_STREAM_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Request:
    """Exactly one of `prompt` (text), `messages` (a chat) and `tokens` (ids).

    A prompt is put into the model's chat template as a user's message unless `raw`. With `verify`, the head computes
    the answer again with every layer, and the result tells what differed. The answer ends before the first of the
    `stop` texts. Penalties are subtracted from the logits of tokens that were generated already (OpenAI's definition).
    `logprobs`: how many alternatives come with each token's log-probability; None: not even that. `reply` names the
    stream that the answer goes to (stream.py). Raises RequestError, naming the parameter.
    """

    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    tokens: tuple[int, ...] | None = None
    raw: bool = False
    verify: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None  # None: a fresh one is drawn where the request enters, and the result tells it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    reply: str | None = None  # None: a stream of its own

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(f"give exactly one of prompt, messages and tokens, not {' and '.join(given) or 'none'}")
        {"prompt": self._check_prompt, "messages": self._check_messages, "tokens": self._check_tokens}[given[0]]()
        _whole("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        _whole("top_k", self.top_k, 0, MAX_TOP_K)
        if self.seed is not None:
            _whole("seed", self.seed, 0, (1 << 64) - 1)
        _real("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _real("top_p", self.top_p, MIN_TOP_P, 1)
        _real("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _real("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stop()
        if self.reply is not None and not is_stream_name(self.reply):
            raise RequestError(f"reply is {_show(self.reply)}: give up to 64 letters, digits, '_' or '-'")
        for name in ("raw", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {_show(getattr(self, name))}: give true or false")
        if self.verify and self.max_tokens == 0:
            raise RequestError("max_tokens is 0, and verify is true: give at least one token to verify")

    @property
    def sampling(self) -> Sampling:
        seed = secrets.randbits(63) if self.seed is None and self.temperature else self.seed or 0
        return Sampling(
            float(self.temperature), self.top_k, float(self.top_p), seed,
            float(self.presence_penalty), float(self.frequency_penalty), self.logprobs,
        )  # fmt: skip

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the task; only what differs from the defaults."""
        default = {k: f.default for k, f in type(self).__dataclass_fields__.items()}
        return {k: v for k, v in asdict(self).items() if v != default[k]}

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> "Request":
        """The request in a task's keyword arguments, which anybody may have sent. Raises RequestError."""
        unknown = sorted(str(name) for name in set(kwargs) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise RequestError(f"unknown parameter {_show(unknown[0])}; pptasks.generate takes {known}")
        lists = ("messages", "tokens", "stop")
        values: dict[str, Any] = {k: tuple(v) if k in lists and isinstance(v, list) else v for k, v in kwargs.items()}
        return cls(**values)

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop is {_show(self.stop)}: give a list of at most {MAX_STOPS} texts")
        for text in self.stop:
            if not 1 <= len(_text("stop", text)) <= MAX_STOP_CHARS:
                raise RequestError(f"a stop text has {len(text)} characters; give 1 to {MAX_STOP_CHARS}")

    def _check_prompt(self) -> None:
        if _text("prompt", self.prompt) == "":
            raise RequestError("the prompt is empty: give some text")

    def _check_messages(self) -> None:
        example = '[{"role": "user", "content": "Say hello"}]'
        for i, message in enumerate(_items("messages", self.messages, MAX_MESSAGES, example)):
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise RequestError(f"message {i} is not an object with just role and content")
            if message["role"] not in ROLES:
                raise RequestError(f"message {i} has role {_show(message['role'])}; give one of {', '.join(ROLES)}")
            _text(f"message {i}", message["content"])

    def _check_tokens(self) -> None:
        for i, token in enumerate(_items("tokens", self.tokens, MAX_TOKENS, "[1, 2, 3]")):
            _whole(f"token {i}", token, 0, (1 << 31) - 1)


def is_stream_name(value: object) -> bool:
    return isinstance(value, str) and _STREAM_NAME.fullmatch(value) is not None


def _items(name: str, value: object, most: int, example: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise RequestError(f"{name} is not a list: give one such as {example}")
    if not value:
        raise RequestError(f"{name} is empty: give a list such as {example}")
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries; at most {most}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is {_show(value)}, which is not text")
    if len(value) > MAX_PROMPT_CHARS:
        raise RequestError(f"{name} has {len(value)} characters; at most {MAX_PROMPT_CHARS}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate: it is not valid Unicode text") from None
    return value


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {_show(value)}: give a whole number from {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {_show(value)}: give a number from {low} to {high}")


def _show(value: object) -> str:
    """A value that somebody sent, short enough for a message."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a huge number"
    return text if len(text) <= 40 else f"{text[:37]}..."
