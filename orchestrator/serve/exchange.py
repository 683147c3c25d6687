"""The requests of one HTTP request, while they run: sent together, their pieces in one queue, cancelled together."""

import asyncio
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from types import TracebackType

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from orchestrator.serve.openai_errors import ApiError, of, of_head
from orchestrator.serve.state import ServeState
from pptasks.errors import PPError
from pptasks.request import Request
from pptasks.stream import Account, Piece

QUIET_S = 10.0  # after so long without a piece, `come` returns without any
_SLACK = 8  # pieces of an answer beyond its tokens


class _Sign(Enum):
    GONE = auto()  # the client
    LATE = auto()  # all pieces
    QUIET = auto()


class Exchange:
    """A context manager: inside it the requests run; whatever has not ended is cancelled when it is left, at once.

    Raises what `AsyncClient.send` does.
    """

    def __init__(self, state: ServeState, requests: Sequence[Request], receive: Receive, began: float):
        """receive: of the HTTP request, whose body was read; tells when the client has gone. began: when that came, on
        the event loop's clock."""
        self._client, self._observe, self._silence_s = state.client, state.observe, state.limits.silence_s
        self._requests, self._receive, self._began = requests, receive, began
        self._loop = asyncio.get_running_loop()
        self._come: asyncio.Queue[tuple[int, Piece | PPError] | _Sign] = asyncio.Queue()
        self._ids: dict[int, str] = {}  # by choice
        self._open = set(range(len(requests)))  # choices that have not ended
        self._owed = set(self._open)  # whose ends `come` has not told
        self._n_tokens = [0] * len(requests)
        self._heard_at: list[float | None] = [None] * len(requests)
        self._heard = self._told = self._loop.time()

    @property
    def is_over(self) -> bool:
        """Whether all of it was told."""
        return not self._owed

    async def __aenter__(self) -> "Exchange":
        self._watch = self._loop.create_task(self._watch_client())
        self._timer = self._loop.call_later(1.0, self._tick)
        try:
            for i, request in enumerate(self._requests):
                self._ids[i] = await self._client.send(request, partial(self._take, i))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=isinstance(error, Exception) and not isinstance(error, ClientDisconnect))

    async def come(self) -> list[tuple[int, Piece]]:
        """What has come since the last time, by choice; none if nothing came for `QUIET_S`.

        Raises ApiError when a request fails or nothing comes for as long as the state's limits say, ClientDisconnect.
        """
        items = [await self._come.get()]
        while not self._come.empty():
            items.append(self._come.get_nowait())
        self._told = self._loop.time()
        pieces = []
        for item in items:
            if isinstance(item, tuple):
                pieces.append((item[0], self._checked(*item)))
            elif item is _Sign.GONE:
                raise ClientDisconnect
            elif item is _Sign.LATE:
                raise ApiError(504, f"no token came for {self._silence_s:g} s", code="timeout")
        return pieces

    def _checked(self, choice: int, piece: Piece | PPError) -> Piece:
        if isinstance(piece, PPError):
            raise of(piece)
        if piece.end == "failed":
            raise of_head(piece.error, piece.error_type)
        if piece.end == "cancelled":
            raise ApiError(500, "the request was cancelled in the pipeline", code="cancelled")
        if self._n_tokens[choice] > self._requests[choice].max_tokens + _SLACK:
            raise ApiError(500, "more tokens came than were asked for: stage 0 is not honest")
        if piece.end:
            self._owed.discard(choice)
        return piece

    def _take(self, choice: int, piece: Piece | PPError) -> None:
        """A piece has come. Called by the client."""
        now = self._heard = self._loop.time()
        self._come.put_nowait((choice, piece))
        if isinstance(piece, PPError):
            return
        self._n_tokens[choice] += max(len(piece.ids), 0 if piece.end else 1)
        if piece.ids:
            before, self._heard_at[choice] = self._heard_at[choice], now
            if before is None:
                self._observe.first_token(now - self._began)
            else:
                self._observe.inter_token(now - before)
        if piece.end and choice in self._open:
            self._open.discard(choice)
            self._tell_end(choice, piece.end, piece.account)

    def _tell_end(self, choice: int, end: str, account: Account | None) -> None:
        seconds = self._loop.time() - self._began
        if account is None:
            self._observe.ended(end, 0, self._n_tokens[choice], seconds)
        else:
            self._observe.ended(account.finish_reason, account.prompt_tokens, account.completion_tokens, seconds)

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._heard > self._silence_s:
            self._come.put_nowait(_Sign.LATE)
        elif now - self._told > QUIET_S:
            self._come.put_nowait(_Sign.QUIET)
        self._timer = self._loop.call_later(1.0, self._tick)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._come.put_nowait(_Sign.GONE)

    def _close(self, *, failed: bool = True) -> None:
        self._watch.cancel()
        self._timer.cancel()
        self._client.cancel([self._ids[choice] for choice in self._open if choice in self._ids])
        for choice in self._open:
            self._tell_end(choice, "failed" if failed else "cancelled", None)
