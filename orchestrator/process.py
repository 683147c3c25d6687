"""A child process of the orchestrator: started in its own session, its output in a log file, always ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TERM_S = 4.0  # a worker finishes its step, says goodbye
TAIL_LINES = 20
TAIL_BYTES = 64 << 10


def python(*module: str) -> list[str]:
    """`python -m` a module and its arguments, by our own interpreter."""
    return [sys.executable, "-m", *module]


class Process:
    """`name` for messages. stdout and stderr go to `log`, which only its owner may read; with `pipe`, stdout is a pipe
    instead."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, *, cwd: Path, pipe: bool = False
    ):
        self.name, self.log = name, log
        with os.fdopen(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb") as out:
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    @property
    def how_it_ended(self) -> str:
        code = self.returncode
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def read_line(self, timeout_s: float) -> bytes:
        """The first line on stdout; b"" if it ends without one or `timeout_s` passes."""
        if self._popen.stdout is None:
            return b""
        os.set_blocking(self._popen.stdout.fileno(), False)
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n") and time.monotonic() < deadline:
            chunk = self._popen.stdout.read(1)
            if chunk:
                line += chunk
            elif chunk == b"" or self.returncode is not None:
                break
            else:
                time.sleep(0.01)
        return line if line.endswith(b"\n") else b""

    def tail(self, lines: int = TAIL_LINES) -> tuple[str, ...]:
        """The last lines of its log, oldest first."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-lines:])

    def terminate(self) -> None:
        """Ask it to end; does not wait."""
        if self.returncode is None:
            self._popen.terminate()

    def finish(self, timeout_s: float = TERM_S) -> None:
        """Wait until it has ended, with SIGKILL after `timeout_s`."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def end_all(processes: Sequence[Process]) -> None:
    """Ask all of them to end, then see to it."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + TERM_S
    for process in processes:
        process.finish(max(0.0, deadline - time.monotonic()))
