"""`python -m workers.node` as a rented machine runs it: a link, a worker with a Redis user of its own, its own home."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis
from celery import Celery

from orchestrator.acl import create_user
from orchestrator.broker import EmbeddedBroker
from pptasks.config import Settings
from pptasks.keys import Keys
from pptasks.membership import Lease
from pptasks.peers import LinkSettings, new_key, write_allow
from tests.conftest import WaitUntil
from tests.integration.hand import send, stock_app
from workers.child import Log

ROOT = Path(__file__).parents[2]
RUN, KEYS = "node", Keys("node")
READY_S = 60


class Node:
    """A node as a process in a session of its own, and what it writes."""

    def __init__(self, folder: Path, env: dict[str, str]):
        folder.mkdir()
        self.errors, self.env = folder / "stderr", env | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        with self.errors.open("wb") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-m", "workers.node"], cwd=ROOT, env=self.env,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def child(self, what: str) -> psutil.Process:
        (found,) = [p for p in self.process.children() if what in p.cmdline()]
        return found

    def health(self) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "workers.node", "--health"], cwd=ROOT, env=self.env, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr


class Run:
    """What an orchestrator has: a broker, a link that is served, a user and a key for each stage."""

    def __init__(self, broker: EmbeddedBroker, folder: Path, model: Path):
        self.broker, self.folder, self.nodes = broker, folder, list[Node]()
        self.settings = replace(
            Settings.of_this_machine(), model=str(model), num_stages=2, wire="f32", run=RUN,
            broker="redis://nowhere:1/0", secret=secrets.token_hex(32), lease=True, lap_deadline_s=5,
        )  # fmt: skip
        self.admin = redis.Redis.from_url(broker.url, decode_responses=True)
        self.link_secret, (key, _) = secrets.token_hex(32), new_key()
        self.peers = [new_key() for _ in range(2)]
        self.allow = folder / "allow"
        write_allow(self.allow, [peer for _, peer in self.peers])
        serving = LinkSettings(
            key, secret=self.link_secret, target=f"127.0.0.1:{broker.port}", allow=str(self.allow), die_with_parent="1"
        )
        self.server = subprocess.Popen(
            [sys.executable, "-m", "pptasks.link", "serve"], cwd=ROOT, env=os.environ | serving.to_environ(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.server.stdout
        self.ticket = json.loads(self.server.stdout.readline())["ticket"]
        self.hidden = {self.settings.secret, self.link_secret, self.ticket, *(key for key, _ in self.peers)}

    def start(self, stage: int, port: int = 0, **variables: str) -> Node:
        user = create_user(self.admin, RUN, stage, 2)
        self.hidden.add(user.password)
        worker = replace(self.settings, stage=stage, broker=user.login(self.settings.broker))
        link = LinkSettings(self.peers[stage][0], secret=self.link_secret, ticket=self.ticket, port=str(port))
        bare = {k: v for k, v in os.environ.items() if not k.startswith("PP_")}
        env = bare | worker.to_env() | link.to_environ() | variables
        env.pop("PP_CACHE")
        self.nodes.append(Node(self.folder / f"home{len(self.nodes)}", env))
        return self.nodes[-1]

    def log(self, stage: int) -> list[str]:
        return self.admin.lrange(KEYS.log(stage), 0, -1)

    def close(self) -> None:
        """Leave nothing behind, and see that nothing was shown that is secret."""
        try:
            for node in self.nodes:
                for secret in self.hidden:
                    assert secret not in node.said()
            assert not any(secret in line for secret in self.hidden for stage in range(2) for line in self.log(stage))
        finally:
            for node in self.nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait(5)
            self.server.terminate()
            self.server.communicate(timeout=5)
            self.admin.close()


@pytest.fixture
def run(goldens: Path, tmp_path: Path) -> Iterator[Run]:
    with EmbeddedBroker() as broker, Lease(broker.url, KEYS):
        run = Run(broker, tmp_path, goldens / "llama-tied")
        try:
            yield run
        finally:
            run.close()


@pytest.fixture
def app(run: Run) -> Iterator[Celery]:
    with stock_app(run.broker.url, KEYS.prefix) as app:
        yield app


def alive(process: psutil.Process) -> bool:
    """An orphan that has ended waits for process 1 of this machine to reap it."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_answer_outlive_their_links_and_leave_nothing(
    run: Run, app: Celery, goldens: Path, wait_until: WaitUntil
) -> None:
    expected = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    ask = {"tokens": expected["prompt_ids"], "max_tokens": 400}
    first, second = run.start(0, port=free_port()), run.start(1)
    alone = send(app, **ask).get(timeout=READY_S)["token_ids"]
    assert alone[: len(expected["greedy_ids"])] == expected["greedy_ids"]
    assert len(alone) > 100

    ours = [p for node in run.nodes for p in (node.process, *node.process.children(recursive=True))]
    assert len(ours) >= 6
    assert not any(secret in " ".join(p.cmdline()) for p in ours for secret in run.hidden)
    assert {os.getpgid(p.pid) for p in ours} == {first.process.pid, second.process.pid}
    assert "PP_LINK_KEY" not in first.child("worker").environ()
    assert "PP_SECRET" not in first.child("pptasks.link").environ()
    assert first.health() == (0, "stage 0: ready, ready\n")
    assert "needs to know the port" in second.health()[1]

    again = send(app, **ask)
    wait_until(lambda: run.admin.xlen(KEYS.stream(again.id)) > 20, READY_S, "some tokens")
    for node in run.nodes:
        node.child("pptasks.link").kill()
    assert again.get(timeout=READY_S)["token_ids"] == alone
    assert "the link has ended" in first.said()
    assert any("the link has ended" in line for line in run.log(0))

    at = time.monotonic()
    first.process.terminate()
    second.process.send_signal(signal.SIGINT)
    assert [node.process.wait(15) for node in run.nodes] == [0, 0]
    assert time.monotonic() - at < 12
    wait_until(lambda: not any(alive(p) for p in ours), what="all children are gone")
    assert first.health() == (1, "stage 0: no heartbeat\n")
    assert not run.admin.exists(KEYS.lock(0), KEYS.lock(1), KEYS.member(0), KEYS.member(1)), "they said goodbye"
    assert run.admin.acl_log() == [], "their users may do all that they need"


def test_a_wrong_model_is_named_here_and_on_the_broker(run: Run) -> None:
    run.settings = replace(run.settings, model="/no/such/model")
    node = run.start(1)
    assert node.process.wait(READY_S) == 1
    assert "/no/such/model" in node.said()
    assert any("/no/such/model" in line for line in run.log(1))
    assert 0 < run.admin.ttl(KEYS.log(1)) <= 3600


def test_without_a_ticket_the_broker_is_reached_as_it_is_named(run: Run) -> None:
    run.settings = replace(run.settings, model="/no/such/model", broker=run.broker.url)
    node = run.start(0, PP_LINK_TICKET="")
    assert node.process.wait(READY_S) == 1
    assert any("/no/such/model" in line for line in run.log(0))


def test_what_is_secret_is_blotted_out_of_the_log(run: Run) -> None:
    """An error may quote what it was given."""
    run.settings = replace(run.settings, model=f"/models/{run.settings.secret}")
    node = run.start(0)
    assert node.process.wait(READY_S) == 1
    assert "/models/***" in node.said()
    assert any("/models/***" in line for line in run.log(0))


def test_the_deadline_ends_all(run: Run, wait_until: WaitUntil) -> None:
    node = run.start(0, PP_DEADLINE=str(time.time() + 6))
    wait_until(lambda: run.admin.exists(KEYS.member(0)), READY_S, "a hello")
    children = node.process.children(recursive=True)
    assert node.process.wait(20) == 3
    wait_until(lambda: not any(alive(p) for p in children), what="all children are gone")
    late = run.start(0, PP_DEADLINE=str(time.time() - 1))
    assert late.process.wait(20) == 3


def test_a_run_that_is_gone_ends_the_node(run: Run, wait_until: WaitUntil) -> None:
    node = run.start(0)
    wait_until(lambda: run.admin.exists(KEYS.name("pp-stage-0")), READY_S, "it is ready")
    write_allow(run.allow, [])  # its link is cut, for good
    assert node.process.wait(40) == 1
    assert "the run is gone" in node.said()


def test_a_killed_worker_is_told(run: Run, wait_until: WaitUntil) -> None:
    node = run.start(0)
    wait_until(lambda: run.admin.exists(KEYS.member(0)), READY_S, "a hello")
    node.child("worker").kill()
    assert node.process.wait(20) == 1
    assert any("SIGKILL" in line for line in run.log(0))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STAGE": ""}, "STAGE is not set"),
        ({"PP_SECRET": ""}, "PP_SECRET is not set"),
        ({"PP_DEADLINE": "soon"}, "PP_DEADLINE is 'soon'"),
        ({"PP_LINK_KEY": "abc"}, "PP_LINK_KEY must be"),
        ({"PP_LINK_TICKET": "abc"}, "PP_LINK_TICKET is not a ticket"),
    ],
)
def test_an_environment_that_does_not_hold(run: Run, variables: dict[str, str], message: str) -> None:
    node = run.start(0, **variables)
    assert node.process.wait(20) == 2
    assert message in node.said()
    assert "Traceback" not in node.said()


def test_a_log_is_bounded_and_survives_a_broker_that_is_away(capfd: pytest.CaptureFixture[str]) -> None:
    async def talk(broker: EmbeddedBroker) -> None:
        log, pipe = Log("log", ["hunter22"]), asyncio.StreamReader(limit=1000)
        sending = asyncio.create_task(log.keep_sending(broker.url))
        broker.stop()
        for i in range(300):
            pipe.feed_data(b"line %d\n" % i)
        pipe.feed_data(b"x" * 5000 + b"\nmy password is hunter22\n")
        pipe.feed_eof()
        await log.copy(pipe)
        await asyncio.sleep(1.5)  # the time of an attempt to send
        with broker:
            log.close()
            await sending
            with redis.Redis.from_url(broker.url, decode_responses=True) as client:
                kept = client.lrange("log", 0, -1)
        assert len(kept) == 200
        assert (kept[0], kept[-1]) == ("line 102", "my password is ***")
        assert kept[-2].startswith("(a line of more than")

    with EmbeddedBroker() as broker:
        asyncio.run(talk(broker))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 302
    assert not [line for line in said if "hunter22" in line]


INIT = """
import ctypes, os, subprocess, sys, time
from workers.node import be_init
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to us, as they do to process 1
be_init()
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
subprocess.run(["sh", "-c", "sleep 0.1 & echo $!"])
print("up", flush=True)
time.sleep(60)
"""


def test_process_1_forwards_signals_and_reaps_orphans(wait_until: WaitUntil) -> None:
    with subprocess.Popen([sys.executable, "-c", INIT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as init:
        assert init.stdout
        orphan = int(init.stdout.readline())
        assert init.stdout.readline() == "up\n"
        wait_until(lambda: not psutil.pid_exists(orphan), what="the orphan is reaped")
        init.terminate()
        assert init.wait(5) == 7
