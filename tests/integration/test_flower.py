"""`pp up --flower`: workers and requests are seen, tokens are not, and its memory is bounded."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.flower import MAX_TASKS
from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.request import Request
from tests.conftest import WaitUntil
from tests.integration.run import LONG_S, Command, bound

WAVE = 250  # requests at once
GROWTH_MB = 25.0  # most that Flower grows by until it holds its 1000 tasks; 5 were measured
FULL_MB = 10.0  # and in 500 requests more, while it forgets as many as it learns; 2 were measured


class Watched(Command):
    """A `pp up --flower` that is ready."""

    def __init__(self, folder: Path, goldens: Path):
        super().__init__(folder, "up", "--flower", "--json", "--model", str(goldens / "llama-tied"))

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr
        told = json.loads(line)["flower"]
        self.url, self.password = told["url"], told["password"]
        self.web = httpx.Client(base_url=self.url, auth=(told["user"], told["password"]), timeout=60)

    @property
    def flower(self) -> psutil.Process:
        (process,) = (p for p in self.processes() if "orchestrator.flower" in p.cmdline())
        return process

    @property
    def rss_mb(self) -> float:
        return self.flower.memory_info().rss / 1e6

    def client(self) -> Client:
        environ = next(e for e in self.environs() if e.get("STAGE") == "0")
        return Client(make_app(Settings.from_env({k: v for k, v in environ.items() if k != "STAGE"})))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, goldens: Path) -> Iterator[Watched]:
    with Watched(tmp_path_factory.mktemp("flower"), goldens) as watched:
        watched.until_ready()
        with watched.web:
            yield watched
        ports = watched.ports()
        watched.signal(signal.SIGINT)
        ended = watched.wait()  # which asserts that no process is left
    assert (ended.code, ended.kept, bound(ports)) == (0, (), set())


def test_only_who_has_the_password_gets_in(watched: Watched) -> None:
    assert httpx.get(f"{watched.url}/api/tasks").status_code == 401
    assert httpx.get(f"{watched.url}/", auth=("pp", "x" * 24)).status_code == 401
    assert watched.web.get("/workers").status_code == 200
    listening = {c.laddr.ip for c in watched.flower.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_its_password_is_told_once_and_nowhere_else(watched: Watched) -> None:
    assert watched.stderr.count(watched.password) == 1
    assert not [p for p in watched.processes() if watched.password in " ".join(p.cmdline())]
    assert not [name for name, text in watched.logs().items() if watched.password in text]
    environ = watched.flower.environ()
    assert "PP_BROKER" in environ
    assert "PP_SECRET" not in environ


def test_it_sees_workers_and_requests_and_its_memory_is_bounded(watched: Watched, wait_until: WaitUntil) -> None:
    def workers() -> set[str]:
        return {name.split("@")[0] for name in watched.web.get("/api/workers", params={"refresh": "1"}).json()}

    wait_until(lambda: workers() == {"pp-stage-0", "pp-stage-1"}, LONG_S, "Flower sees the workers")
    client = watched.client()

    def tasks() -> dict[str, dict[str, str]]:
        return watched.web.get("/api/tasks", params={"limit": 2 * MAX_TASKS}).json()

    def wave() -> list[str]:
        """Requests from the first to the last that Flower has seen end."""
        ids = [client.submit(Request(tokens=(1, 2, 3), max_tokens=8)) for _ in range(WAVE)]
        assert all(len(client.result(id_, timeout_s=LONG_S)["token_ids"]) == 8 for id_ in ids)
        wait_until(lambda: tasks().get(ids[-1], {}).get("state") == "SUCCESS", LONG_S, "the last request is seen")
        return ids

    ids = wave()
    seen = tasks()
    assert {seen[id_]["state"] for id_ in ids} == {"SUCCESS"}
    assert {task["name"] for task in seen.values()} == {"pptasks.generate"}
    assert len(seen) == WAVE  # and not one for each of their hops and tokens
    memory = [watched.rss_mb]
    for _ in range(5):
        wave()
        memory.append(watched.rss_mb)
    print("Flower's memory, MB, after each", WAVE, "requests:", *(f"{mb:.1f}" for mb in memory))
    assert len(tasks()) == MAX_TASKS
    assert memory[3] - memory[0] < GROWTH_MB
    assert memory[5] - memory[3] < FULL_MB


def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path, goldens: Path, wait_until: WaitUntil) -> None:
    with Watched(tmp_path, goldens) as watched:
        watched.until_ready()
        flower = watched.flower
        watched.web.close()
        watched.process.kill()
        wait_until(lambda: not flower.is_running(), LONG_S, "Flower has ended")
