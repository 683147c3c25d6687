"""A chat with an OpenAI-compatible server over HTTP, streamed, as a load test needs it: only when what came.

What a server sends is bounded and checked: it may be anything.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from pptasks.errors import RequestFailed, UsageError
from pptasks.shown import line

MAX_EVENT = 1 << 20  # bytes of one line of a stream, and of a reply that is none
_MAX_COUNT = 1 << 31
_KEY = re.compile(r"[!-~]{1,4096}", re.ASCII)


@dataclass
class Answer:
    """What has come of one: when each piece of text did, and the server's own counts, 0 if it gave none. `refusal`: in
    the server's words, made harmless."""

    pieces_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""

    @property
    def tokens(self) -> int:
        return self.completion_tokens or len(self.pieces_s)


def base_of(url: str) -> str:
    """Where `/v1/...` begins. Raises UsageError for what is no address of a server."""
    try:
        parts = urlsplit(url.strip())
        is_address = parts.scheme in ("http", "https") and bool(httpx.URL(url.strip()).host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address:
        raise UsageError("--url must be the address of a server, such as http://127.0.0.1:8080")
    if parts.username or parts.password or parts.query:
        raise UsageError("--url holds more than an address: give a key as PP_API_KEY")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def client(url: str, key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """As many connections as there are requests: none waits for another's. Raises UsageError."""
    if key and not _KEY.fullmatch(key):
        raise UsageError("PP_API_KEY holds what no key does: spaces, line ends, or letters beyond ASCII")
    return httpx.AsyncClient(
        base_url=base_of(url),
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(server: httpx.AsyncClient) -> str:
    """The name of a model that it serves. Raises RequestFailed."""
    where = f"{str(server.base_url).rstrip('/')}/v1/models"
    try:
        async with asyncio.timeout(server.timeout.read), server.stream("GET", "/v1/models") as response:
            body = await _whole(response)
        if response.status_code in (401, 403):
            raise RequestFailed(f"{where} refuses the key: give the server's as PP_API_KEY")
        name = json.loads(body)["data"][0]["id"] if response.status_code == 200 else None
    except httpx.HTTPError as e:
        raise RequestFailed(f"{where} does not answer ({_kind(e)}): is the server up?") from None
    except TimeoutError:
        raise RequestFailed(f"{where} does not answer (timeout): is the server up?") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise RequestFailed(f"{where} names no model (HTTP {response.status_code}): give one with --name")
    return name


async def ask(server: httpx.AsyncClient, body: dict[str, Any], answer: Answer, now: Callable[[], float]) -> str:
    """Ask, and fill `answer` as it comes. Returns "" at its end, else in a few words why there is no whole answer."""
    most = 8 * int(body["max_tokens"]) + 64
    try:
        async with server.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                answer.refusal = await _refusal(response)
                return str(response.status_code)
            async for event in _events(response):
                if event == b"[DONE]":
                    return ""
                if _take(event, answer, now):
                    return "error in the stream"
                if len(answer.pieces_s) > most:
                    return "more text than asked for"
        return "cut off"
    except httpx.HTTPError as e:
        return _kind(e)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return "not understood"
    except OSError as e:  # too many open files
        return line(e.strerror or "OSError", 40)


async def _whole(response: httpx.Response) -> bytes:
    """Raises ValueError for more than MAX_EVENT bytes."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) > MAX_EVENT:
            raise ValueError("a reply without an end")
    return body


async def _refusal(response: httpx.Response) -> str:
    """The message of OpenAI's error bodies, "" if there is none."""
    try:
        message = json.loads(await _whole(response))["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return line(message, 200).rstrip(".") if isinstance(message, str) else ""


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each, as every such server writes them. Raises ValueError."""
    rest = b""
    async for data in response.aiter_raw():
        *lines, rest = (rest + data).split(b"\n")
        for of_event in lines:
            if of_event.startswith(b"data:"):
                yield of_event[5:].strip()
        if len(rest) > MAX_EVENT:
            raise ValueError("a line without an end")


def _take(event: bytes, answer: Answer, now: Callable[[], float]) -> bool:
    """Note what an event brings; whether it is an error."""
    chunk = json.loads(event)
    if chunk.get("error"):
        return True
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if choices and choices[0]["delta"].get("content"):
        answer.pieces_s.append(now())
    if usage:
        answer.prompt_tokens, answer.completion_tokens = (
            min(max(int(usage[name]), 0), _MAX_COUNT) for name in ("prompt_tokens", "completion_tokens")
        )
    return False


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    return "timeout" if isinstance(error, httpx.TimeoutException) else "connection lost"
