"""From what a command was given to a cluster that is ready: on this machine, rented, or held by `pp up`."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from orchestrator import offers, sweep, tables
from orchestrator.attached import Attached, settings_of
from orchestrator.board import Board
from orchestrator.cluster import LocalCluster
from orchestrator.clusters import Clusters
from orchestrator.fleet import Fleet
from orchestrator.ledger import Ledger
from orchestrator.offers import Choice
from orchestrator.progress import Display
from orchestrator.provider import Need, Offer, Provider
from orchestrator.renting import Terms
from orchestrator.run import Options, Run, state_folder
from orchestrator.stages import Cluster
from orchestrator.watch import Patience
from pptasks import spec
from pptasks.config import Settings
from pptasks.errors import NeedsToken, NotReady, ProviderError, UsageError
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import Plan, make_plan, split_sizes, stage_bytes

Given = Mapping[str, Any]
DECIDED = (
    "model", "stages", "split", "wire", "readout", "context", "memory", "weights", "slots", "prefill_chunk",
    "link", "relay", "broker", "broker_port", "kernels", "audit_rate",
)  # fmt: skip
RENTED_MODEL = "llama3.2:1b"
LINKED_GRACE_S = 25.0  # a link across the internet may take that long to come back
HOLD_S = 4 * 3600.0  # of what is rented, unless --deadline says otherwise
ROOM, ROOM_BYTES = 1.15, 700_000_000  # of GPU memory beside weights and KV cache: activations, driver, compiled code
LONG_S = 365 * 86400.0  # of what costs nothing
SPARE_PLACES = 2  # on this machine
IMAGE_GB = 12.0  # of disk, beside the model's share


class DryRun(Exception):
    """Not an error: what was asked for has been shown."""


def cluster(given: Given, console: Console) -> AbstractContextManager[tuple[Cluster, Model]]:
    """Model, plan, and a cluster that is ready; progress meanwhile."""
    if given.get("cluster"):
        return _attached(given, console)
    return _fleet(given, console) if is_rented(given) else _local(given, console)


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


def is_rented(given: Given) -> bool:
    return bool(given.get("vastai") or given.get("hosts"))


def how(given: Given, *, rented: bool) -> Options:
    """With machines elsewhere the link is needed, and relays unless they are refused."""
    relay = given["relay"] or ("default" if rented else "none")
    return Options(given["broker"], given["broker_port"], "iroh" if rented else given["link"], relay, given["timeout"])


def settings_from(given: Given) -> Settings:
    names = tuple(field.name for field in fields(Settings) if field.name in given)
    chosen = {n: given[n] for n in names if given.get(n) is not None}
    chosen["model"] = given["model"] or (RENTED_MODEL if given.get("vastai") else Settings.model)
    stages = given["stages"] or (2 if given["split"] in ("even", "auto") else len(split_sizes(given["split"])))
    return replace(Settings.of_this_machine(), num_stages=stages, **chosen)


def open_here(settings: Settings, display: Display) -> tuple[Settings, Model]:
    """The model, and the settings that name exactly it to every stage.

    Where access is refused and a person sits at a terminal, a token is asked for, once. It stays in the memory of this
    process and of the stages on this machine.
    """
    try:
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    except NeedsToken as e:
        if not is_terminal():
            raise
        with display.paused():
            click.echo(f"{e}", err=True)
            token = click.prompt("Hugging Face token (not shown, not kept)", hide_input=True, err=True)
        settings = replace(settings, hf_token=token.strip())
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    return replace(settings, model=model.spec), model


def open_elsewhere(settings: Settings, token: str | None, display: Display) -> tuple[Settings, Model]:
    """The model as machines elsewhere can have it: with `token` alone, never with the user's own."""
    settings = replace(settings, hf_token=token or "", hf_home=None, broker_grace_s=LINKED_GRACE_S)
    try:
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    except NeedsToken as e:
        raise NeedsToken(
            f"{e}; your own token is not sent to other machines: give one that may read this repository and no more "
            "as PP_WORKER_HF_TOKEN"
        ) from None
    return replace(settings, model=model.spec), model


def is_terminal() -> bool:
    """Whether a person can be asked."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stderr.isatty())


@dataclass(frozen=True)
class Rent:
    """All that is needed to put up a fleet, once its price is agreed to."""

    settings: Settings
    model: Model
    plan: Plan
    choice: Choice
    need: Need
    terms: Terms


@contextmanager
def rented(given: Given, console: Console) -> Iterator[tuple[Fleet, Model]]:
    """A fleet that nobody has entered yet; the provider is open meanwhile. Raises DryRun."""
    with provider_of(given) as provider:
        ledger = Ledger.of_user()
        sweep_leftovers(provider, ledger, given, console)
        rent = choose(provider, given, console)
        if given["dry_run"]:
            _show_choice(rent, given["as_json"], Console())
            raise DryRun
        agree(rent, provider, given, console)
        options = how(given, rented=provider.name != "local")
        told = rent.terms.deadline if given["deadline"] or provider.name == "vast" else 0.0
        with Board(console, quiet=given["quiet"], deadline=told) as board, Run(rent.settings, options) as run:
            linked = options.link == "iroh"
            more = partial(more_offers, provider, rent.need)
            fleet = Fleet(run, rent.plan, rent.terms, rent.choice, provider, ledger, board, linked=linked, more=more)
            yield fleet, rent.model


@contextmanager
def provider_of(given: Given) -> Iterator[Provider]:
    if given.get("vastai") and given.get("hosts"):
        raise UsageError("--vastai and --hosts: give one of them")
    if given.get("vastai"):
        from orchestrator.vast import Vast

        key = given["api_key"]
        if not key and is_terminal():
            key = click.prompt("vast.ai API key (not shown, not kept)", hide_input=True, err=True)
        if not key:
            raise UsageError("--vastai needs the key of an account: set VAST_API_KEY")
        with Vast(key.strip(), given["vast_url"], pace=state_folder() / "pace") as vast:
            yield vast
    else:
        from orchestrator.hosts import Hosts

        hosts = [host.strip() for host in (given.get("hosts") or "").split(",") if host.strip()]
        yield Hosts.ssh(hosts) if hosts else Hosts.local(settings_from(given).num_stages + SPARE_PLACES)


def sweep_leftovers(provider: Provider, ledger: Ledger, given: Given, console: Console) -> None:
    """What earlier runs have left there, ended before anything new is rented."""
    found = sweep.find(ledger, [provider], lambda line: console.print(line, highlight=False, markup=False))
    if not found or given["dry_run"]:
        return
    for leftover in found:
        click.echo(f"left over: {leftover.provider} {leftover.instance_id or leftover.label}: {leftover.why}", err=True)
    if given["yes"] or (is_terminal() and click.confirm("End them?", default=True, err=True)):
        left = sweep.end(found, [provider], ledger, lambda line: click.echo(line, err=True))
        if left:
            raise sweep.still_billing(left)


def choose(provider: Provider, given: Given, console: Console) -> Rent:
    """Model, plan and machines; nothing that costs."""
    settings = settings_from(given)
    elsewhere = provider.name != "local"
    with Display(console, quiet=given["quiet"]) as display:
        if elsewhere:
            settings, model = open_elsewhere(settings, given["worker_hf_token"], display)
        else:
            settings, model = open_here(settings, display)
    if provider.name == "vast" and isinstance(spec.parse(model.spec), spec.Local):
        raise UsageError(f"a rented machine cannot read {model.spec}: give a name, a repository or a URL (pp models)")
    plan = make_plan(model, settings)
    need = need_of(model, plan, given)
    found = provider.search(need)
    choice = offers.choose(found, need, plan.n_stages) if provider.name == "vast" else _in_order(found, plan.n_stages)
    return Rent(settings, model, plan, choice, need, _terms(given, need, provider))


def more_offers(provider: Provider, need: Need, tried: frozenset[str]) -> tuple[Offer, ...]:
    """On machines that were not tried. Raises ProviderError if there is none."""
    found = [offer for offer in provider.search(need) if offer.machine_id not in tried]
    choice = offers.choose(found, need, 1) if provider.name == "vast" else _in_order(found, 1)
    return choice.stages + choice.spares


def need_of(model: Model, plan: Plan, given: Given) -> Need:
    """What each machine must have, from what the largest stage holds."""
    largest = max(stage_bytes(model, plan, stage) for stage in range(plan.n_stages))
    vram = int(given["min_vram"] * 1e9) if given["min_vram"] else int(ROOM * largest) + ROOM_BYTES
    return Need(
        min_vram_bytes=vram,
        count=plan.n_stages,
        disk_gb=given["disk"] or round(IMAGE_GB + 1.2 * largest / 1e9, 1),
        min_down_mbps=given["min_down"],
        max_price_usd_hour=given["max_price"],
        region=given["region"],
        gpu=given["gpu"],
        spot=given["spot"],
        min_cuda=12.8,  # what docker/cuda.txt holds
    )


def _in_order(found: list[Offer], n: int) -> Choice:
    """Machines that are the user's own: the first n, the others are spares."""
    if len(found) < n:
        raise ProviderError(
            f"{n} machines are needed, and {len(found)} are there: give more --hosts, or fewer --stages"
        )
    return Choice(tuple(found[:n]), tuple(found[n:]), "")


def _terms(given: Given, need: Need, provider: Provider) -> Terms:
    command = {
        "vast": "exec python -m workers.node",
        "local": f"exec {sys.executable} -m workers.node",
        "ssh": f"exec {given.get('node_command') or 'pp-node'}",
    }[provider.name]
    deadline = given["deadline"] or (HOLD_S if provider.name == "vast" else LONG_S)
    return Terms(
        image=given["image"],
        command=command,
        deadline=time.time() + deadline,
        budget_usd=given["budget_usd"],
        disk_gb=need.disk_gb,
        spot=given["spot"],
        patience=Patience.of(given["timeout"]),
        hf_token=given["worker_hf_token"] or "",
    )


def agree(rent: Rent, provider: Provider, given: Given, console: Console) -> None:
    """Show what it costs, and ask. UsageError if nobody can be asked and nobody said yes."""
    if provider.name != "vast" or given["yes"]:
        return
    if not is_terminal():
        raise UsageError("renting costs money and nobody can be asked: give --yes (and --dry-run to see the price)")
    _show_choice(rent, False, console)
    hours = (rent.terms.deadline - time.time()) / 3600
    price = rent.choice.price_usd_hour
    question = f"Rent {rent.plan.n_stages} machines for ${price:.3f} an hour, at most ${price * hours:.2f} in all?"
    if not click.confirm(question, default=True, err=True):
        raise NotReady("nothing was rented")


def _show_choice(rent: Rent, as_json: bool, console: Console) -> None:
    rows = tables.offer_rows(rent.choice, rent.model, rent.plan)
    if as_json:
        summary = {"price_usd_hour": rent.choice.price_usd_hour, "near": rent.choice.near, "offers": rows}
        click.echo(json.dumps({"model": rent.model.name, "plan": rent.plan.to_json()} | summary))
    else:
        console.print(tables.offers_table(rows, rent.choice.price_usd_hour))
