"""The body of a request: bounded before it is read, and in its time."""

import asyncio
from collections.abc import Iterable

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from orchestrator.serve.openai_errors import ApiError, bad
from orchestrator.serve.room import Taken
from orchestrator.serve.state import Limits

Headers = Iterable[tuple[bytes, bytes]]


async def read(headers: Headers, receive: Receive, limits: Limits, taken: Taken) -> bytes:
    """`taken`: of the room that all bodies share. Raises ApiError, ClientDisconnect."""
    announced = _announced(dict(headers), limits.body)
    taken.more(announced or 0)
    try:
        async with asyncio.timeout(limits.body_s):
            return await _whole(receive, announced, limits.body, taken)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.body_s:g} s", code="timeout") from None


def _announced(headers: dict[bytes, bytes], most: int) -> int | None:
    """How long it will be; None: it comes in chunks of any number. A web page elsewhere may send other types of content
    without asking first, so that only JSON is taken."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "send the header Content-Type: application/json", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "send the body as it is, not compressed", code="unsupported_media_type")
    length = headers.get(b"content-length")
    if length is None:
        return None
    if not length.isdigit() or len(length) > 18:
        raise bad("Content-Length is no length")
    if int(length) > most:
        raise _too_large(most)
    return int(length)


async def _whole(receive: Receive, announced: int | None, most: int, taken: Taken) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(most)
        if announced is None:
            taken.more(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes: shorten it", code="request_too_large")
