"""`celery -A workers worker -Q stage0 --pool solo`: a stage, told by its environment which one (see pptasks/config.py).

A bootstep starts what serves the stage before Celery's consumer takes the first message, and ends it after the last.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state

from pptasks.app import make_app
from pptasks.config import Settings
from pptasks.errors import ConfigError, PPError
from pptasks.keys import Keys, stage_queue
from pptasks.membership import Membership
from pptasks.sender import HopSender
from workers.engine import Engine
from workers.reporter import Reporter

log = logging.getLogger(__name__)
LEAVE_S = 2.0  # for a warm shutdown; a consumer that waits for a dead broker does not take part in one
FAILED = 1

try:
    settings = Settings.from_env()
except ConfigError as e:
    sys.exit(f"pptasks: error: {e}")
app = make_app(settings)
for noisy in ("httpx", "httpcore", "httpx2", "httpcore2"):  # at INFO they log URLs, and a query may be a signature
    logging.getLogger(noisy).setLevel(logging.WARNING)


class StageStep(bootsteps.StartStopStep):
    """Lock and hello, then the engine's thread; the other way round at the end."""

    requires = {"celery.worker.components:Pool"}  # noqa: RUF012

    def __init__(self, worker: Any, **kwargs: Any):
        super().__init__(worker, **kwargs)
        worker.engine, worker.wake = None, self._wake
        self._wakeup = socket.socketpair()  # Celery's loop reads the first; Python and _wake write to the second
        for end in self._wakeup:
            end.setblocking(False)

    def start(self, worker: Any) -> None:
        try:
            self._start(worker)
        except PPError as e:
            print(f"pptasks: error: {e}", file=sys.stderr, flush=True)
            raise SystemExit(FAILED) from None

    def _start(self, worker: Any) -> None:
        if settings.stage is None:
            raise ConfigError("STAGE is not set: give the index of the stage that this worker serves")
        consumed, own = set(app.amqp.queues.consume_from), stage_queue(settings.stage)
        if consumed != {own}:
            raise ConfigError(
                f"stage {settings.stage} would take from {', '.join(sorted(consumed))}: start it with -Q {own}"
            )
        keys = Keys(settings.run)
        self._reporter = Reporter(app, keys, settings.broker)
        self._membership = Membership(
            settings.broker, keys, settings.stage, settings.num_stages,
            node=worker.hostname, watch_lease=settings.lease, broker_grace_s=settings.broker_grace_s,
            on_gone=partial(leave, worker),
        )  # fmt: skip
        self._membership.join()
        worker.engine = Engine(
            settings, self._membership, partial(HopSender, app), self._reporter, partial(self._failed, worker)
        )
        worker.engine.start()

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Wake Celery's loop when a signal comes; it would look for one only at its next timer, a second later."""
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        hub.add_reader(self._wakeup[0].fileno(), self._wakeup[0].recv, 64)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup[1].send(b"!")

    def stop(self, worker: Any) -> None:
        if worker.engine is not None:
            worker.engine.stop()
            self._reporter.close()
            self._membership.leave()

    terminate = stop

    def _failed(self, worker: Any, error: BaseException) -> None:
        """The engine died: tell the others why, then end the process."""
        self._membership.update(
            state="failed",
            error=str(error) if isinstance(error, PPError) else f"{type(error).__name__}: {error}",
            error_type=type(error).__name__,
        )
        print(f"pptasks: error: stage {settings.stage}: {error}", file=sys.stderr, flush=True)
        leave(worker, "the engine failed")


def leave(worker: Any, reason: str) -> None:
    """End this process, from any thread: a warm shutdown, and a hard one if that takes too long."""
    log.error("stage %s leaves: %s", settings.stage, reason)
    state.should_stop = FAILED
    worker.wake()
    watchdog = threading.Timer(LEAVE_S, os._exit, (FAILED,))
    watchdog.daemon = True
    watchdog.start()


app.steps["worker"].add(StageStep)
