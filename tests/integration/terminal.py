"""A command at a terminal: what it writes there, and what a person types."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time

from tests.integration.run import LONG_S, Command, Ended

# Makes the terminal that is stdin the one of this session, so that Ctrl-C there is a signal, and becomes the command.
_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal(Command):
    """A `Command` whose stdin, stdout and stderr are a pseudo-terminal."""

    def _start(self, argv: list[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._raw = bytearray()
        (self.folder / "stderr").touch()
        argv = [sys.executable, "-c", _TAKE, *argv]
        env = env | {"TERM": "xterm", "COLUMNS": "200"}
        process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=self.folder, env=env, start_new_session=True
        )
        os.close(theirs)
        return process

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        os.close(self._ours)

    def wait(self, timeout_s: float = LONG_S) -> Ended:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:  # a full terminal would hold it up
            self._read()
            time.sleep(0.02)
        ended = super().wait(1)
        self._read()
        return ended

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # there is nothing, or its end
            while data := os.read(self._ours, 1 << 16):
                self._raw += data

    @property
    def screen(self) -> str:
        """The same as a person reads it: without commands to the terminal, lines ended by newlines alone."""
        raw = self._raw.decode(errors="replace")
        return _SEQUENCE.sub("", raw).replace("\r\n", "\n").replace("\r", "")

    def type(self, text: str) -> int:
        """Press these keys; how long the screen was before."""
        self._read()
        before = len(self.screen)
        os.write(self._ours, text.encode())
        return before

    def wait_for_text(self, pattern: str, since: int = 0, timeout_s: float = LONG_S) -> "re.Match[str]":
        """Until the screen has, after its first `since` characters, what `pattern` matches."""
        deadline = time.monotonic() + timeout_s
        self._read()
        while not (found := re.search(pattern, self.screen[since:], re.DOTALL)):
            ended = self.process.poll() is not None
            assert not ended, f"it ended before {pattern}: {self.screen}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {pattern}; {self.screen[-2000:]}"
            select.select([self._ours], [], [], 0.1)
            self._read()
        return found

    def ask(self, text: str) -> str:
        """Type a line, wait for the next prompt; what was written between."""
        since = self.type(text + "\r")
        found = self.wait_for_text(r"\n(.*)\n>>> $", since)
        return found[1]
