"""Who may ask. ASGI middleware; each refuses with an error that OpenAI's clients read."""

import hmac
from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.serve.address import is_loopback
from orchestrator.serve.openai_errors import ApiError
from orchestrator.serve.respond import respond

IsOpen = Callable[[Scope], bool]


def open_to_all(routes: Sequence[BaseRoute]) -> IsOpen:
    """Whether a request is for one of these."""
    return lambda scope: any(route.matches(scope)[0] is not Match.NONE for route in routes)


class KeyCheck:
    """`Authorization: Bearer KEY`, compared in a time that tells nothing of the key."""

    def __init__(self, app: ASGIApp, key: str, is_open: IsOpen):
        self._app, self._key, self._is_open = app, key.encode(), is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_known(scope) or self._is_open(scope):
            return await self._app(scope, receive, send)
        error = ApiError(
            401, "the API key is missing or wrong: send the header Authorization: Bearer KEY",
            code="invalid_api_key", headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
        return await respond(send, error.status, error.to_json(), error.headers)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)


class HostCheck:
    """Without a key, a server on this machine is safe from web pages elsewhere only while they cannot call it by a name
    of their own (DNS rebinding): a browser says by which name it asks."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_local(_header(scope, b"host").decode("latin-1")):
            return await self._app(scope, receive, send)
        error = ApiError(
            403, "this server takes requests to localhost only: give it an --api-key, and it takes any name",
            code="unknown_host",
        )  # fmt: skip
        return await respond(send, error.status, error.to_json())


def _is_local(given: str) -> bool:
    """No browser leaves the header out."""
    host = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    return not given or is_loopback(host)


def _header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found
