"""A cluster that is ready, behind HTTP."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import click

from orchestrator.serve import metrics
from orchestrator.serve.app import create_app
from orchestrator.serve.health import Health
from orchestrator.serve.server import Server
from orchestrator.serve.state import Access, Limits, ServeState
from orchestrator.stages import Cluster
from pptasks import shown
from pptasks.aio import AsyncClient
from pptasks.app import make_app
from pptasks.errors import RequestFailed, StageFailed
from pptasks.modelinfo import Model

LOOK_S = 1.0
SPARE_CONNECTIONS = 256  # beyond one for each answer: pages, probes, connections that are kept


def hold(
    cluster: Cluster,
    model: Model,
    bound: socket.socket,
    access: Access,
    limits: Limits,
    on_ready: Callable[[], None],
) -> None:
    """Serve until an interrupt. Raises RequestFailed when the HTTP server ends by itself."""
    client = AsyncClient(make_app(cluster.settings))
    state = ServeState(cluster, model, client, metrics.Observer(), Health(), limits, access)
    server = Server(create_app(state), client, bound, limits.queue + SPARE_CONNECTIONS)
    with suppress(KeyboardInterrupt), server:
        on_ready()
        _watch(server, cluster, state.health)


def _watch(server: Server, cluster: Cluster, health: Health) -> None:
    """Until an interrupt. A pipeline that does not serve is told once, and looked at again: it may come back."""
    told = ""
    while server.is_alive:
        health.look(cluster)
        if health.is_over:  # and none of it will ever be answered
            server.fail_all(StageFailed(health.reason))
        if health.reason != told:
            told = health.reason
            click.echo(f"not ready: {shown.line(told)}" if told else "ready again", err=True)
        time.sleep(LOOK_S)
    raise RequestFailed("the HTTP server has ended; its log says why")
