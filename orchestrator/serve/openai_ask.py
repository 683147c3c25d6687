"""A request's body, as OpenAI's clients send it -> an Ask. Pure, and bounded by the size of the body alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NoReturn

from orchestrator.serve.openai_errors import bad
from orchestrator.serve.openai_params import (
    Fields,
    check_names,
    flag,
    items,
    real,
    record,
    shown,
    stops,
    text,
    whole,
)
from pptasks.errors import RequestError
from pptasks.request import (
    MAX_MESSAGES,
    MAX_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOP_K,
    MIN_TOP_P,
    Request,
)

MAX_N, MAX_CHOICES = 8, 64  # choices of a prompt, and of all prompts of a request
MAX_TEMPERATURE = 2.0
CHAT_LOGPROBS, TEXT_LOGPROBS = 20, 5
TEXT_MAX_TOKENS = 16  # OpenAI's default for completions; a chat's is what the context holds
SEEDS = 1 << 64

_BOTH = {
    "model", "n", "stream", "stream_options", "stop", "max_tokens", "temperature", "top_p", "top_k", "seed",
    "logprobs", "presence_penalty", "frequency_penalty",
}  # fmt: skip
_CHAT = frozenset(_BOTH | {"messages", "max_completion_tokens", "top_logprobs"})
_TEXT = frozenset(_BOTH | {"prompt", "echo"})
_ROLES: Mapping[Any, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Endpoint(Enum):
    CHAT = "chat.completions"
    TEXT = "completions"


@dataclass(frozen=True)
class Ask:
    """What one HTTP request asks for: `n` choices of each prompt. Choice n * p + i is the i-th of prompt p, and has the
    given seed + i. `echo`: prompts are repeated before their answers."""

    endpoint: Endpoint
    model: str
    prompts: tuple[Request, ...]
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False

    @property
    def requests(self) -> tuple[Request, ...]:
        """One for each choice."""
        return tuple(_choice(prompt, i) for prompt in self.prompts for i in range(self.n))

    def prompt_of(self, choice: int) -> Request:
        return self.prompts[choice // self.n]


def parse(body: bytes, endpoint: Endpoint, context: int) -> Ask:
    """`context`: the most tokens that a chat is answered with. Raises ApiError, naming the parameter that is at fault.

    Whether `model` is one that is served here is for the caller to tell.
    """
    fields = _fields(body)
    check_names(fields, _CHAT if endpoint is Endpoint.CHAT else _TEXT)
    model = fields.get("model")
    if model is None:
        raise bad("model is missing: name one of GET /v1/models", "model", "missing_required_parameter")
    text("model", model)
    stream = flag(fields, "stream")
    n = whole(fields, "n", 1, MAX_N) or 1
    prompts = _chat(fields, context) if endpoint is Endpoint.CHAT else _texts(fields, n)
    return Ask(
        endpoint, model, prompts, n, stream, _include_usage(fields, stream),
        echo=endpoint is Endpoint.TEXT and flag(fields, "echo"),
    )  # fmt: skip


def _choice(prompt: Request, i: int) -> Request:
    return prompt if prompt.seed is None or i == 0 else replace(prompt, seed=(prompt.seed + i) % SEEDS)


def _fields(body: bytes) -> Fields:
    try:
        found = json.loads(body.decode(), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise bad("the body is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise bad("the body is nested too deeply", code="invalid_json") from None
    except ValueError as e:
        why = str(e) if len(str(e)) < 100 else "a number has too many digits"
        raise bad(f"the body is not JSON: {why}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise bad("the body is not a JSON object", code="invalid_json")
    return found


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _chat(fields: Fields, context: int) -> tuple[Request, ...]:
    listed = fields.get("messages")
    if listed is None:
        raise bad("messages is missing", "messages", "missing_required_parameter")
    messages = tuple(_message(f"messages[{i}]", m) for i, m in enumerate(items("messages", listed, MAX_MESSAGES)))
    wants, top = flag(fields, "logprobs"), whole(fields, "top_logprobs", 0, CHAT_LOGPROBS)
    if top is not None and not wants:
        raise bad("top_logprobs is given without logprobs: true", "top_logprobs", "invalid_value")
    logprobs = top or 0 if wants else None
    return (_request(fields, messages=messages, max_tokens=_most(fields, context), logprobs=logprobs),)


def _texts(fields: Fields, n: int) -> tuple[Request, ...]:
    logprobs = whole(fields, "logprobs", 0, TEXT_LOGPROBS)
    if logprobs is not None and flag(fields, "echo"):
        why = "logprobs is not supported with echo: the prompt's tokens have none here"
        raise bad(why, "logprobs", "unsupported_parameter")
    prompts = _prompts(fields.get("prompt"))
    if len(prompts) * n > MAX_CHOICES:
        raise bad(f"prompt and n make {len(prompts) * n} choices; at most {MAX_CHOICES}", "prompt", "invalid_value")
    most = _most(fields, TEXT_MAX_TOKENS)
    return tuple(_request(fields, **prompt, raw=True, max_tokens=most, logprobs=logprobs) for prompt in prompts)


def _prompts(value: Any) -> list[dict[str, Any]]:
    """Each as the field of a Request: a string, a list of strings, of token ids, or of lists of them."""
    if value is None:
        raise bad("prompt is missing", "prompt", "missing_required_parameter")
    if isinstance(value, str):
        return [{"prompt": text("prompt", value)}]
    first = items("prompt", value, MAX_TOKENS)[0]
    if not isinstance(first, (str, list)):
        return [{"tokens": _ids("prompt", value)}]
    listed = enumerate(items("prompt", value, MAX_CHOICES))
    if isinstance(first, str):
        return [{"prompt": text(f"prompt[{i}]", prompt)} for i, prompt in listed]
    return [{"tokens": _ids(f"prompt[{i}]", prompt)} for i, prompt in listed]


def _ids(name: str, value: Any) -> tuple[int, ...]:
    for i, token in enumerate(items(name, value, MAX_TOKENS)):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise bad(f"{name}[{i}] is {shown(token)}: give a token id", f"{name}[{i}]", "invalid_value")
    return tuple(value)


def _message(where: str, value: Any) -> dict[str, str]:
    """A message as the pipeline takes it. What an answer of ours holds besides (refusal: null, ...) may come back."""
    fields = record(where, value)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        roles = "system, developer, user or assistant"
        raise bad(f"{where}.role is {shown(role)}: give {roles}", f"{where}.role", "invalid_value")
    for name, given in fields.items():
        if name not in ("role", "content") and given not in (None, [], {}, ""):
            raise bad(f"{where}.{shown(name)} is not supported", where, "unsupported_parameter")
    return {"role": _ROLES[role], "content": _content(f"{where}.content", fields.get("content"))}


def _content(where: str, value: Any) -> str:
    """Text, or a list of parts that are text."""
    if not isinstance(value, list):
        return text(where, value)
    parts = []
    for i, part in enumerate(value):
        fields = record(f"{where}[{i}]", part)
        if fields.get("type") != "text":
            kind = shown(fields.get("type"))
            raise bad(f"{where}[{i}].type is {kind}: only text is supported", where, "invalid_value")
        check_names(fields, ("type", "text"), f"{where}[{i}].")
        parts.append(text(f"{where}[{i}].text", fields.get("text")))
    return "".join(parts)


def _most(fields: Fields, default: int) -> int:
    """The most tokens to generate; a chat may spell it max_completion_tokens."""
    old, new = (whole(fields, name, 0, MAX_TOKENS) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise bad("max_tokens and max_completion_tokens differ: give one", "max_tokens", "invalid_value")
    given = old if new is None else new
    return default if given is None else given


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad("stream_options is given without stream: true", "stream_options", "invalid_value")
    options = record("stream_options", options)
    if options.get("include_obfuscation") is True:
        raise bad("stream_options.include_obfuscation is not supported", "stream_options", "unsupported_parameter")
    check_names(options, ("include_usage", "include_obfuscation"), "stream_options.")
    return flag(options, "include_usage")


def _request(fields: Fields, **given: Any) -> Request:
    top_k, seed = whole(fields, "top_k", -1, MAX_TOP_K), whole(fields, "seed", 1 - SEEDS // 2, SEEDS - 1)
    sampling: dict[str, Any] = {
        "temperature": real(fields, "temperature", 0, MAX_TEMPERATURE, 1.0),
        "top_p": max(real(fields, "top_p", 0, 1, 1.0), MIN_TOP_P),
        "top_k": max(top_k or 0, 0),  # -1 is how some clients say "all"
        "seed": None if seed is None else seed % SEEDS,
        "presence_penalty": real(fields, "presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        "frequency_penalty": real(fields, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        "stop": stops(fields, MAX_STOPS, MAX_STOP_CHARS),
    }
    try:
        return Request(**sampling, **given)
    except RequestError as e:
        raise bad(str(e), "messages" if "messages" in given else "prompt") from None
