"""From what a command was given to a cluster that is ready: on this machine, rented, or held by `pp up`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import click
from click.core import ParameterSource
from rich.console import Console

from orchestrator.attached import Attached, settings_of
from orchestrator.cluster import LocalCluster
from orchestrator.clusters import Clusters
from orchestrator.given import Given, how, open_here, settings_from
from orchestrator.hire import rented
from orchestrator.progress import Display
from orchestrator.stages import Cluster
from pptasks.errors import UsageError
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import make_plan

DECIDED = (
    "model", "stages", "split", "wire", "readout", "context", "memory", "weights", "slots", "kv_bytes", "lanes",
    "in_flight", "prefill_chunk",
    "link", "relay", "broker", "broker_port", "kernels", "audit_rate",
)  # fmt: skip


def cluster(given: Given, console: Console) -> AbstractContextManager[tuple[Cluster, Model]]:
    """Model, plan, and a cluster that is ready; progress meanwhile."""
    if given.get("cluster"):
        return _attached(given, console)
    return _fleet(given, console) if is_rented(given) else _local(given, console)


def is_rented(given: Given) -> bool:
    return bool(given.get("vastai") or given.get("hosts"))


@contextmanager
def _local(given: Given, console: Console) -> Iterator[tuple[Cluster, Model]]:
    settings = settings_from(given)
    with ExitStack() as stack:
        with Display(console, quiet=given["quiet"]) as display:
            settings, model = open_here(settings, display)
            made = LocalCluster(settings, make_plan(model, settings), how(given, rented=False), display.members)
            stack.enter_context(made)
        yield made, model


@contextmanager
def _fleet(given: Given, console: Console) -> Iterator[tuple[Cluster, Model]]:
    with rented(given, console) as (fleet, model), fleet:
        fleet.board.settle()
        yield fleet, model


@contextmanager
def _attached(given: Given, console: Console) -> Iterator[tuple[Cluster, Model]]:
    """The cluster of --cluster. UsageError for an option that its holder has decided already."""
    context = click.get_current_context()
    for name in DECIDED:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} and --cluster: the cluster is up already, with what pp up was given")
    record = Clusters.of_user().read(given["cluster"])
    settings = settings_of(record)
    if given.get("verify") and not settings.verify:
        raise UsageError(f"cluster {record.name} verifies nothing: start it with pp up --verify")
    with Display(console, quiet=given["quiet"]) as display:
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    with Attached(record, settings, make_plan(model, settings)) as made:
        yield made, model
