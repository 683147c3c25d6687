"""A whole response, sent as ASGI has it."""

from collections.abc import Mapping
from types import MappingProxyType

from starlette.types import Send

_NONE: Mapping[str, str] = MappingProxyType({})


async def respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] = _NONE) -> None:
    """`body`: JSON."""
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await start(send, status, all_headers)
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    raw.append((b"x-content-type-options", b"nosniff"))
    await send({"type": "http.response.start", "status": status, "headers": raw})
