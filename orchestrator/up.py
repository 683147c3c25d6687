"""`pp up`: a cluster that stays, for `pp run --cluster NAME` and others; `pp join`: this machine, as one of its."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from filelock import FileLock, Timeout
from rich.console import Console

from orchestrator import options
from orchestrator.board import Board
from orchestrator.clusters import Clusters, Record
from orchestrator.fleet import Fleet
from orchestrator.flower import Flower, flower_for
from orchestrator.folders import own_folder
from orchestrator.given import LINKED_GRACE_S, LONG_S, Given, how, is_terminal, open_here, settings_from
from orchestrator.hire import rented
from orchestrator.joined import Joined
from orchestrator.process import python
from orchestrator.progress import Display
from orchestrator.run import Run, is_live
from orchestrator.signals import held, interruptible
from orchestrator.watch import Patience
from pptasks.config import without_account
from pptasks.errors import NoSuchCluster, UsageError
from pptasks.invitation import Invitation, parse
from pptasks.modelinfo import Model

HOLD_POLL_S, DETACH_POLL_S = 1.0, 0.2
MAX_SAID = 64 << 10  # bytes of what a holder said that are passed on at once


@click.command(context_settings=options.HELP)
@options.model
@options.cluster
@options.rented
@click.option("--join", "guests", type=click.IntRange(1, 64), metavar="N", help="Wait for N machines to pp join.")
@click.option("--name", default="default", show_default=True, help="What --cluster and pp down call it.")
@click.option("--verify", is_flag=True, help="Let pp verify use it.")
@options.flower
@click.option("--detach", "-d", is_flag=True, help="Return when it is ready, and let it run on; pp down ends it.")
@options.as_json
def up(name: str, detach: bool, as_json: bool, **given: Any) -> None:
    """Put a cluster up and hold it: here, rented (--vastai), on hosts of yours (--hosts), or of machines that join.

    Without any of these the stages are processes of this machine. In the foreground until Ctrl-C, which ends it all.
    """
    given |= {"as_json": as_json}
    if sum(bool(given[source]) for source in ("vastai", "hosts", "guests")) > 1:
        raise UsageError("give one of --vastai, --hosts and --join")
    _refuse_taken(name)
    if detach:
        _detach(name, given)
        return
    console = Console(stderr=True)
    with (
        _name_held(name),
        _made(given, console) as (cluster, model),
        flower_for(given, cluster) as flower,
        _recorded(name, cluster, model.name, given) as tell_ready,
    ):
        with suppress(KeyboardInterrupt), cluster:
            _announce(tell_ready(), given, flower)
            with interruptible():
                while True:
                    cluster.tend()
                    time.sleep(HOLD_POLL_S)
        if cluster.ready_s == 0.0:
            raise KeyboardInterrupt  # it never was up
        if not given["quiet"]:
            click.echo(f"cluster {name} is down; it cost ${cluster.spent_usd:.4f}", err=True)


def _made(given: Given, console: Console) -> AbstractContextManager[tuple[Fleet | Joined, Model]]:
    return _joined(given, console) if given["guests"] else rented(given, console)


@contextmanager
def _joined(given: Given, console: Console) -> Iterator[tuple[Joined, Model]]:
    n = given["guests"]
    if given["stages"] not in (None, n):
        raise UsageError(f"--join {n} and --stages {given['stages']}: each machine that joins is one stage")
    settings = settings_from({**given, "stages": n})
    with Display(console, quiet=given["quiet"]) as display:
        settings, model = open_here(settings, display)
    deadline = time.time() + (given["deadline"] or LONG_S)
    settings = replace(settings, hf_token="", hf_home=None, broker_grace_s=LINKED_GRACE_S)  # a token is ours
    with (
        held(),
        Board(console, quiet=given["quiet"], deadline=deadline) as board,
        Run(settings, how(given, rented=True)) as run,
    ):
        patience = Patience.of(given["timeout"])
        yield Joined(run, model, n, deadline, patience, board, partial(_invite, given)), model


def _invite(given: Given, invitations: Sequence[Invitation]) -> None:
    """On stdout: whoever has a ticket can take its seat."""
    if given["as_json"]:
        click.echo(json.dumps({"tickets": [str(invitation) for invitation in invitations]}))
        return
    click.echo("Run one of these lines on each machine; a ticket lets one machine in, so keep it to yourself:\n")
    for invitation in invitations:
        click.echo(f"    pp join {invitation}\n")


def _where(given: Given) -> str:
    return "vast" if given["vastai"] else "ssh" if given["hosts"] else "join" if given["guests"] else "local"


@contextmanager
def _name_held(name: str) -> Iterator[None]:
    """From before anything is rented: of two commands with one name, the second is refused."""
    folder = own_folder(Clusters.of_user().folder)
    try:
        with FileLock(folder / f"{name}.lock", timeout=0, mode=0o600):
            yield
    except Timeout:
        raise UsageError(f"another command puts cluster {name} up: give another --name") from None


def _refuse_taken(name: str) -> None:
    clusters = Clusters.of_user()
    with suppress(NoSuchCluster):
        record = clusters.read(name)
        if is_live(record.run):
            raise UsageError(f"cluster {name} is up already: give another --name, or end it with pp down {name}")
        clusters.remove(name, record.run)


@contextmanager
def _recorded(name: str, cluster: Fleet | Joined, model: str, given: Given) -> Iterator[Callable[[], Record]]:
    """The cluster's record, for as long as it is there; a call says that it is ready."""
    clusters, run = Clusters.of_user(), cluster.settings.run
    deadline = cluster.deadline if given["deadline"] or given["vastai"] else 0.0
    record = Record(name, run, os.getpid(), _where(given), model, time.time(), deadline, 0.0, None, {})

    def tell_ready() -> Record:
        ready = replace(
            record,
            ready_s=cluster.ready_s,
            price_usd_hour=cluster.price_usd_hour,
            settings=replace(cluster.settings, hf_token="", hf_home=None).to_env(),  # not what is the user's
        )
        clusters.write(ready)
        return ready

    clusters.write(record)
    try:
        yield tell_ready
    finally:
        clusters.remove(name, run)


def _announce(record: Record, given: Given, flower: Flower | None) -> None:
    """On stdout: how to use it; no secret but Flower's password, which has no other way to whoever started it."""
    if given["as_json"]:
        shown = {k: getattr(record, k) for k in ("name", "run", "pid", "where", "model", "deadline", "ready_s")}
        at = {"flower": {"url": flower.url, "user": flower.user, "password": flower.password}} if flower else {}
        click.echo(json.dumps(shown | {"price_usd_hour": record.price_usd_hour} | at))
    else:
        price = f", ${record.price_usd_hour:.3f} an hour" if record.price_usd_hour else ""
        click.echo(
            f"cluster {record.name} is ready after {record.ready_s:.1f} s{price}: "
            f'pp run --cluster {record.name} "Say hello"'
        )


def _detach(name: str, given: Given) -> None:
    """The same command as a process in a session of its own; what it says until it is ready is shown."""
    if given["vastai"] and not given["yes"] and not given["dry_run"]:
        raise UsageError("--detach asks nothing: give --yes (--dry-run shows the price)")
    clusters = Clusters.of_user()
    own_folder(clusters.folder)
    secrets = {"VAST_API_KEY": given["api_key"], "PP_WORKER_HF_TOKEN": given["worker_hf_token"]}
    secrets["PP_BROKER"] = given["broker"]
    env = os.environ | {variable: value for variable, value in secrets.items() if value}
    with ExitStack() as stack:
        out, err = (stack.enter_context(_Said(clusters.folder / f"{name}.{end}")) for end in ("out", "err"))
        holder = subprocess.Popen(
            python("orchestrator.cli", "up", "--name", name, *_arguments()),
            env=env, stdin=subprocess.DEVNULL, stdout=out.file, stderr=err.file, start_new_session=True,
        )  # fmt: skip
        try:
            while not _is_settled(holder, clusters, name):
                err.tell()
                out.tell()
                time.sleep(DETACH_POLL_S)
        except KeyboardInterrupt:
            holder.terminate()
            holder.wait()
            raise
        finally:
            err.tell()
            out.tell()
    if holder.returncode is not None:
        sys.exit(holder.returncode)


def _is_settled(holder: "subprocess.Popen[bytes]", clusters: Clusters, name: str) -> bool:
    """Whether the cluster is ready, or its holder has ended."""
    if holder.poll() is not None:
        return True
    with suppress(NoSuchCluster):
        record = clusters.read(name)
        return record.pid == holder.pid and record.ready_s is not None
    return False


class _Said:
    """A context manager: a file that a holder writes its stdout or its stderr to, which we pass on to our own."""

    def __init__(self, path: Path):
        self._is_error = path.suffix == ".err"
        self.file = open(os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600), "r+b")  # noqa: SIM115
        self._told = 0

    def __enter__(self) -> "_Said":
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def tell(self) -> None:
        """What has come since the last time. By the open file: its holder removes the name when it ends."""
        while data := os.pread(self.file.fileno(), MAX_SAID, self._told):
            self._told += len(data)
            click.echo(data.decode(errors="replace"), nl=False, err=self._is_error)


def _arguments() -> list[str]:
    """What this command was given, without what must not be in an argument list, or is the holder's own."""
    context, given = click.get_current_context(), list[str]()
    ours = ("name", "detach", "api_key", "worker_hf_token", "broker")
    for param in context.command.params:
        if param.name in ours or context.get_parameter_source(param.name or "") is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[param.name or ""]
        flag = isinstance(param, click.Option) and param.is_flag
        given += [param.opts[0]] if flag else [param.opts[0], str(value)]
    return given


@click.command(context_settings=options.HELP)
@click.argument("ticket", required=False, envvar="PP_INVITATION")
def join(ticket: str | None) -> None:
    """Make this machine a stage of a cluster that waits for it: TICKET is what pp up --join printed.

    Without TICKET it is asked for, so that no list of processes shows it.
    """
    if not ticket:
        if not is_terminal():
            raise UsageError("give the TICKET that pp up --join printed, or set PP_INVITATION")
        ticket = click.prompt("Ticket (not shown)", hide_input=True, err=True)
    parse(ticket.strip())  # a damaged one is told at once
    node = subprocess.Popen(
        python("workers.join"), env=without_account() | {"PP_INVITATION": ticket.strip()}, start_new_session=True
    )
    while True:
        try:
            sys.exit(node.wait())
        except KeyboardInterrupt:
            node.terminate()
