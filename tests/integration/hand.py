"""What a Celery team does by hand: a producer that is a stock Celery app, and workers started one by one."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kombu.pools
from celery import Celery
from celery.result import AsyncResult

from pptasks.config import Settings, child_environment
from pptasks.keys import stage_name, stage_queue


@contextlib.contextmanager
def stock_app(url: str, key_prefix: str) -> Iterator[Celery]:
    """A stock Celery app that knows nothing of pptasks but the task's name, the queue and the key prefix."""
    app = Celery("somebody", broker=url, backend=url)
    prefix = {"global_keyprefix": key_prefix}
    app.conf.update(broker_transport_options=prefix, result_backend_transport_options=prefix)
    yield app
    app.backend.result_consumer.stop()
    app.backend.client.close()
    kombu.pools.reset()
    app.close()


def send(app: Celery, **kwargs: object) -> AsyncResult:
    return app.send_task("pptasks.generate", kwargs=kwargs, queue=stage_queue(0))


@contextlib.contextmanager
def by_hand(stage: int, settings: Settings, log: Path, queues: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """`celery -A workers worker` with its environment, as the README tells. queues: another `-Q`; "" for none."""
    argv = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "workers",
        "worker",
        "-n",
        f"{stage_name(stage)}@%h",
        "--pool",
        "solo",
    ]
    argv += ["--without-gossip", "--without-mingle", "-l", "WARNING"]
    chosen = stage_queue(stage) if queues is None else queues
    env = child_environment(replace(settings, stage=stage))
    with log.open("wb") as out:
        worker = subprocess.Popen([*argv, *(["-Q", chosen] if chosen else [])], env=env, stdout=out, stderr=out)
        try:
            yield worker
        finally:
            worker.terminate()
            worker.wait(10)
