"""What the head tells the world of its requests: tokens into their streams, the task's result, task events. On its own
thread.

A write costs a round trip to the broker, and the engine must not wait for one. What was said while a write was under
way goes with the next.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis
from celery import Celery, states
from celery.worker import state as celery_state

from pptasks.connect import connect
from pptasks.errors import PPError
from pptasks.keys import Keys
from pptasks.stream import Account, Entries, Piece, Writer

log = logging.getLogger(__name__)
_TRIES, _PAUSE_S = 20, 0.5  # a broker that restarts is back within that time

Said = tuple[str, Piece]  # the stream's name
Job = Said | Callable[[], None]


class Reporter:
    """Every method returns at once; things are written in the order in which they were said.

    `reply` is the name of the stream that a request's pieces go to. `request` is Celery's: whoever sent it may want no
    result to be kept (`ignore_result`).
    """

    def __init__(self, app: Celery, keys: Keys, broker: str):
        self._app, self._keys = app, keys
        self._client = connect(broker)
        self._writer: Writer | None = None
        self._queue: queue.SimpleQueue[Sequence[Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def start(self, first_entry: int) -> None:
        """The streams' entries are numbered from there: above those of any head before."""
        self._writer = Writer(self._client, self._keys, first_entry)
        self._thread.start()

    def started(self, request: Any) -> None:
        self._queue.put([partial(self._write_started, request)])

    def tokens(self, said: Sequence[Said]) -> None:
        """What one lap brought."""
        self._queue.put(said)

    def finished(self, request: Any, reply: str, result: dict[str, Any]) -> None:
        account = Account(
            *(result[n] for n in ("finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"))
        )
        end = Piece(request.id, end="ok", account=account)
        self._queue.put([partial(self._write_finished, request, result), (reply, end)])

    def cancelled(self, request: Any, reply: str) -> None:
        self._queue.put([partial(self._write_cancelled, request), (reply, Piece(request.id, end="cancelled"))])

    def failed(self, request: Any, reply: str, error: PPError) -> None:
        end = Piece(request.id, end="failed", error=str(error), error_type=type(error).__name__)
        self._queue.put([partial(self._write_failed, request, error), (reply, end)])

    def close(self) -> None:
        """Write what was said, then end."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._client.close()

    def _work(self) -> None:
        while (jobs := self._queue.get()) is not None:
            jobs, is_last = self._with_what_waits(list(jobs))
            said: dict[str, list[Piece]] = {}
            for job in jobs:
                if callable(job):
                    self._flush(said)  # an answer's result is there before its stream ends, and after its tokens
                    self._try(job)
                else:
                    said.setdefault(job[0], []).append(job[1])
            self._flush(said)
            if is_last:
                return

    def _with_what_waits(self, jobs: list[Job]) -> tuple[list[Job], bool]:
        try:
            while (more := self._queue.get_nowait()) is not None:
                jobs += more
        except queue.Empty:
            return jobs, False
        return jobs, True

    def _flush(self, said: dict[str, list[Piece]]) -> None:
        if said and (writer := self._writer) is not None:
            prepared = list[Entries]()
            self._try(lambda: prepared.append(writer.prepare(said)))
            if prepared:
                self._try(partial(writer.write, prepared[0]))
        said.clear()

    def _try(self, write: Callable[[], None]) -> None:
        for _ in range(_TRIES):
            try:
                return write()
            except (redis.RedisError, OSError) as e:
                log.warning("cannot report yet: %s", type(e).__name__)
                time.sleep(_PAUSE_S)
            except Exception:  # of one report; the next may do
                log.exception("a report is lost")
                return None
        log.error("a report is lost: the broker was away for too long")
        return None

    def _write_started(self, request: Any) -> None:
        celery_state.task_accepted(request)
        request.send_event("task-started")
        if not request.ignore_result:
            self._app.backend.mark_as_started(request.id)

    def _write_finished(self, request: Any, result: dict[str, Any]) -> None:
        if not request.ignore_result:
            self._app.backend.mark_as_done(request.id, result)
        summary = f"{len(result['token_ids'])} tokens, {result['finish_reason']}"
        request.send_event("task-succeeded", result=summary, runtime=result["timings"]["decode_s"])
        celery_state.task_ready(request, successful=True)

    def _write_cancelled(self, request: Any) -> None:
        if not request.ignore_result:
            self._app.backend.mark_as_revoked(request.id, "cancelled", store_result=True)
        request.send_event("task-revoked", terminated=False, signum=None, expired=False)
        celery_state.task_ready(request, successful=False)

    def _write_failed(self, request: Any, error: PPError) -> None:
        if not request.ignore_result:
            self._app.backend.store_result(request.id, error, states.FAILURE)
        request.send_event("task-failed", exception=repr(error), traceback="")
        celery_state.task_ready(request, successful=False)
