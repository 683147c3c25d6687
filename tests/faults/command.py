"""The whole command against a scene's market, as a process: started, struck at some step, and looked at afterwards."""

import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.clusters import Clusters
from pptasks.errors import NoSuchCluster
from tests.fake_vast import BAD_IMAGE, NEVER_RUNS, Fault
from tests.fake_vast.machine import Life
from tests.faults.scene import SCALE, Scene
from tests.integration.run import LONG_S, Command, Ended

DRIVER = ("-m", "tests.faults.driver", str(SCALE))
SMOKE, UP = "smoke", "up"


@dataclass(frozen=True)
class Step:
    """A moment of a run: how to make it last, and how to know that it is there."""

    name: str
    reached: Callable[[Scene, "Rented"], Any]
    faults: tuple[Fault, ...] = ()
    life: Life | None = None
    image: str = "node"  # what the machines run: node, slow, stalled
    command: str = SMOKE
    offers: int = 6


def _calls(kind: str, n: int = 1) -> Callable[[Scene, "Rented"], bool]:
    return lambda it, command: len(it.fake.calls(kind)) >= n


def _booting(it: Scene, command: "Rented") -> bool:
    return len(it.rented) == 2 and len(it.fake.calls("list")) > 2


STEPS = [
    Step("search", _calls("search"), (Fault("search", seconds=1.5),)),
    Step("create 0", _calls("create"), (Fault("create", seconds=1.5),)),
    Step("create 1", _calls("create", 2), (Fault("create", seconds=1.5, skip=1),)),
    Step("booting", _booting, life=NEVER_RUNS),
    Step("loading", lambda it, command: command.hub_stalls(), image="stalled"),
    Step("ready", lambda it, command: command.is_up(), command=UP),
    Step("decode", lambda it, command: command.says_text(), image="slow"),
    Step("teardown", _calls("destroy"), (Fault("destroy", seconds=0.6, times=2),), life=BAD_IMAGE, offers=2),
]  # fmt: skip


class Rented(Command):
    """`pp-smoke-run --vastai`, or `pp up --vastai`, in a scene. options: further ones. `hub`: of its machines."""

    def __init__(self, it: Scene, folder: Path, command: str = SMOKE, *options: str, deadline: str = "60s"):
        self.it, self.hub = it, it.ground.hub
        words = [SMOKE] if command == SMOKE else ["pp", command]
        asked = (
            "--vastai",
            "--yes",
            "--relay",
            "none",
            "--model",
            it.ground.model,
            "--wire",
            "f32",
            "--deadline",
            deadline,
        )
        super().__init__(
            folder, *words, *asked, *options, program=DRIVER,
            VAST_API_KEY=it.fake.key, PP_VAST_URL=it.fake.url, PP_CACHE=str(it.ground.cache),
            XDG_STATE_HOME=str(it.state), HF_ENDPOINT=it.ground.hub.url, HF_HOME=str(folder / "hf"),
        )  # fmt: skip

    def reach(self, step: Step) -> None:
        """Wait for it. What its processes show of themselves holds no secret; the key is in none but the command's."""
        self.wait_for(lambda: step.reached(self.it, self), step.name)
        self.it.assert_no_secret_in_processes()
        for process in self.processes():
            if process.pid != self.process.pid:
                self.it.assert_hidden("environment", "\n".join(_environment(process)), {self.it.fake.key})

    def is_up(self) -> bool:
        try:
            return Clusters(self.it.state / "pptasks" / "clusters").read("default").ready_s is not None
        except NoSuchCluster:
            return False

    def says_text(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def hub_stalls(self) -> bool:
        return self.hub.stalled.is_set() and len(self.it.rented) == 2

    def end(self) -> Ended:
        """Once it has ended by itself: what it said belongs to the scene."""
        ended = self.wait()
        self.it.said += [ended.stdout, ended.stderr]
        return ended

    def kill(self) -> None:
        """The command alone, as the kernel does; whatever it started sees to itself."""
        self.signal(signal.SIGKILL)
        self.process.communicate()
        self.it.said.append(self.stderr)
        self.it.count()

    def is_gone(self) -> bool:
        """Nothing that it started runs, here or on the machines it rented."""
        machines = [machine.process for machine in self.it.rented if machine.process is not None]
        return not self.processes() and all(process.poll() is not None for process in machines)


def _environment(process: psutil.Process) -> list[str]:
    try:
        return [f"{name}={value}" for name, value in process.environ().items()]
    except psutil.Error:
        return []


def until(condition: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
