"""What the head tells the world of a request: tokens into its stream, the task's result, task events. On its own
thread.

A write costs a round trip to the broker, and the engine must not wait for one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from celery import Celery, states
from celery.worker import state as celery_state

from pptasks import stream
from pptasks.connect import connect
from pptasks.errors import PPError
from pptasks.keys import Keys
from pptasks.stream import Piece

log = logging.getLogger(__name__)
_TRIES, _PAUSE_S = 20, 0.5  # a broker that restarts is back within that time


class Reporter:
    """Every method returns at once; things are written in the order in which they were said."""

    def __init__(self, app: Celery, keys: Keys, broker: str):
        self._app, self._keys = app, keys
        self._client = connect(broker)
        self._pieces: dict[str, int] = {}  # written to the stream of each request
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)
        self._thread.start()

    def started(self, request: Any) -> None:
        self._queue.put(partial(self._write_started, request))

    def token(self, request: Any, token: int, text: str) -> None:
        self._queue.put(partial(self._write_piece, request, Piece((token,), text)))

    def finished(self, request: Any, result: dict[str, Any]) -> None:
        self._queue.put(partial(self._write_finished, request, result))

    def failed(self, request: Any, error: PPError) -> None:
        self._queue.put(partial(self._write_failed, request, error))

    def close(self) -> None:
        """Write what was said, then end."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._client.close()

    def _work(self) -> None:
        while (write := self._queue.get()) is not None:
            for _ in range(_TRIES):
                try:
                    write()
                    break
                except (redis.RedisError, OSError) as e:
                    log.warning("cannot report yet: %s", type(e).__name__)
                    time.sleep(_PAUSE_S)
                except Exception:  # of one report; the next may do
                    log.exception("a report is lost")
                    break
            else:
                log.error("a report is lost: the broker was away for too long")

    def _write_piece(self, request: Any, piece: Piece) -> None:
        number = self._pieces.get(request.id, 0) + 1
        stream.write(self._client, self._keys, request.id, number, piece)
        self._pieces[request.id] = number

    def _write_started(self, request: Any) -> None:
        celery_state.task_accepted(request)
        request.send_event("task-started")
        self._app.backend.mark_as_started(request.id)

    def _write_finished(self, request: Any, result: dict[str, Any]) -> None:
        if result["finish_reason"] == "cancelled":
            self._app.backend.mark_as_revoked(request.id, "cancelled", store_result=True)
            request.send_event("task-revoked", terminated=False, signum=None, expired=False)
            self._end(request, Piece(end="cancelled"), succeeded=False)
            return
        self._app.backend.mark_as_done(request.id, result)
        summary = f"{len(result['token_ids'])} tokens, {result['finish_reason']}"
        request.send_event("task-succeeded", result=summary, runtime=result["timings"]["decode_s"])
        self._end(request, Piece(end="ok"), succeeded=True)

    def _write_failed(self, request: Any, error: PPError) -> None:
        self._app.backend.store_result(request.id, error, states.FAILURE)
        request.send_event("task-failed", exception=repr(error), traceback="")
        self._end(request, Piece(end="failed"), succeeded=False)

    def _end(self, request: Any, piece: Piece, *, succeeded: bool) -> None:
        celery_state.task_ready(request, successful=succeeded)
        self._write_piece(request, piece)
        del self._pieces[request.id]
