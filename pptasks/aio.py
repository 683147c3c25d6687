"""A client of a pipeline for programs that run on asyncio: many requests at once, one connection that reads them all.

    async with AsyncClient(make_app(settings)) as client:
        answer = await client.submit(Request(prompt="Say hello"))
        async for piece in answer:
            print(piece.text, end="")

All answers come by one Redis stream of the client's own, which one task reads: what a lap brought for all sequences is
one entry, and costs one read. Sending goes through Celery, which blocks, on one thread; so nothing overtakes, and a
request is cancelled after it was sent.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from secrets import token_hex
from types import TracebackType
from typing import Any
from uuid import uuid4

import redis.asyncio
from celery import Celery
from kombu.exceptions import OperationalError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pptasks.connect import SOCKET_TIMEOUT_S, explain
from pptasks.errors import BrokerError, PPError, RequestError, RequestFailed
from pptasks.keys import Keys
from pptasks.request import Request
from pptasks.stream import Piece, entries_of, pieces_of
from pptasks.tasks import GENERATE
from pptasks.transport import MAX_ENVELOPE_BYTES

log = logging.getLogger(__name__)

LOST_S = 10.0  # without a broker for that long, answers that are waited for have failed
LEAVE_S = 3.0  # how long a client that is closed waits for the ends of what it cancelled
_FORGET_S = 60.0  # a request that was cancelled before the head saw it has no end to wait for
_SETTLED_S = 2.0  # after which every worker has heard of a revoke
_POLL_MS, _PAUSE_S = 1000, 0.3
_AT_ONCE, _TRIM_EVERY = 64, 512  # entries
_BIG = 1 << 20  # characters of a request from which on its message is measured before it is sent
_LOST = (redis.RedisError, OSError)  # or a broker that refuses us, which may pass as well

Deliver = Callable[[Piece | PPError], None]  # called on the event loop; the last piece has `end`, an error is the last


class Answer:
    """The answer to one request: its pieces, to the one that has `end`. Raises PPError where it is cut off."""

    def __init__(self, client: "AsyncClient") -> None:
        self.id = ""
        self._client = client
        self._come: asyncio.Queue[Piece | PPError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self._come.get()
            if isinstance(piece, PPError):
                raise piece
            yield piece
            if piece.end:
                return

    async def cancel(self) -> None:
        """Ask the head to stop it; it ends within a lap. Does not wait for that."""
        self._client.cancel([self.id])


class AsyncClient:
    """A context manager. All of it belongs to one event loop; the app to nobody else."""

    def __init__(self, app: Celery):
        self._app, self._name = app, f"client-{token_hex(8)}"
        self._key = Keys(app.settings.run).stream(self._name)
        self._redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            app.conf.broker_url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._thread = ThreadPoolExecutor(1, "submit")
        self._waited_for: dict[str, Deliver] = {}
        self._ending: dict[str, float] = {}  # requests that were cancelled, and when; until their ends come
        self._revoked: dict[str, float] = {}  # that ended so, and when; Celery keeps a result of those
        self._to_cancel: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False  # redis-py may take a task's cancellation for a lost connection

    async def __aenter__(self) -> "AsyncClient":
        self._start(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def n_waited_for(self) -> int:
        """Answers that have not ended."""
        return len(self._waited_for)

    async def submit(self, request: Request) -> Answer:
        """Raises as `send`."""
        answer = Answer(self)
        answer.id = await self.send(request, answer._come.put_nowait)
        return answer

    async def send(self, request: Request, deliver: Deliver) -> str:
        """Its id; the answer's pieces go to `deliver`. Raises BrokerError, RequestError."""
        request_id = str(uuid4())
        kwargs = replace(request, reply=self._name).to_kwargs()
        self._waited_for[request_id] = deliver
        try:
            await self._in_thread(partial(self._send, request_id, kwargs))
        except asyncio.CancelledError:
            self.cancel([request_id])  # it may have been sent
            raise
        except BaseException:
            self._waited_for.pop(request_id, None)
            raise
        return request_id

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Nothing of these is delivered any more; the head is told as soon as may be. What has ended is left alone."""
        mine = [i for i in request_ids if self._waited_for.pop(i, None) is not None]
        if mine:
            self._ending |= dict.fromkeys(mine, time.monotonic())
            self._to_cancel += mine
            self._start(self._revoke())

    def fail_all(self, error: PPError) -> None:
        """Every answer that is waited for ends so."""
        for request_id, deliver in list(self._waited_for.items()):
            self.cancel([request_id])
            deliver(error)

    async def close(self) -> None:
        """Cancel what is under way, and leave nothing in the broker."""
        self.fail_all(RequestFailed("the client was closed before this request ended"))
        deadline = time.monotonic() + LEAVE_S
        while (self._ending or self._to_cancel) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if gone := [*self._revoked, *self._ending]:
            await self._forget(gone)
        with suppress(*_LOST):
            await self._redis.delete(self._key)
        await self._redis.aclose()
        await asyncio.to_thread(self._thread.shutdown)
        self._app.close()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the client of the pipeline is broken", exc_info=error)
            self.fail_all(RequestFailed(f"the client of the pipeline is broken: {type(error).__name__}"))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _send(self, request_id: str, kwargs: dict[str, Any]) -> None:
        _check_size(kwargs)
        try:
            self._app.send_task(GENERATE, kwargs=kwargs, task_id=request_id, retry=False, ignore_result=True)
        except (OperationalError, redis.RedisError) as e:
            raise BrokerError(f"the request cannot be sent: {explain(e)}") from None

    async def _revoke(self) -> None:
        """Tell the head of all that are to be cancelled; what it cannot be told now waits for the broker."""
        ids, self._to_cancel = self._to_cancel, []
        if not ids:
            return
        try:
            await self._in_thread(partial(self._app.control.revoke, ids))
        except (OperationalError, *_LOST) as e:
            log.warning("cannot cancel %d requests yet: %s", len(ids), explain(e))
            self._to_cancel += ids

    async def _read(self) -> None:
        last, unseen, heard = b"0", 0, time.monotonic()
        while not self._is_closed:
            try:
                found = await self._redis.xread({self._key: last}, count=_AT_ONCE, block=_POLL_MS)
                if unseen > _TRIM_EVERY:
                    await self._redis.xtrim(self._key, minid=last)
                    unseen = 0
            except _LOST as e:
                if time.monotonic() - heard > LOST_S:
                    self.fail_all(BrokerError(f"the broker was lost: {explain(e)}"))
                await asyncio.sleep(_PAUSE_S)
                continue
            heard = time.monotonic()
            for entry_id, fields in entries_of(found or []):
                last, unseen = entry_id, unseen + 1
                self._take(fields)
            self._look_around(heard)

    def _take(self, fields: dict[bytes, bytes]) -> None:
        try:
            pieces = pieces_of(fields)
        except ValueError:
            self.fail_all(RequestFailed("what came on the stream of answers is no piece of text"))
            return
        for piece in pieces:
            if piece.end:
                deliver = self._waited_for.pop(piece.request, None)
                if self._ending.pop(piece.request, None) is not None:
                    self._revoked[piece.request] = time.monotonic()
            else:
                deliver = self._waited_for.get(piece.request)
            if deliver is not None:
                deliver(piece)

    def _look_around(self, now: float) -> None:
        """The broker is there."""
        if self._to_cancel:
            self._start(self._revoke())
        if self._ending and now - min(self._ending.values()) > _FORGET_S:
            self._revoked |= {i: at for i, at in self._ending.items() if now - at > _FORGET_S}
            self._ending = {i: at for i, at in self._ending.items() if i not in self._revoked}
        if self._revoked and now - min(self._revoked.values()) > _SETTLED_S:
            self._start(self._forget([i for i, at in self._revoked.items() if now - at > _SETTLED_S]))

    async def _forget(self, request_ids: list[str]) -> None:
        """Every worker that hears of a revoke keeps a result that says so, for a day."""
        for request_id in request_ids:
            self._revoked.pop(request_id, None)
        with suppress(*_LOST):  # then the broker keeps them for that day
            await self._redis.delete(*map(self._app.backend.get_key_for_task, request_ids))


def _check_size(kwargs: dict[str, Any]) -> None:
    """Raises RequestError for a request that the head would drop unread (transport.py)."""
    chars = len(kwargs.get("prompt") or "") + sum(len(m["content"]) for m in kwargs.get("messages") or ())
    if chars + 11 * len(kwargs.get("tokens") or ()) < _BIG:
        return
    size = len(json.dumps(kwargs)) * 4 // 3 + 8192  # kombu writes it as base64, with headers
    if size > MAX_ENVELOPE_BYTES:
        raise RequestError(f"the request makes a message of {size} bytes; at most {MAX_ENVELOPE_BYTES}: shorten it")
