"""One rented "instance": what becomes of it, the process that runs in it, and what it has cost."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Phase:
    """From `after_s` of an instance's life on."""

    after_s: float
    status: str | None  # actual_status
    message: str = ""
    vanished: bool = False  # the host took it away: it is not there any more, and bills nothing


Life = tuple[Phase, ...]
_START = (Phase(0.0, None), Phase(0.05, "created"), Phase(0.1, "loading", "Pulling from image"))
RUNS: Life = (*_START, Phase(0.2, "running", "success, running image"))
NEVER_RUNS: Life = _START
BAD_IMAGE: Life = (*_START, Phase(0.2, "loading", "Error response from daemon: manifest unknown: manifest unknown"))
OCI_FAILS: Life = (*_START, Phase(0.2, "created", "Error: OCI runtime create failed: nvidia-container-cli"))
EXITS: Life = (*RUNS, Phase(0.4, "exited", "exit code 1"))
GOES_OFFLINE: Life = (*RUNS, Phase(0.4, "offline"))
VANISHES: Life = (*RUNS, Phase(0.4, None, vanished=True))


class Started(Protocol):
    """A process, as subprocess.Popen has it."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[["Machine"], Started]


@dataclass
class Machine:
    """`id` is the contract's. `log` takes what its process writes; `life` can be replaced at any time."""

    id: int
    offer: Mapping[str, object]
    label: str
    image: str
    onstart: str
    args: list[str]
    env: dict[str, str]
    price: float  # $ per hour
    log: Path
    life: Life
    created_at: float = field(default_factory=time.time)
    ended_at: float | None = None  # destroyed, or vanished
    process: Started | None = None

    @property
    def bills(self) -> bool:
        """Stopped or exited, it still does."""
        return self.ended_at is None

    @property
    def cost_usd(self) -> float:
        return self.price * ((self.ended_at or time.time()) - self.created_at) / 3600

    @property
    def phase(self) -> Phase:
        if self.process is not None and (code := self.process.poll()) is not None:
            return Phase(0.0, "exited", f"exit code {code}")
        age = time.time() - self.created_at
        return [phase for phase in self.life if phase.after_s <= age][-1]

    def now(self, status: str | None, message: str = "", *, vanished: bool = False) -> None:
        """From now on this is how it stands."""
        self.life = (Phase(0.0, status, message, vanished),)

    def advance(self, start: Start | None) -> None:
        """Do what is due."""
        if not self.bills:
            return
        phase = self.phase
        if phase.vanished:
            self.end()
        elif phase.status == "running" and self.process is None and start is not None:
            self.process = start(self)

    def end(self) -> None:
        """It bills no more, and its process is ended."""
        self.ended_at = self.ended_at or time.time()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)

    def shown(self) -> dict[str, object]:
        """As the API shows it. The environment is in it, as there."""
        phase = self.phase
        return {
            "id": self.id,
            "machine_id": self.offer["machine_id"],
            "host_id": self.offer["host_id"],
            "gpu_name": self.offer["gpu_name"],
            "label": self.label,
            "actual_status": phase.status,
            "intended_status": "running",
            "cur_state": "running",
            "status_msg": phase.message or None,
            "dph_total": self.price,
            "start_date": self.created_at,
            "image_uuid": self.image,
            "extra_env": [list(pair) for pair in self.env.items()],
        }


class _Group(subprocess.Popen[bytes]):
    """Signals go to all processes of its session, as when a container ends."""

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(timeout)
        finally:
            if self.returncode is not None:
                self.send_signal(signal.SIGKILL)


def run_args(machine: Machine) -> Started:
    """What the instance was ordered to run, as a process of this machine, with the instance's environment alone."""
    env = {"PATH": os.environ["PATH"], **machine.env}
    with machine.log.open("ab") as log:
        return _Group(
            [machine.onstart, *machine.args],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
