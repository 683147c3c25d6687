"""Machines that join a run: separate homes, real links on loopback, a real broker; and those that must not."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis
from redis.exceptions import NoPermissionError
from redis.lock import Lock

from orchestrator.acl import create_guest, drop_users, guest_name
from orchestrator.broker import EmbeddedBroker
from orchestrator.dealing import deal
from orchestrator.joining import Table
from orchestrator.run import Options, Run
from orchestrator.stages import Stages
from pptasks.config import Settings
from pptasks.connect import connect
from pptasks.errors import LinkError, StageFailed
from pptasks.guests import Assignment, Guest
from pptasks.models import open_model
from tests.conftest import WaitUntil
from tests.integration.hand import send, stock_app
from tests.integration.test_acl import FOREIGN, KEYS, RUN

ROOT = Path(__file__).parents[2]
LONG_S = 90.0


class Machine:
    """`workers.join` in a session and a home of its own, and what it says."""

    def __init__(self, home: Path, ticket: str, **variables: str):
        home.mkdir()
        self.errors = home / "stderr"
        folders = {name: str(home / name) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")}
        env = {k: v for k, v in os.environ.items() if not k.startswith("PP_")}
        env |= {"HOME": str(home), "PP_INVITATION": ticket} | folders | variables
        with self.errors.open("wb") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-m", "workers.join"], cwd=ROOT, env=env,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def ended(self, timeout: float = LONG_S) -> int:
        return self.process.wait(timeout)


class Joining:
    """A run that waits for `seats` machines, and the machines of a test."""

    def __init__(self, run: Run, folder: Path, seats: int):
        self.run, self.folder, self.machines = run, folder, list[Machine]()
        self.table = Table(run, run.serve())
        self.invitations = self.table.invite(seats)
        self.hidden = {run.settings.secret, self.table._gate.secret}
        for invited in self.invitations:
            self.hidden |= {str(invited), invited.link_key, invited.password, invited.ticket}

    def start(self, seat: int, *, shares_cache: bool = True, ticket: str = "", **variables: str) -> Machine:
        """A machine with the ticket of a seat. shares_cache: of compiled kernels, with those of other tests."""
        if shares_cache:
            variables = {"XDG_CACHE_HOME": str(self.folder.parent / "cache")} | variables
        variables = {"PP_JOIN_TRUST": "1"} | variables  # the models of these tests are files
        home = self.folder / f"home{len(self.machines)}"
        self.machines.append(Machine(home, ticket or str(self.invitations[seat - 1]), **variables))
        return self.machines[-1]

    def is_ready(self, seat: int) -> bool:
        guest = self.table.guests().get(seat)
        return guest is not None and guest.is_ready

    def close(self) -> None:
        """Leave nothing behind, and see that nothing was shown that is secret."""
        try:
            for machine in self.machines:
                assert not [secret for secret in self.hidden if secret in machine.said()]
                assert f'File "{ROOT / "workers"}' not in machine.said(), "no traceback"
        finally:
            for machine in self.machines:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(machine.process.pid, signal.SIGKILL)
                machine.process.wait(5)


@pytest.fixture
def make(goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Joining]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = replace(Settings.of_this_machine(), model=str(goldens / "llama-tied"), wire="f32", lap_deadline_s=5)
    with contextlib.ExitStack() as stack:

        def make(seats: int) -> Joining:
            run = stack.enter_context(Run(settings, Options(link="iroh")))
            joining = Joining(run, tmp_path, seats)
            stack.callback(joining.close)
            return joining

        yield make


@contextlib.contextmanager
def waits(table: Table, seen: list[set[int]]) -> Iterator[Future[dict[int, Guest]]]:
    """`table.wait` beside the block, and no longer than that. seen: who was there, at each change."""
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise LinkError("the test is over")

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(table.wait, lambda guests: seen.append(set(guests)), check)
        finally:
            over.set()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_three_machines_join_one_leaves_another_comes_and_they_answer(
    make: Callable[[int], Joining], goldens: Path, wait_until: WaitUntil
) -> None:
    joining, expected = make(3), json.loads((goldens / "llama-tied" / "expected.json").read_text())
    run, table, seen = joining.run, joining.table, list[set[int]]()
    with waits(table, seen) as waiting:
        first, leaver = (joining.start(seat, shares_cache=False) for seat in (1, 2))
        wait_until(lambda: joining.is_ready(1) and joining.is_ready(2), LONG_S, "two are ready")
        wait_until(lambda: "seat 1 of 3 is ready; waiting for 1 other" in first.said(), what="it is told")

        twin = joining.start(1)
        assert twin.ended() == 1
        assert "seat 1 is taken by" in twin.said()

        leaver.process.send_signal(signal.SIGINT)
        assert leaver.ended(10) == 0
        assert set(table.guests()) == {1}, "it said goodbye"
        assert not run.redis.exists(run.keys.guest_lock(2))
        second, third = (joining.start(seat, shares_cache=False) for seat in (2, 3))
        guests = waiting.result(LONG_S)
    assert first.process.poll() is None, "its twin has not put it out"
    assert [{1, 2} in seen, seen[-1]] == [True, {1, 2, 3}]

    model = open_model(run.settings.model, cache=run.settings.cache)
    dealt = deal(model, run.settings, guests)
    settings = replace(run.settings, num_stages=3, split=dealt.split)
    table.assign(dealt, run.settings)
    assert {stage: guest.seat for stage, guest in table.dealt.items()} == dict(enumerate(dealt.seats))
    assert not [name for name in run.redis.acl_users() if "-g" in str(name)], "their guests' users are gone"
    stages = Stages(run.redis, dealt.plan, settings)
    wait_until(lambda: stages.refresh() and stages.are_ready(), LONG_S, "three stages are ready")
    late = joining.start(1)
    assert late.ended() == 1
    assert "peer not allowed" in late.said(), "a used ticket opens nothing, not even the link"
    with stock_app(run.settings.broker, run.keys.prefix) as app:
        answer = send(app, tokens=expected["prompt_ids"], max_tokens=len(expected["greedy_ids"]))
        assert answer.get(timeout=LONG_S)["token_ids"] == expected["greedy_ids"]

    machines = [first, second, third]
    assert f"stage {dealt.seats.index(1)}, blocks [" in first.said()
    ours = [p for m in machines for p in (m.process, *m.process.children(recursive=True))]
    assert not [secret for p in ours for secret in joining.hidden if secret in " ".join(p.cmdline())]
    worker = next(p for p in ours if "worker" in p.cmdline())
    assert "PP_INVITATION" not in worker.environ()
    assert worker.environ()["PP_CACHE"].startswith(str(joining.folder / "home")), "its own, not the owner's"
    assert run.redis.acl_log() == [], "their users may do all that they need"
    for machine in machines:
        machine.process.terminate()
    assert [machine.ended(15) for machine in machines] == [0, 0, 0]
    wait_until(lambda: not any(alive(p) for p in ours), what="all children are gone")


@pytest.mark.parametrize("when", ["", "the link is up", "seat 1 is taken", "GB/s"])
def test_a_signal_ends_it_at_any_time(make: Callable[[int], Joining], wait_until: WaitUntil, when: str) -> None:
    joining = make(1)
    machine = joining.start(1)
    wait_until(lambda: (when in machine.said()) if when else machine.process.children(), LONG_S, when or "it runs")
    ours = [machine.process, *machine.process.children(recursive=True)]
    machine.process.terminate()
    assert machine.ended(10) == 0
    assert not joining.run.redis.exists(joining.run.keys.guest(1), joining.run.keys.guest_lock(1))
    wait_until(lambda: not any(alive(p) for p in ours), what="all children are gone")


def test_the_seat_of_a_machine_that_was_killed_is_free_soon(
    make: Callable[[int], Joining], wait_until: WaitUntil
) -> None:
    joining = make(1)
    machine = joining.start(1)
    wait_until(lambda: joining.table.guests(), LONG_S, "it is there")
    os.killpg(machine.process.pid, signal.SIGKILL)
    keys = joining.run.keys
    wait_until(lambda: not joining.run.redis.exists(keys.guest_lock(1), keys.guest(1)), 10, "its seat is free")
    joining.start(1)
    wait_until(lambda: joining.is_ready(1), LONG_S, "the next one is ready")


def test_a_dismissed_machine_is_out_at_once_and_alone(make: Callable[[int], Joining], wait_until: WaitUntil) -> None:
    joining = make(2)
    out, other = joining.start(1), joining.start(2)
    wait_until(lambda: joining.is_ready(1) and joining.is_ready(2), LONG_S, "both are ready")
    joining.table.dismiss(1)
    users = [client["user"] for client in joining.run.redis.client_list()]
    assert guest_name(joining.run.settings.run, 1) not in users
    assert guest_name(joining.run.settings.run, 2) in users
    assert out.ended(20) == 1
    assert "dismissed" in out.said()
    again = joining.start(1)
    assert again.ended(30) == 1
    assert "the run cannot be reached" in again.said()
    assert other.process.poll() is None
    assert joining.is_ready(2)


def test_a_run_that_is_gone_ends_a_machine_that_waits(make: Callable[[int], Joining], wait_until: WaitUntil) -> None:
    joining = make(1)
    machine = joining.start(1)
    wait_until(lambda: joining.is_ready(1), LONG_S, "it is ready")
    joining.run._stack.close()
    assert machine.ended(30) == 1
    assert re.search("the run is gone|the run cannot be reached any more", machine.said())


@pytest.mark.parametrize("damage", ["cut", "altered", "none"])
def test_a_ticket_that_is_none(make: Callable[[int], Joining], damage: str) -> None:
    joining = make(1)
    ticket = str(joining.invitations[0])
    middle = len(ticket) // 2
    damaged = {
        "cut": ticket[:-9],
        "altered": ticket[:middle] + ("a" if ticket[middle] != "a" else "b") + ticket[middle + 1 :],
        "none": "hunter22",
    }[damage]
    machine = joining.start(1, ticket=damaged)
    joining.hidden.add(damaged)
    assert machine.ended(20) == 2
    assert "copy all of the line" in machine.said()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LD_PRELOAD": "/tmp/x.so"}, "it would set 'LD_PRELOAD'"),
        ({"PP_CACHE": "/tmp/x"}, "it would set 'PP_CACHE'"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "it would set 'HF_ENDPOINT'"),
        ({"PP_BROKER": "filesystem:///tmp"}, "its broker is no redis://"),
        ({"PP_RUN": "other"}, "another run"),
    ],
)
def test_an_assignment_that_the_machine_refuses(
    make: Callable[[int], Joining], wait_until: WaitUntil, variables: dict[str, str], message: str
) -> None:
    joining = make(1)
    run, machine = joining.run, joining.start(1)
    given = json.loads(Assignment(replace(run.settings, num_stages=1, stage=0, split="5"), "0f" * 32).to_json())
    given["variables"] |= {"PP_BROKER": "redis://u:p@h:1/0"} | variables
    run.redis.set(run.keys.guest_stage(1), json.dumps(given))
    assert machine.ended() == 2
    assert message in machine.said()
    guest = joining.table.guests()[1]
    assert guest.phase == "failed"
    assert message in guest.error
    assert not run.redis.exists(run.keys.lock(0), run.keys.member(0)), "no worker was started"


def test_the_owner_is_told_which_machine_refuses(make: Callable[[int], Joining], goldens: Path) -> None:
    joining = make(1)
    joining.start(1)
    guests = joining.table.wait(lambda guests: None, joining.run.check)
    dealt = deal(open_model(joining.run.settings.model, cache=joining.folder), joining.run.settings, guests)
    with pytest.raises(
        StageFailed, match=rf"{guests[1].host} \(seat 1\) refuses stage 0: .*MODEL is no short printable text"
    ):
        joining.table.assign(dealt, replace(joining.run.settings, model="a\nb"))


def test_a_machine_that_does_not_trust_the_owner_opens_no_file_for_it(make: Callable[[int], Joining]) -> None:
    joining = make(1)
    run, machine = joining.run, joining.start(1, PP_JOIN_TRUST="")
    guests = joining.table.wait(lambda guests: None, run.check)
    dealt = deal(open_model(run.settings.model, cache=joining.folder), run.settings, guests)
    with pytest.raises(StageFailed, match=r"\(seat 1\) refuses stage 0: .*a file of this machine .*PP_JOIN_TRUST=1"):
        joining.table.assign(dealt, run.settings)
    assert machine.ended() == 2
    assert "join with PP_JOIN_TRUST=1" in machine.said()
    assert not run.redis.exists(run.keys.lock(0), run.keys.member(0)), "no worker was started"


def test_a_check_that_raises_ends_the_wait(make: Callable[[int], Joining]) -> None:
    def check() -> None:
        raise LinkError("the link has ended")

    with pytest.raises(LinkError):
        make(1).table.wait(lambda guests: None, check)


# ---- what a guest's user may do ----


@pytest.fixture(scope="module")
def admin() -> Iterator[redis.Redis]:
    with EmbeddedBroker() as broker, redis.Redis.from_url(broker.url) as client:
        client.url = broker.url
        yield client


@pytest.fixture(scope="module")
def guest(admin: redis.Redis) -> Iterator[redis.Redis]:
    with connect(create_guest(admin, RUN, 1).login(admin.url)) as client:
        yield client


OF_OTHERS: dict[str, Callable[[redis.Redis], object]] = FOREIGN | {
    "another seat's record": lambda c: c.get(KEYS.guest(2)),
    "taking another seat": lambda c: Lock(c, KEYS.guest_lock(2), timeout=5, blocking=False).acquire(),
    "another seat's assignment": lambda c: c.get(KEYS.guest_stage(2)),
    "its own assignment": lambda c: c.set(KEYS.guest_stage(1), "{}"),
    "the count": lambda c: c.set(KEYS.guests, "9/9"),
    "a stage's record": lambda c: c.get(KEYS.member(0)),
    "a stage's lock": lambda c: c.get(KEYS.lock(1)),
    "a stage's log": lambda c: c.rpush(KEYS.log(1), "x"),
    "a request": lambda c: c.lpush(f"{KEYS.prefix}stage0", "x"),
    "a transaction": lambda c: c.execute_command("MULTI"),
    "a list as its record": lambda c: c.rpush(KEYS.guest(1), "x"),
    "a channel of its own": lambda c: c.publish(f"{KEYS.prefix}guest:1", "x"),
}


@pytest.mark.parametrize("what", OF_OTHERS)
def test_a_guest_may_not_touch(guest: redis.Redis, what: str) -> None:
    with pytest.raises(NoPermissionError):
        OF_OTHERS[what](guest)


def test_a_guest_may_say_that_it_is_there(admin: redis.Redis, guest: redis.Redis) -> None:
    lock = Lock(guest, KEYS.guest_lock(1), timeout=5, blocking=False, thread_local=False)
    assert lock.acquire()
    lock.extend(5, replace_ttl=True)
    assert guest.set(KEYS.guest(1), Guest(1, "host", "wait").to_json(), px=5000)
    assert guest.get(KEYS.guest_stage(1)) is guest.get(KEYS.guests) is None
    assert guest.exists(KEYS.lease) == 0
    assert guest.delete(KEYS.guest(1)) == 1
    lock.release()
    assert guest_name(RUN, 1) in [str(name) for name in admin.acl_users()]


def test_the_users_of_all_seats_go_with_their_run(admin: redis.Redis) -> None:
    for run in ("gone", "gone-1"):
        for seat in (1, 12):
            create_guest(admin, run, seat)
    with connect(create_guest(admin, "gone", 2).login(admin.url)) as client, client.client() as held:
        assert held.ping()
        assert drop_users(admin, "gone") == 3
        with pytest.raises((redis.ConnectionError, redis.AuthenticationError)):
            held.ping()
    assert drop_users(admin, "gone-1") == 2
