"""`pp ps`, `pp down`, `pp sweep`: what is up, what bills, and its end."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import click
import psutil
from rich.console import Console

from orchestrator import labels, listing, options
from orchestrator.broker import purge
from orchestrator.clusters import Clusters, Record
from orchestrator.folders import own_folder, state_folder
from orchestrator.ledger import Ledger, Rental
from orchestrator.provider import Provider
from orchestrator.run import is_live
from orchestrator.signals import uninterrupted
from orchestrator.sweep import Leftover, end, no_access, still_billing, survey
from orchestrator.vast import URL, Vast
from pptasks.errors import BrokerError, PPError, ProviderError, StillBilling, StorageError, UsageError
from pptasks.keys import Keys

STOP_S = 120.0  # for a cluster's holder to end all of its machines
POLL_S, TELL_S = 0.2, 10.0
NOT_ASKED = "vast.ai was not asked: there is no key, give VAST_API_KEY"

_account = options.group(
    options.option(
        "--api-key",
        "Key of the vast.ai account. Others see arguments: VAST_API_KEY is better.",
        envvar="VAST_API_KEY",
    ),
    click.option("--vast-url", envvar="PP_VAST_URL", default=URL, hidden=True),
)


def providers_at_hand(api_key: str | None, url: str | None, rows: Iterable[Rental] = ()) -> dict[str, Provider]:
    """By name, all that can be asked: this machine, vast.ai with a key, and the hosts of `rows`."""
    from orchestrator.hosts import Hosts

    providers: dict[str, Provider] = {"local": Hosts.local(1)}
    if hosts := tuple(sorted({row.offer_id for row in rows if row.provider == "ssh"})):
        providers["ssh"] = Hosts.ssh(hosts)
    if api_key:
        providers["vast"] = Vast(api_key.strip(), url or URL, pace=own_folder(state_folder() / "pace"))
    return providers


@contextmanager
def _at_hand(api_key: str | None, url: str, rows: Iterable[Rental]) -> Iterator[list[Provider]]:
    providers = list(providers_at_hand(api_key, url, rows).values())
    try:
        yield providers
    finally:
        for provider in providers:
            if isinstance(provider, Vast):
                provider.close()


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read it has gone
        click.echo(line, err=True)


@click.command()
@_account
@options.as_json
def ps(api_key: str | None, vast_url: str, as_json: bool) -> None:
    """Show the named clusters, and the machines that bill."""
    ledger, now = Ledger.of_user(), time.time()
    with _at_hand(api_key, vast_url, ledger.open_rows()) as providers:
        seen = survey(ledger, providers)
    clusters = listing.clusters(Clusters.of_user().all(), is_live, now)
    machines = listing.machines(seen, labels.owner(), now)
    not_asked = {name: str(error) for name, error in seen.errors.items()}
    if not any(provider.name == "vast" for provider in providers):
        not_asked["vast"] = NOT_ASKED
    if as_json:
        click.echo(json.dumps({"clusters": clusters, "machines": machines, "not_asked": not_asked}))
        return
    console = Console()
    console.print(listing.table("clusters", listing.CLUSTERS, clusters) if clusters else "no cluster is up")
    console.print(
        listing.table("machines that bill", listing.MACHINES, machines) if machines else "no machine is known"
    )
    for why in not_asked.values():
        _say(why)


@click.command()
@click.argument("name", required=False)
@click.option("--all", "all_", is_flag=True, help="All clusters.")
@_account
def down(name: str | None, all_: bool, api_key: str | None, vast_url: str) -> None:
    """End the cluster NAME, or the only one: its machines, confirmed, and whoever holds it."""
    if name is not None and all_:
        raise UsageError("give a NAME or --all")
    clusters, ledger = Clusters.of_user(), Ledger.of_user()
    records = clusters.all() if all_ else [clusters.pick(name)]
    left: list[Leftover] = []
    failed: list[PPError] = []
    with _at_hand(api_key, vast_url, ledger.open_rows()) as providers:
        for record in records:
            try:
                left += _end_cluster(record, clusters, ledger, providers)
            except PPError as error:  # the others are still to be ended
                failed.append(error)
    if left:
        failed.append(still_billing(left))
    for each in failed[:-1]:
        _say(f"error: {each}")
    if failed:
        raise failed[-1]
    _say("ended" if records else "no cluster is up")


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also what living runs use.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing.")
@click.option("--dry-run", is_flag=True, help="Show what would be ended; end nothing.")
@_account
@options.as_json
def sweep(all_: bool, yes: bool, dry_run: bool, api_key: str | None, vast_url: str, as_json: bool) -> None:
    """End the machines that ended runs have left: those of the ledger and of this user's label, and whatever machine of
    pptasks is past its deadline. Exit 1 if something may bill on."""
    ledger = Ledger.of_user()
    with _at_hand(api_key, vast_url, ledger.open_rows()) as providers:
        seen = survey(ledger, providers, all_=all_)
        for line in [
            *(f"{error}; going on with what is known" for error in seen.errors.values()),
            *no_access(seen.beyond),
        ]:
            _say(line)
        if not any(provider.name == "vast" for provider in providers):
            _say(NOT_ASKED)
        if seen.found:
            entries = listing.leftovers(seen.found, time.time())
            Console(stderr=as_json).print(listing.table("left over", listing.LEFTOVERS, entries))
        left, ended = list(seen.found), list[Leftover]()
        if seen.found and not dry_run and _may_end(seen.found, yes):
            with uninterrupted():
                left = end(seen.found, providers, ledger, _say)
            remaining = {(x.provider, x.instance_id, x.label) for x in left}
            ended = [x for x in seen.found if (x.provider, x.instance_id, x.label) not in remaining]
    left += seen.beyond
    if as_json:
        now = time.time()
        click.echo(json.dumps({"ended": listing.leftovers(ended, now), "left": listing.leftovers(left, now)}))
    elif ended:
        click.echo(f"ended: {len(ended)}; {listing.cost_text(ended, time.time())}")
    elif not left and not seen.errors:
        click.echo("nothing is left over")
    if left and not dry_run:
        raise still_billing(left)
    if seen.errors:
        raise ProviderError(f"what is left is not known: no list from {', '.join(seen.errors)}; try again")


def _may_end(found: Sequence[Leftover], yes: bool) -> bool:
    """Ask, unless it is answered already. UsageError where nobody can be asked."""
    in_use = sum(is_live(x.run) for x in found)
    if in_use:
        _say(f"{in_use} of them {'are' if in_use > 1 else 'is'} used by living runs, which will fail")
    if yes:
        return True
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError("there is no terminal to ask at: nothing is ended; give --yes to end them, --dry-run to look")
    return click.confirm(f"End {'them' if len(found) > 1 else 'it'}?", err=True)


def _end_cluster(record: Record, clusters: Clusters, ledger: Ledger, providers: Sequence[Provider]) -> list[Leftover]:
    """What may bill on. Its holder ends it if it lives; what is left then is ended here."""
    if is_live(record.run):
        _stop(record, ledger)
    seen = survey(ledger, providers, run=record.run)
    with uninterrupted():
        left = end(seen.found, providers, ledger, _say) + seen.beyond
    if not left and record.where == "vast" and (seen.errors or not any(p.name == "vast" for p in providers)):
        why = "; ".join(map(str, seen.errors.values())) or "give VAST_API_KEY"
        raise ProviderError(f"whether {record.name} has left machines at vast.ai is not known: {why}")
    with suppress(BrokerError):  # it was the run's own and is gone, or the next run on it will do it
        purge(record.settings.get("PP_BROKER", ""), Keys(record.run))
    if not left:
        clusters.remove(record.name, record.run)
    return left


def _stop(record: Record, ledger: Ledger) -> None:
    """Have the holder end its run, and wait for it. Only who holds it is ever sent a signal."""
    try:
        holder = psutil.Process(max(record.pid, 0))
        another = holder.create_time() > record.started_at + 1 or holder.uids().real != os.getuid()
        if another or record.pid == 1:  # the process id is another's by now
            raise psutil.NoSuchProcess(record.pid)
        holder.terminate()  # checks the same once more
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        if is_live(record.run):
            raise StorageError(
                f"cluster {record.name} is held, but not by process {record.pid} of its record: end pp up where it runs"
            ) from None
    began = told = time.monotonic()
    while is_live(record.run):
        now = time.monotonic()
        if now - began > STOP_S:
            ids = tuple(row.instance_id or row.label for row in ledger.open_rows(record.run))
            raise StillBilling(
                f"cluster {record.name} does not end (process {record.pid}, after {STOP_S:.0f} s): "
                f"{', '.join(ids) or 'nothing'} may bill on; kill -9 {record.pid} and pp down {record.name} end it",
                ids,
            )
        if now - told > TELL_S:
            told = now
            _say(f"waiting for {record.name} to end its machines ({now - began:.0f} s)")
        time.sleep(POLL_S)
