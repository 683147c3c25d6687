"""`pp up` and what uses it: clusters that stay, on this machine, rented, and of machines that join."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import WaitUntil
from tests.fake_vast import FakeVast, offers
from tests.integration.run import ROOT, Command, Ended, assert_one_line, bound
from tests.integration.test_hosts import Server
from tests.integration.test_smoke_run import image

NODES = ".local/state/pptasks/nodes/*/pptasks-*"  # in a host's home
TOKENS = ("--tokens", "1,2,3", "--max-tokens", "8")


class Up(Command):
    """A `pp up` in the foreground. `pp` runs another command beside it, with the same state folder."""

    def __init__(self, folder: Path, *argv: str, **environ: str):
        super().__init__(folder, "up", *argv, **environ)
        self.environ = environ

    def said(self) -> str:
        """Its stdout so far; the last call gets the rest."""
        return self.process.stdout.readline().decode() if self.process.stdout else ""

    def pp(self, *argv: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        return pp_in(self.state, *argv, timeout_s=timeout_s, **self.environ)


def pp_in(state: Path, *argv: str, timeout_s: float = 60.0, **environ: str) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if not k.startswith("PP_")} | environ
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *argv], cwd=ROOT, env=env | {"XDG_STATE_HOME": str(state)},
        capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, goldens: Path) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    with Up(folder, "--name", "here", "--verify", "--wire", "f32", "--model", str(goldens / "llama-tied")) as up:
        assert "cluster here is ready" in up.said()
        yield up
        ports = up.ports()
        up.signal(signal.SIGINT)
        ended = up.wait()
    assert (ended.code, ended.kept, bound(ports)) == (0, (), set())
    assert "cluster here is down" in ended.stderr
    assert not list((up.state / "pptasks" / "clusters").glob("*.json"))


def test_run_gives_what_a_run_of_its_own_gives(up: Up, goldens: Path, tmp_path: Path) -> None:
    model = ("--wire", "f32", "--model", str(goldens / "llama-tied"))
    alone = json.loads(pp_in(tmp_path, "run", "--json", "-q", *TOKENS, *model).stdout)
    done = up.pp("run", "--cluster", "here", "--json", *TOKENS)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["token_ids"] == alone["token_ids"]
    assert report["plan"] == alone["plan"]
    assert "Traceback" not in done.stderr


def test_verify_and_bench_use_it_too(up: Up) -> None:
    verified = up.pp("verify", "--cluster", "here", "--json", *TOKENS)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["verification"]["passed"] is True
    bench = up.pp("bench", "--cluster", "here", "--repeat", "2", "--json", *TOKENS)
    assert bench.returncode == 0, bench.stderr
    assert len(json.loads(bench.stdout)["runs"]) == 2


def test_ps_shows_it_and_its_record_is_its_owners_alone(up: Up) -> None:
    shown = json.loads(up.pp("ps", "--json").stdout)
    (cluster,) = shown["clusters"]
    assert (cluster["name"], cluster["state"], cluster["where"]) == ("here", "ready", "local")
    assert len(shown["machines"]) == 2
    (record,) = (up.state / "pptasks" / "clusters").glob("*.json")
    assert record.stat().st_mode & 0o777 == 0o600
    secret = json.loads(record.read_text())["settings"]["PP_SECRET"]
    assert secret not in json.dumps(shown)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "hi", "--cluster", "there"), ("there", "here")),
        (("run", "hi", "--cluster", "here", "--stages", "3"), ("--stages", "--cluster")),
        (("up", "--name", "here", "-q"), ("here", "pp down here")),
        (("up", "--name", "../x"), ("../x",)),
        (("up", "--vastai", "--join", "2"), ("--vastai", "--join")),
        (("up", "--join", "2", "--stages", "3"), ("--join 2", "--stages 3")),
        (("up", "--vastai", "--detach"), ("--yes",)),
        (("join", "pp1abc"), ("ticket",)),
        (("join",), ("TICKET",)),
        (("down", "nothing"), ("nothing", "here")),
    ],
)
def test_what_cannot_be_is_told(up: Up, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = up.pp(*argv)
    assert done.returncode == 2, done
    assert_one_line(done.stderr, *words)


def test_detached_it_stays_until_pp_down(tmp_path: Path, goldens: Path, wait_until: WaitUntil) -> None:
    model = ("--model", str(goldens / "llama-tied"))
    up = pp_in(tmp_path, "up", "--detach", "--json", *model)
    assert up.returncode == 0, up.stderr
    record = json.loads(up.stdout)
    assert (record["name"], record["where"]) == ("default", "local")
    answer = pp_in(tmp_path, "run", "--cluster", "default", "--json", *TOKENS)
    assert answer.returncode == 0, answer.stderr
    down = pp_in(tmp_path, "down")
    assert down.returncode == 0, down.stderr
    wait_until(lambda: not lives(record["pid"]), 10, "the end of who held it")
    gone = pp_in(tmp_path, "run", "--cluster", "default", *TOKENS)
    assert gone.returncode == 2
    assert_one_line(gone.stderr, "default", "pp up")


def test_detached_and_failing_it_says_why(tmp_path: Path) -> None:
    up = pp_in(tmp_path, "up", "--detach", "--model", "no/such/model.gguf")
    assert up.returncode == 1
    assert_one_line(up.stderr, "no/such/model.gguf")


def test_a_stage_that_is_lost_is_replaced(tmp_path: Path, goldens: Path, wait_until: WaitUntil) -> None:
    with Up(tmp_path, "--wire", "f32", "--timeout", "60", "--model", str(goldens / "llama-tied")) as up:
        assert "is ready" in up.said()
        before = json.loads(up.pp("run", "--cluster", "default", "--json", *TOKENS).stdout)
        node = up.workers()[1]
        node.kill()
        wait_until(lambda: "taking another machine" in up.stderr, 40, "another machine")
        again = lambda: up.pp("run", "--cluster", "default", "--json", *TOKENS)  # noqa: E731
        wait_until(lambda: again().returncode == 0, 60, "an answer")
        after = json.loads(again().stdout)
        assert after["token_ids"] == before["token_ids"]
        assert after["stages"][0]["pid"] == before["stages"][0]["pid"]
        assert after["stages"][1]["pid"] != before["stages"][1]["pid"]
        up.signal(signal.SIGTERM)
        assert up.wait().code == 0


def test_rented_it_is_named_used_and_ended(tmp_path: Path, smollm2_gguf: Path) -> None:
    with FakeVast(offers(3), start=image(), scale=0.0) as fake:
        account = {"VAST_API_KEY": fake.key, "PP_VAST_URL": fake.url}
        argv = ("--vastai", "--yes", "--relay", "none", "--name", "rented", "--model", "smollm2:135m", "--json")
        with Up(tmp_path, *argv, **account) as up:
            record = json.loads(up.said())
            assert record["price_usd_hour"] > 0.1
            answer = up.pp("run", "--cluster", "rented", "--json", "--max-tokens", "4", "Say hello")
            assert answer.returncode == 0, answer.stderr
            assert len(fake.billing) == 2
            down = up.pp("down", "rented")
            assert down.returncode == 0, down.stderr
            ended = up.wait()
        assert (ended.code, fake.billing) == (0, [])
        assert fake.key not in ended.stderr + answer.stderr + down.stderr + down.stdout


def test_hosts_by_ssh_answer_and_are_left_as_they_were(tmp_path: Path, goldens: Path) -> None:
    if (ssh := shutil.which("ssh")) is None:
        pytest.skip("needs the ssh client of OpenSSH")
    server = Server(tmp_path)
    try:
        client = tmp_path / "bin" / "ssh"  # the system's, with a configuration of this test
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nexec {ssh} -F {server.folder / "config"} "$@"\n')
        client.chmod(0o755)
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of compiled kernels
        node = f"env PYTHONPATH={ROOT} XDG_CACHE_HOME={cache} {sys.executable} -m workers.node"
        argv = ("--hosts", "a,user", "--node-command", node, "--relay", "none", "--wire", "f32", "--json")
        path = f"{client.parent}:{os.environ['PATH']}"
        with Up(tmp_path, *argv, "--model", str(goldens / "llama-tied"), PATH=path) as up:
            record = json.loads(up.said())
            assert (record["where"], record["price_usd_hour"]) == ("ssh", 0)
            done = up.pp("run", "--cluster", "default", "--json", *TOKENS)
            assert done.returncode == 0, done.stderr
            assert len(json.loads(done.stdout)["token_ids"]) == 8
            assert [len(list((server.homes / host).glob(NODES))) for host in ("a", "user")] == [1, 1]
            up.signal(signal.SIGINT)
            assert up.wait().code == 0
        assert not list(server.homes.glob(f"*/{NODES}"))
    finally:
        server.close()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Guest:
    """A `pp join` in a home of its own."""

    def __init__(self, folder: Path, ticket: str):
        folder.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PP_", "XDG_"))}
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of compiled kernels
        self.log = folder / "log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.cli", "join"], cwd=ROOT,
                env=env | {"HOME": str(folder), "XDG_CACHE_HOME": cache, "PP_INVITATION": ticket, "PP_JOIN_TRUST": "1"},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def test_machines_join_are_dealt_stages_and_answer(tmp_path: Path, goldens: Path, wait_until: WaitUntil) -> None:
    argv = ("--join", "3", "--relay", "none", "--wire", "f32", "--model", str(goldens / "llama-tied"), "--json")
    with Up(tmp_path, *argv) as up:
        tickets = json.loads(up.said())["tickets"]
        guests = [Guest(tmp_path / f"home{i}", ticket) for i, ticket in enumerate(tickets)]
        try:
            wait_until(lambda: "3 of 3 machines" in up.stderr or "2 of 3 machines" in up.stderr, 60, "guests")
            record = json.loads(up.said())
            assert (record["where"], record["price_usd_hour"]) == ("join", 0)
            done = up.pp("run", "--cluster", "default", "--json", *TOKENS)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert len(report["stages"]) == 3
            alone = pp_in(tmp_path, "run", "--json", "-q", *TOKENS, *argv[4:-1])
            assert report["token_ids"] == json.loads(alone.stdout)["token_ids"]
            assert guests[0].end() == 0
            ended: Ended = up.wait()
            assert ended.code == 1
            assert_one_line(ended.stderr, "stage", "lost")
            assert all(guest.process.wait(40) is not None for guest in guests)
        finally:
            for guest in guests:
                guest.process.kill()
                guest.process.wait()
        hidden = [ticket for ticket in tickets if ticket in ended.stderr + "".join(g.log.read_text() for g in guests)]
        assert hidden == []
        assert all(re.search(r"stage \d, blocks \[", guest.log.read_text()) for guest in guests)


def test_detached_and_failing_late_it_says_why_though_its_files_are_gone(tmp_path: Path, goldens: Path) -> None:
    up = pp_in(tmp_path, "up", "--detach", "--deadline", "1s", "--model", str(goldens / "llama-tied"))
    assert up.returncode == 1
    assert_one_line(up.stderr, "deadline")
    assert not list((tmp_path / "pptasks" / "clusters").glob("*.err"))
