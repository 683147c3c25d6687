"""`pp ...` as a child process in a folder of its own, watched from outside: its processes, its sockets, its logs.

Whatever the command starts inherits its environment, so a mark in there finds the processes of a run, also after the
command itself is gone. Valkey writes its title over its environment, but its folder is a temporary one of the run's.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

ROOT = Path(__file__).parents[2]
MARK = "MARK_OF_A_TEST"
LONG_S = 60.0  # for anything that must happen sooner or later, on a slow machine too
CLI = ("-m", "orchestrator.cli")
SMOKE_RUN = ("-c", "from orchestrator.cli import smoke_run; smoke_run()")


@dataclass(frozen=True)
class Ended:
    """How a command ended. `kept`: the run's folder of logs and what is in it."""

    code: int
    stdout: str
    stderr: str
    kept: tuple[Path, ...]

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON object that stdout is."""
        assert self.stdout.count("\n") == 1, self
        assert self.stdout.endswith("\n"), self
        return json.loads(self.stdout)


class Command:
    """A `pp` that runs. A context manager: whatever a failed test leaves running ends with it.

    `stdin`: what the command finds there, nothing by default. `program`: the arguments of Python that start it.
    """

    def __init__(self, folder: Path, *argv: str, stdin: bytes = b"", program: tuple[str, ...] = CLI, **environ: str):
        self.mark = secrets.token_hex(8)
        self.folder = folder / self.mark
        self.folder.mkdir()
        self.state = self.folder / "state"
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        (self.folder / "stdin").write_bytes(stdin)
        ours = {
            "XDG_STATE_HOME": str(self.state), "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), MARK: self.mark,
        }  # fmt: skip
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PP_")}
        self.process = self._start([sys.executable, *program, *argv], inherited | ours | environ)

    def _start(self, argv: list[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        with (self.folder / "stdin").open("rb") as source, (self.folder / "stderr").open("wb") as errors:
            return subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE, stderr=errors, cwd=self.folder, env=env)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [self.process, *self.processes()]:
            process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return (self.folder / "stderr").read_text()

    def processes(self) -> list[psutil.Process]:
        """Those of this run that live, the command itself among them."""
        return [p for p in psutil.process_iter() if _environ(p).get(MARK) == self.mark or self._is_in_folder(p)]

    def workers(self) -> dict[int, psutil.Process]:
        """The Celery worker of each stage that was started so far."""
        return {int(stage): p for p in self.processes() if (stage := _environ(p).get("STAGE"))}

    def environs(self) -> list[dict[str, str]]:
        """The environment of each of its processes."""
        return [_environ(p) for p in self.processes()]

    def ports(self) -> set[int]:
        """TCP ports that its processes listen on and UDP ports that they hold, over IPv4 and IPv6."""
        pids = {p.pid for p in self.processes()}
        return {c.laddr.port for c in psutil.net_connections("inet") if c.pid in pids and c.laddr and not c.raddr}

    def logs(self) -> dict[str, str]:
        """What its processes have written into the files of the state folder, by file name."""
        return {path.name: path.read_text(errors="replace") for path in self.state.rglob("*") if path.is_file()}

    def wait_for(self, predicate: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> Any:
        """Poll until `predicate` gives something true, and give that. Fails the test when the command ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            if found := predicate():
                return found
            assert self.process.poll() is None, f"it ended before {what}: {self.stderr}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.stderr}"
            time.sleep(0.02)

    def wait_for_tokens(self, n: int = 5) -> None:
        """Until `n` tokens of its request are in the broker."""
        environ = self.wait_for_worker()
        streams = f"pp:{environ['PP_RUN']}:stream:*"
        with redis.Redis.from_url(environ["PP_BROKER"]) as client:
            self.wait_for(lambda: any(client.xlen(key) >= n for key in client.scan_iter(streams)), f"{n} tokens")

    def wait_for_worker(self) -> dict[str, str]:
        """Until a worker was started; its environment."""
        return self.wait_for(lambda: next((e for e in self.environs() if "PP_RUN" in e), None), "a worker")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = LONG_S) -> Ended:
        """Until the command has ended by itself. Asserts that no process and no temporary file of it is left then."""
        stdout, _ = self.process.communicate(timeout=timeout_s)
        left = self.left_over()
        assert not left, left
        kept = tuple(sorted(self.state.glob("pptasks/runs/**/*")))
        return Ended(self.process.returncode, (stdout or b"").decode(errors="replace"), self.stderr, kept)

    def left_over(self) -> list[str]:
        """Its processes that live, and its temporary files, in words."""
        return [_words(p) for p in self.processes()] + [str(path) for path in self.temporary.iterdir()]

    def _is_in_folder(self, process: psutil.Process) -> bool:
        try:
            return process.cwd().startswith(str(self.folder))
        except psutil.Error:
            return False


def pp(folder: Path, *argv: str, stdin: bytes = b"", **environ: str) -> Ended:
    """A command from its start to its end."""
    with Command(folder, *argv, stdin=stdin, **environ) as command:
        return command.wait()


def pp_at_once(folder: Path, *argvs: tuple[str, ...]) -> list[Ended]:
    """Several commands, started together."""
    with ExitStack() as stack:
        commands = [stack.enter_context(Command(folder, *argv)) for argv in argvs]
        return [command.wait() for command in commands]


def bound(ports: set[int]) -> set[int]:
    """Those of `ports` that some process listens on or holds."""
    return ports & {c.laddr.port for c in psutil.net_connections("inet") if c.laddr and not c.raddr}


def assert_one_line(stderr: str, *words: str) -> None:
    """An error for people: one line that holds `words`, and no traceback. Usage lines may stand before it."""
    lines = [line for line in stderr.splitlines() if re.match(r"(?i)error: ", line)]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert all(word in lines[0] for word in words), lines[0]


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}, which ends"
