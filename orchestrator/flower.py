"""Flower, Celery's own page of workers and tasks, for as long as a run: `pp up --flower`, `pp serve --flower`.

It is a child process (`python -m orchestrator.flower`) that ends with its parent, listens on 127.0.0.1 alone, and lets
in whoever has the password that it makes for itself. /metrics and /healthcheck are open to this machine, as Flower has
them; they tell names of workers and tasks, and nothing of what a request says.

What it remembers is bounded: 1000 tasks, each with the first 1024 characters of its arguments. Hops are no tasks with
events, so a token costs it nothing.
"""

import ctypes
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from orchestrator.process import Process, end_all, python
from orchestrator.stages import Cluster
from pptasks.app import make_app
from pptasks.config import MAX_STAGES, Settings, child_environment
from pptasks.errors import NotReady

HOST, USER = "127.0.0.1", "pp"
UP_S = 30.0
MAX_TASKS = 1000
PURGE_S = 3600  # workers that have gone are shown for so long
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Flower:
    """Where it is, and who may see it."""

    url: str
    user: str
    password: str = field(repr=False)
    pid: int


@contextmanager
def flower_for(given: Mapping[str, Any], cluster: Cluster) -> Iterator[Flower | None]:
    """Flower for the run of `cluster`, if --flower was given; it tells on stderr where it is, and how to get in.

    Raises NotReady when it does not come up.
    """
    if not given["flower"]:
        yield None
        return
    with ExitStack() as stack:
        flower = _start(cluster.settings, cluster.folder, stack)
        click.echo(f"Flower: {flower.url}, user {flower.user}, password {flower.password}", err=True)
        yield flower


def _start(settings: Settings, folder: Path, stack: ExitStack) -> Flower:
    """It is told how to reach the broker, and none of the run's other secrets."""
    env = child_environment(replace(settings, stage=None, secret="", hf_token="", hf_home=None))
    argv, log = python("orchestrator.flower", str(os.getpid())), folder / "flower.log"
    process = Process("Flower", argv, env, log, cwd=folder, pipe=True)
    stack.callback(end_all, [process])
    line = process.read_line(UP_S)
    if not line:
        raise NotReady(f"Flower is not up after {UP_S:.0f} s: {' | '.join(process.tail(3)) or process.how_it_ended}")
    told = json.loads(line)
    return Flower(f"http://{HOST}:{told['port']}", USER, told["password"], process.pid)


def main(parent: int) -> None:
    """The child: serves until it is killed. It has nothing to save, so any signal may end it at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # gone before prctl, which then signals nothing
        sys.exit("the process that started Flower is gone")
    from flower.app import Flower as Server  # loads tornado, which nothing else here needs
    from flower.options import default_options as options
    from flower.urls import settings as pages

    password = secrets.token_urlsafe(18)
    options.address, options.port = HOST, 0
    options.basic_auth = [f"{USER}:{password}"]
    options.max_tasks, options.max_workers, options.purge_offline_workers = MAX_TASKS, MAX_STAGES, PURGE_S
    server = Server(options=options, capp=make_app(Settings.from_env()), **pages)
    print(json.dumps({"port": server.start_http_server(), "password": password}), flush=True)
    server.start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
