"""Machines that are rented, or lent by ssh: offers chosen, a price agreed to, a fleet made of them."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from shlex import quote

import click
from rich.console import Console

from orchestrator import offers, sweep, tables
from orchestrator.board import Board
from orchestrator.fleet import Fleet
from orchestrator.folders import own_folder, state_folder
from orchestrator.given import LONG_S, Given, how, is_terminal, open_elsewhere, open_here, settings_from
from orchestrator.ledger import Ledger
from orchestrator.offers import Choice
from orchestrator.progress import Display
from orchestrator.provider import Need, Offer, Provider
from orchestrator.renting import Terms
from orchestrator.run import Run
from orchestrator.signals import held
from orchestrator.watch import Patience
from pptasks import spec
from pptasks.config import Settings
from pptasks.errors import NotReady, ProviderError, UsageError
from pptasks.modelinfo import Model
from pptasks.plan import Plan, make_plan, stage_bytes

HOLD_S = 4 * 3600.0  # of what is rented, unless --deadline says otherwise
SPARE_PLACES = 2  # on this machine
ROOM, ROOM_BYTES = 1.15, 700_000_000  # of GPU memory beside weights and KV cache: activations, driver, compiled code
IMAGE_GB = 12.0  # of disk, beside the model's share


class DryRun(Exception):
    """Not an error: what was asked for has been shown."""


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
    """A fleet that nobody has entered yet; the provider is open meanwhile, and signals wait but where it is
    `interruptible`. Raises DryRun."""
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
        with held(), Board(console, quiet=given["quiet"], deadline=told) as board, Run(rent.settings, options) as run:
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
        with Vast(key.strip(), given["vast_url"], pace=own_folder(state_folder() / "pace")) as vast:
            yield vast
    else:
        from orchestrator.hosts import Hosts

        hosts = [host.strip() for host in (given.get("hosts") or "").split(",") if host.strip()]
        yield (
            Hosts.ssh(hosts, command=_command("ssh", given))
            if hosts
            else Hosts.local(settings_from(given).num_stages + SPARE_PLACES)
        )


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
    choice = _choice(provider, found, need, plan.n_stages)
    return Rent(settings, model, plan, choice, need, _terms(given, need, provider))


def more_offers(provider: Provider, need: Need, tried: frozenset[str]) -> tuple[Offer, ...]:
    """On machines that were not tried. Raises ProviderError if there is none."""
    found = [offer for offer in provider.search(need) if offer.machine_id not in tried]
    choice = _choice(provider, found, need, 1)
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


def _choice(provider: Provider, found: list[Offer], need: Need, n: int) -> Choice:
    """Of a market by `offers.choose`; of machines that are the user's own the first n, the others are spares."""
    if provider.name == "vast":
        return offers.choose(found, need, n)
    large = [offer for offer in found if provider.name == "local" or offer.vram_bytes >= need.min_vram_bytes]
    if len(large) < n:
        needed = f"with {need.min_vram_bytes / 1e9:.1f} GB free"
        there = ", ".join(f"{offer.id} ({offer.gpu_name}, {offer.vram_bytes / 1e9:.1f} GB)" for offer in found)
        raise ProviderError(
            f"{n} machines {needed} are needed, there is {there or 'none'}: "
            "give more --hosts, more --stages, or a lower --min-vram"
        )
    return Choice(tuple(large[:n]), tuple(large[n:]), "")


def _terms(given: Given, need: Need, provider: Provider) -> Terms:
    deadline = given["deadline"] or (HOLD_S if provider.name == "vast" else LONG_S)
    return Terms(
        image=given["image"],
        command=_command(provider.name, given),
        deadline=time.time() + deadline,
        budget_usd=given["budget_usd"],
        disk_gb=need.disk_gb,
        spot=given["spot"],
        patience=Patience.of(given["timeout"]),
        hf_token=given["worker_hf_token"] or "",
    )


def _command(provider: str, given: Given) -> str:
    """What starts a node, for a shell there."""
    return {
        "vast": "exec python -m workers.node",
        "local": f"exec {quote(sys.executable)} -m workers.node",
        "ssh": f"exec {given['node_command']}",
    }[provider]


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
