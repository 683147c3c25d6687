"""What a caller does with a pipeline: submit a request, read its tokens as they come, cancel it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery, states
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from pptasks import stream
from pptasks.answer import checked, told
from pptasks.connect import connect, explain
from pptasks.errors import BrokerError, RequestFailed
from pptasks.keys import Keys
from pptasks.request import Request
from pptasks.stream import Piece
from pptasks.tasks import GENERATE

RESULT_WAIT_S = 10.0


@dataclass(frozen=True)
class Client:
    """A client of the run that `app` belongs to."""

    app: Celery

    @property
    def _redis(self) -> redis.Redis:
        return connect(self.app.conf.broker_url)

    @property
    def _keys(self) -> Keys:
        return Keys(self.app.settings.run)

    def submit(self, request: Request) -> str:
        """Send the task `pptasks.generate`; its id. Raises BrokerError."""
        try:
            return self.app.send_task(GENERATE, kwargs=request.to_kwargs(), retry=False).id
        except (OperationalError, redis.RedisError) as e:
            raise BrokerError(f"the request cannot be sent: {explain(e)}") from None

    def stream(self, request_id: str) -> Iterator[Piece | None]:
        """Tokens as they come; None once a second while there are none. Ends when the request does.

        That includes a request that never reached the head, because it had expired or was revoked on the way.
        """
        client, was_ready = self._redis, False
        try:
            for piece in stream.read(client, self._keys, request_id):
                yield piece
                if (piece is None and was_ready) or (piece is not None and piece.end):
                    return
                was_ready = piece is None and _has_ended(AsyncResult(request_id, app=self.app))
        finally:
            client.close()

    def result(self, request_id: str, timeout_s: float = RESULT_WAIT_S) -> dict[str, Any]:
        """What the head stored when the request ended, as `answer.checked` gives it.

        Raises what the head raised (see `answer.told`), or RequestFailed when it was cancelled, nothing comes in time,
        or what comes is no answer.
        """
        result = AsyncResult(request_id, app=self.app)
        deadline = time.monotonic() + timeout_s
        while not _has_ended(result):
            if time.monotonic() > deadline:
                raise RequestFailed(f"request {request_id} has no result after {timeout_s:.0f} s")
            time.sleep(0.02)
        try:
            state, stored = result.state, result.result  # which raises no exception that was stored
        except Exception as e:
            why = f"what its head stored cannot be read: {type(e).__name__}"
            raise RequestFailed(f"request {request_id}: {why}") from None
        if state == states.REVOKED:
            raise RequestFailed(f"request {request_id} was cancelled")
        if state != states.SUCCESS:
            raise told(request_id, stored)
        return checked(request_id, stored)

    def cancel(self, request_id: str) -> None:
        """Ask the head to stop a request; it ends within a lap. The same as Celery's `revoke`."""
        self.app.control.revoke(request_id)


def _has_ended(result: AsyncResult) -> bool:
    """Whether the head has stored something; also what nobody can read."""
    try:
        return result.ready()
    except (redis.ConnectionError, redis.TimeoutError):
        return False  # the broker may come back
    except Exception:
        return True
