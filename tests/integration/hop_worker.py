"""A small Celery app on the hop transport: what the tests start as a real worker process.

    HOP_BROKER=redis://... HOP_PREFIX=pp:x: HOP_FORWARD=out \\
        python -m celery -A tests.integration.hop_worker worker -Q stage0 -P solo

The Strategy of the hop task only hands the bytes to an inbox; a thread forwards each frame to the queue HOP_FORWARD.
"""

import os
from queue import SimpleQueue
from threading import Thread
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from pptasks.sender import HopSender
from pptasks.transport import HOP_TASK, dropped

inbox: SimpleQueue[bytes] = SimpleQueue()


def make_app(broker: str, prefix: str = "") -> Celery:
    app = Celery("hop_worker", broker=broker, backend=broker, set_as_current=False)
    app.conf.update(
        broker_transport="pptasks.transport:Transport",
        broker_transport_options={"global_keyprefix": prefix},
        result_backend_transport_options={"global_keyprefix": prefix},
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        task_publish_retry=False,
        worker_prefetch_multiplier=4,
    )
    app.task(hop, name=HOP_TASK, Strategy="tests.integration.hop_worker:into_inbox", shared=False)
    app.task(add, name="test.add", shared=False)
    app.task(count_dropped, name="test.dropped", shared=False)
    return app


def hop() -> None:
    """Never runs: the Strategy takes the message."""


def add(x: int, y: int) -> int:
    return x + y


def count_dropped() -> int:
    return dropped.count


def into_inbox(task: Any, app: Celery, consumer: Any, **kwargs: Any) -> Any:
    def handle(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        inbox.put(message.body)
        message.ack()

    return handle


def forward(queue: str) -> None:
    sender = HopSender(app)
    while True:
        sender.send(queue, inbox.get())


app = make_app(os.environ.get("HOP_BROKER", "redis://127.0.0.1:1/0"), os.environ.get("HOP_PREFIX", ""))


@worker_ready.connect
def start_forwarding(**kwargs: Any) -> None:
    if queue := os.environ.get("HOP_FORWARD"):
        Thread(target=forward, args=(queue,), daemon=True).start()
