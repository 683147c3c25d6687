"""The two tasks of a pipeline. Neither has a body that computes: their strategies check a message and put it into the
engine's inbox.

`pptasks.generate` is a request. It goes through Celery's own strategy first, so that events, expiry, ETA and revokes
are Celery's, and lands in the inbox where Celery would hand it to the pool. `pptasks.hop` is a frame and skips all of
that.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task
from celery.worker import state
from celery.worker import strategy as celery_strategy

from pptasks.errors import PPError, WireError
from pptasks.transport import HOP_TASK
from pptasks.wire import Frame, decode

log = logging.getLogger(__name__)

GENERATE = "pptasks.generate"
GIVE_WAY_S = (
    50e-6  # Celery's loop lets go of the interpreter lock, so that the engine need not wait for its book-keeping
)


@dataclass(frozen=True)
class Submit:
    """A request, as Celery's own `celery.worker.request.Request`."""

    request: Any


@dataclass(frozen=True)
class Hop:
    """A frame that was authenticated and decoded."""

    frame: Frame


def generate_strategy(task: Task, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., None]:
    """Celery's default strategy, with the inbox in the place of the pool."""
    return celery_strategy.default(task, app, _IntoInbox(consumer), **kwargs)


def hop_strategy(task: Task, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., None]:
    """Authenticate, decode, put into the inbox; what is no frame of this run is counted and dropped."""
    engine = consumer.controller.engine

    def on_frame(data: bytes) -> None:
        try:
            frame = decode(data, engine.secret)
        except WireError as e:
            engine.refused(e)
        else:
            engine.inbox.put(Hop(frame))
            time.sleep(GIVE_WAY_S)

    def on_message(message: Any, body: object, ack: object, reject: object, callbacks: object, **kwargs: Any) -> None:
        message.ack()
        on_frame(message.body)

    consumer.connection.transport.on_frame = on_frame
    return on_message


class _IntoInbox:
    """A Celery consumer whose accepted requests go to the engine. All else is the consumer's own."""

    def __init__(self, consumer: Any):
        self._consumer = consumer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def on_task_request(self, request: Any) -> None:
        request.acknowledge()
        self._consumer.controller.engine.inbox.put(Submit(request))

    def apply_eta_task(self, request: Any) -> None:
        """A request's ETA has come."""
        state.task_reserved(request)
        self._consumer.qos.decrement_eventually()
        self.on_task_request(request)


def _no_body(*args: Any, **kwargs: Any) -> None:
    raise PPError("this task is served by a stage's worker: start one with `celery -A workers worker -Q stage0`")


def register(app: Celery) -> None:
    """Add both tasks to `app`, and to no other app of the process."""
    common = {"shared": False, "typing": False}
    app.task(name=GENERATE, Strategy="pptasks.tasks:generate_strategy", acks_late=False, **common)(_no_body)
    app.task(name=HOP_TASK, Strategy="pptasks.tasks:hop_strategy", ignore_result=True, send_events=False, **common)(
        _no_body
    )
