"""uvicorn on a thread of its own, so that the main thread can watch the cluster and take signals."""

import asyncio
import logging
import socket
import threading
import time
from types import TracebackType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pptasks.aio import LEAVE_S, AsyncClient
from pptasks.errors import PPError, RequestFailed

log = logging.getLogger(__name__)

HEADER_S = 15.0  # a connection on which no request has come for as long is closed
MAX_HEADER = 32 << 10  # bytes of a request's head
START_S, STOP_S = 30.0, 5.0


class Server:
    """A context manager: inside it the app is served on `bound`, which it closes. What is under way when it is left
    ends with an error."""

    def __init__(self, app: ASGIApp, client: AsyncClient, bound: socket.socket, most_connections: int):
        self._client, self._bound = client, bound
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=most_connections,
                h11_max_incomplete_event_size=MAX_HEADER,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="http", daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RequestFailed("the HTTP server did not start; its log says why")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fail_all(RequestFailed("the server is being stopped"))
        self._server.should_exit = True
        self._thread.join(STOP_S + LEAVE_S + 2)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def fail_all(self, error: PPError) -> None:
        """All answers that are under way end so."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._client.fail_all, error)

    def _work(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self._bound:
            await self._server.serve([self._bound])


class _Protocol(H11Protocol):
    """uvicorn's own has no limit to how slowly the head of a request may come."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look = self.loop.call_later(HEADER_S, self._look_around)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _look_around(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.timeout_keep_alive_task is None:  # which runs while nothing at all comes
            self.transport.abort()
        else:
            self._look = self.loop.call_later(HEADER_S, self._look_around)
