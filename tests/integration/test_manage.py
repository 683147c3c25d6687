"""`pp ps`, `pp down`, `pp sweep` against the fake API, real holders that are killed, and a real Redis."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner, Result

import orchestrator.vastcalls as vastcalls
from orchestrator import labels, manage, sweep
from orchestrator.clusters import Clusters, Record
from orchestrator.folders import own_folder, state_folder
from orchestrator.hosts import Hosts
from orchestrator.ledger import Ledger
from orchestrator.provider import Need, Order
from orchestrator.run import is_live
from orchestrator.vast import Vast
from pptasks.config import Settings
from pptasks.errors import NoSuchCluster, PPError
from pptasks.keys import Keys
from tests.fake_vast import FakeVast, Fault, offers

ROOT = Path(__file__).parents[2]
RUN, OTHER_RUN = "run-a1b2c3d4e5f6", "run-f6e5d4c3b2a1"
LATER = 4_000_000_000

HOLDER = """
import signal, sys, time
from filelock import FileLock
from orchestrator.folders import own_folder, state_folder
held = state_folder() / "runs" / sys.argv[1] / "held"
held.parent.mkdir(parents=True)
with FileLock(held):
    print("held", flush=True)
    if sys.argv[2] == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(120)
"""


class Group(click.Group):
    """As `pp` does it: an error is a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)


pp = Group(commands=[manage.ps, manage.down, manage.sweep])


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A state folder of its own; waits as short as the fake's limits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    monkeypatch.setattr(vastcalls, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(vastcalls, "MOST_WAIT_S", 0.1)
    monkeypatch.setattr(vastcalls, "PATIENCE_S", 1.5)
    monkeypatch.setattr(manage, "STOP_S", 10.0)
    monkeypatch.setitem(sweep.end.__kwdefaults__, "patience_s", 0.3)
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVast]:
    """Its limits hold over all commands of a test together."""
    with FakeVast(offers(30), scale=0.05) as fake:
        monkeypatch.setenv("VAST_API_KEY", fake.key)
        monkeypatch.setenv("PP_VAST_URL", fake.url)
        gaps_s = {kind: gap + 0.01 for kind, gap in fake.gaps_s.items()}  # between commands: a file's time is coarse
        monkeypatch.setitem(Vast.__init__.__kwdefaults__, "gaps_s", gaps_s)
        yield fake
        assert fake.too_fast == []


@pytest.fixture
def hold() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that holds a run, and with "stays" does not end when it is asked to."""
    holders = []

    def start(run: str = RUN, how: str = "goes") -> subprocess.Popen[str]:
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, run, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def call(*args: str) -> Result:
    result = CliRunner().invoke(pp, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def label(run: str = RUN, stage: int = 0, deadline: int = LATER, owner: str = "") -> str:
    return str(labels.fresh(owner or labels.owner(), run, stage, deadline))


def rent(fake: FakeVast, n: int, run: str = RUN) -> list[str]:
    """As a run does it: intended, created."""
    ledger, made = Ledger.of_user(), []
    with Vast(fake.key, fake.url, pace=own_folder(state_folder() / "pace")) as provider:
        for stage, offer in enumerate(provider.search(Need(8 * 10**9))[:n]):
            text = label(run, stage)
            ledger.intend(text, run=run, stage=stage, provider="vast", offer_id=offer.id, deadline=LATER)
            made.append(provider.create(offer, Order("image", text, "sleep 60", {}, 20)))
            ledger.created(text, made[-1])
    return made


def rent_as_others(fake: FakeVast) -> set[str]:
    texts = ["pptasks", "pptasks-evil", "pptasks-", None, "", "a machine", label(owner="ffffffff"), label() + "x",
             label().upper(), label(deadline=0, owner="ffffffff")]  # fmt: skip
    return {str(fake.rent_as_another(text).id) for text in texts}


def billing(fake: FakeVast) -> set[str]:
    return {str(machine.id) for machine in fake.billing}


def record(holder_pid: int, name: str = "blue", run: str = RUN, broker: str = "redis://127.0.0.1:1/0") -> Record:
    settings = Settings(run=run, broker=broker, secret="5e" * 32).to_env()
    return Record(name, run, holder_pid, "vast", "smollm2:135m", time.time(), 0, 0.36, 12.0, settings)


def test_sweep_ends_all_that_a_killed_run_has_left_and_nothing_else(
    fake: FakeVast, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    """Known by id, by label alone (the id was lost), and by label though the ledger knows nothing."""
    holder = hold()
    others = rent_as_others(fake)
    rent(fake, 3)
    lost = label(stage=3)
    Ledger.of_user().intend(lost, run=RUN, stage=3, provider="vast", offer_id="5", deadline=LATER)
    ours = billing(fake) - others
    ours |= {str(fake.rent_as_another(text).id) for text in (lost, label(stage=4), label(owner="ffffffff", deadline=9))}
    expired = str(fake.billing[-1].id)
    assert "used by living runs" not in call("sweep", "--dry-run").output

    assert call("sweep", "--yes").exit_code == 0  # the holder lives: only what is past its deadline goes
    assert billing(fake) == (others | ours) - {expired}

    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    shown = call("sweep", "--dry-run")
    assert (shown.exit_code, billing(fake)) == (0, (others | ours) - {expired})
    assert all(each in shown.output for each in ours - {expired})
    asked = call("sweep")
    assert (asked.exit_code, billing(fake)) == (2, (others | ours) - {expired})
    assert "--yes" in asked.output
    result = call("sweep", "--yes")
    assert result.exit_code == 0, result.output
    assert "ended: 5; they cost $0.00" in result.output
    assert billing(fake) == others
    assert Ledger.of_user().open_rows() == []
    assert call("sweep", "--yes").stdout == "nothing is left over\n"
    assert fake.key not in shown.output + asked.output + result.output


def test_sweep_all_ends_what_living_runs_use_and_says_so(
    fake: FakeVast, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    hold()
    others = rent_as_others(fake)
    rent(fake, 2)
    assert call("sweep", "--yes").stdout == "nothing is left over\n"
    result = call("sweep", "--all", "--yes")
    assert "2 of them are used by living runs, which will fail" in result.stderr
    assert (result.exit_code, billing(fake)) == (0, others)


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_a_person_is_asked(fake: FakeVast, answer: str, code: int) -> None:
    (only,) = rent(fake, 1)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from orchestrator.manage import sweep; sweep()"]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True) as asked:
        os.write(ours, f"{answer}\n".encode())
        _, told = asked.communicate(timeout=60)
    assert "End it? [y/N]" in told
    assert billing(fake) == ({only} if code else set())
    os.close(ours)
    os.close(theirs)


STILL_THERE = {"status": 200, "body": {"success": True}}
FAULTS = [
    Fault("destroy", status=429, headers={"Retry_After": "0"}), Fault("destroy", status=500, times=2),
    Fault("destroy", drop=True), Fault("destroy", drop=True, takes_effect=True), Fault("destroy", **STILL_THERE),
    Fault("destroy", status=500, takes_effect=True), Fault("list", status=500), Fault("show", status=502, skip=1),
    Fault("show", drop=True, times=2),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.drop}")
def test_a_fault_now_and_then_leaves_nothing(fake: FakeVast, fault: Fault) -> None:
    others = rent_as_others(fake)
    rent(fake, 2)
    fake.faults.append(replace(fault))
    result = call("sweep", "--yes")
    assert (result.exit_code, billing(fake), Ledger.of_user().open_rows()) == (0, others, []), result.output


@pytest.mark.parametrize("fault", [Fault("destroy", **STILL_THERE, times=99), Fault("destroy", status=500, times=99)],
                         ids=["still there", "500"])  # fmt: skip
def test_what_is_not_confirmed_is_told_with_the_command_that_ends_it(fake: FakeVast, fault: Fault) -> None:
    first, second = rent(fake, 2)
    fake.faults.append(replace(fault, match=first))
    result = call("sweep", "--yes", "--json")
    assert (result.exit_code, billing(fake)) == (1, {first})
    assert f"vastai destroy instance {first}" in result.stderr
    assert f"vastai destroy instance {second}" not in result.stderr
    told = json.loads(result.stdout)
    assert [[entry["id"] for entry in told[name]] for name in ("ended", "left")] == [[second], [first]]
    fake.faults.clear()
    assert call("sweep", "--yes").exit_code == 0
    assert billing(fake) == set()


def test_a_list_that_fails_is_not_an_empty_one(fake: FakeVast) -> None:
    """By the ledger machines can be ended all the same; that nothing else is left is not said."""
    fake.faults.append(Fault("list", status=500, times=10**6))
    nothing = call("sweep", "--yes")
    assert nothing.exit_code == 1
    assert "what is left is not known" in nothing.stderr
    assert "nothing is left" not in nothing.stdout
    rent(fake, 1)
    unknown = str(fake.rent_as_another(label()).id)
    result = call("sweep", "--yes")
    assert (result.exit_code, billing(fake), Ledger.of_user().open_rows()) == (1, {unknown}, [])
    fake.faults.clear()
    assert call("sweep", "--yes").exit_code == 0
    assert billing(fake) == set()


def test_an_id_that_another_machine_has_is_left_alone(fake: FakeVast) -> None:
    """Whether the list shows it or not."""
    taken = [str(fake.rent_as_another(text).id) for text in ("not ours", "pptasks-not-ours")]
    ledger = Ledger.of_user()
    for stage, instance_id in enumerate(taken):
        text = label(stage=stage)
        ledger.intend(text, run=RUN, stage=stage, provider="vast", offer_id="5", deadline=LATER)
        ledger.created(text, instance_id)
    for _ in range(2):
        call("sweep", "--yes")
        assert billing(fake) == set(taken)
        assert len(ledger.open_rows()) == 2
        fake.faults.append(Fault("list", status=500, times=10**6))


def test_a_create_that_was_lost_for_good_is_settled(fake: FakeVast) -> None:
    Ledger.of_user().intend(label(), run=RUN, stage=0, provider="vast", offer_id="5", deadline=LATER)
    result = call("sweep", "--yes")
    assert (result.exit_code, Ledger.of_user().open_rows()) == (0, [])
    assert "never came up" in result.stderr


def test_without_a_key_it_is_said_what_cannot_be_looked_at(fake: FakeVast, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = rent(fake, 2)
    monkeypatch.delenv("VAST_API_KEY")
    result = call("sweep", "--yes")
    assert (result.exit_code, billing(fake)) == (1, set(ids))
    assert "2 machines at vast cannot be looked at" in result.stderr
    assert "VAST_API_KEY" in result.stderr
    assert all(f"vastai destroy instance {each}" in result.stderr for each in ids)
    shown = call("ps")
    assert shown.exit_code == 0
    assert "vast.ai was not asked" in shown.stderr
    assert call("sweep", "--yes", "--api-key", fake.key).exit_code == 0
    assert billing(fake) == set()


def test_what_a_killed_run_has_left_on_this_machine() -> None:
    """Ended without any account; with the ledger, and by its label alone."""
    here = Hosts.local(2)
    for stage, offer in enumerate(here.search(Need(0, count=2))[:2]):
        text = label(stage=stage)
        if stage == 0:
            Ledger.of_user().intend(text, run=RUN, stage=0, provider="local", offer_id=offer.id, deadline=LATER)
        made = here.create(offer, Order("", text, "exec sleep 60", {}, 1))
        if stage == 0:
            Ledger.of_user().created(text, made)
    assert len(here.list(labels.PREFIX)) == 2
    assert json.loads(call("ps", "--json").stdout)["not_asked"].keys() == {"vast"}
    result = call("sweep", "--yes", "--json")
    assert result.exit_code == 0
    assert [entry["provider"] for entry in json.loads(result.stdout)["ended"]] == ["local"] * 2
    assert (here.list(""), Ledger.of_user().open_rows()) == ([], [])


def test_a_key_that_is_refused(fake: FakeVast, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, wrong = rent(fake, 9), "f" * 64
    monkeypatch.setenv("VAST_API_KEY", wrong)
    before = len(fake.log)
    result = call("sweep", "--yes")
    assert (result.exit_code, billing(fake)) == (1, set(ids))
    assert len(fake.log) - before <= 1 + sweep.THREADS
    assert wrong not in result.output
    assert wrong not in call("sweep", "--help").output + call("ps", "--help").output


def test_ps(fake: FakeVast, hold: Callable[..., subprocess.Popen[str]]) -> None:
    holder = hold()
    Clusters.of_user().write(record(holder.pid))
    Clusters.of_user().write(record(holder.pid, "red", OTHER_RUN))
    first, second = rent(fake, 2)
    dead, other = str(fake.rent_as_another(label(OTHER_RUN)).id), str(fake.rent_as_another("pptasks-evil").id)
    lost = label(stage=7)
    Ledger.of_user().intend(lost, run=RUN, stage=7, provider="vast", offer_id="5", deadline=LATER)
    result = call("ps", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert [(each["name"], each["state"]) for each in told["clusters"]] == [("blue", "ready"), ("red", "gone")]
    assert {each["id"]: (each["yours"], each["use"]) for each in told["machines"]} == {
        first: (True, "live"), second: (True, "live"), None: (True, "live"),
        dead: (True, "left over: its run has ended"), other: (False, "not yours"),
    }  # fmt: skip
    assert told["not_asked"] == {}
    shown = call("ps")
    for text in ("blue", "red", "ready", "gone"):
        assert text in shown.output
    assert "5e5e" not in result.output + shown.output
    assert fake.key not in result.output + shown.output


def test_ps_of_nothing() -> None:
    result = call("ps")
    assert result.exit_code == 0
    assert "no cluster is up" in result.stdout


def test_down_has_the_holder_end_it_and_ends_what_is_left(
    fake: FakeVast, hold: Callable[..., subprocess.Popen[str]], redis_url: str
) -> None:
    """This holder ends nothing: the machines and the keys are left to `pp down`."""
    holder = hold()
    others = rent_as_others(fake)
    rent(fake, 2)
    Clusters.of_user().write(record(holder.pid, broker=redis_url))
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{Keys(RUN).prefix}x", 1)
        client.set(f"{Keys(OTHER_RUN).prefix}x", 1)
        waiting = threading.Thread(target=holder.wait)  # or it would be a zombie, as no child of a `pp` ever is
        waiting.start()
        result = call("down")
        waiting.join()
        assert result.exit_code == 0, result.output
        assert (holder.returncode, billing(fake)) == (-signal.SIGTERM, others)
        assert client.keys() == [f"{Keys(OTHER_RUN).prefix}x".encode()]
    assert (Clusters.of_user().all(), Ledger.of_user().open_rows()) == ([], [])
    assert call("down").exit_code == NoSuchCluster.exit_code


def test_down_of_a_holder_that_was_killed(fake: FakeVast, hold: Callable[..., subprocess.Popen[str]]) -> None:
    """Its process id may be another's by now: that one is never sent a signal."""
    holder = hold()
    rent(fake, 2)
    bystander = hold(OTHER_RUN)
    Clusters.of_user().write(record(bystander.pid))
    holder.kill()
    holder.wait()
    assert call("down", "blue").exit_code == 0
    assert (billing(fake), Clusters.of_user().all(), bystander.poll()) == (set(), [], None)


def test_down_signals_nobody_but_the_holder(hold: Callable[..., subprocess.Popen[str]]) -> None:
    """The run is held, but the record's process began after the record was written."""
    hold()
    made = record(0)
    bystander = hold(OTHER_RUN)
    Clusters.of_user().write(replace(made, pid=bystander.pid, started_at=made.started_at - 60))
    result = call("down", "blue")
    assert result.exit_code == 1
    assert "not by process" in result.stderr
    assert bystander.poll() is None
    assert is_live(RUN)


def test_down_of_a_holder_that_does_not_end(
    fake: FakeVast, hold: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manage, "STOP_S", 1.0)
    monkeypatch.setattr(manage, "TELL_S", 0.3)
    holder = hold(how="stays")
    (first,) = rent(fake, 1)
    Clusters.of_user().write(record(holder.pid))
    result = call("down")
    assert (result.exit_code, holder.poll(), billing(fake)) == (1, None, {first})
    assert "waiting for blue" in result.stderr
    assert f"{first} may bill on" in result.stderr
    assert f"kill -9 {holder.pid}" in result.stderr
    assert [each.name for each in Clusters.of_user().all()] == ["blue"]


def test_down_all(fake: FakeVast) -> None:
    assert call("down", "--all").exit_code == 0
    for name, run in (("blue", RUN), ("red", OTHER_RUN)):
        rent(fake, 1, run)
        Clusters.of_user().write(record(1, name, run))
    assert call("down").exit_code == 2
    assert call("down", "--all", "blue").exit_code == 2
    stuck, _ = sorted(billing(fake))
    fake.faults.append(Fault("destroy", status=500, times=99, match=stuck))
    result = call("down", "--all")
    assert (result.exit_code, billing(fake)) == (1, {stuck})
    assert f"vastai destroy instance {stuck}" in result.stderr
    assert [each.name for each in Clusters.of_user().all()] == ["blue"]
    fake.faults.clear()
    assert call("down").exit_code == 0
    assert (billing(fake), Clusters.of_user().all()) == (set(), [])
