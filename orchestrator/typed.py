"""What is typed, or piped in, a message at a time."""

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import click

from pptasks.errors import RequestError

FIRST, NEXT = ">>> ", "... "
_LOOK_S = 0.1


class Typed:
    """Messages from stdin. A line that ends with a backslash goes on in the next; at a terminal, what is pasted stays
    one message whatever its lines. Only at a terminal is anything written: a prompt, on stdout if that is one too."""

    def __init__(self) -> None:
        self.is_terminal = bool(sys.stdin and sys.stdin.isatty())
        self._lines = list[str]()  # of a message that is not complete
        self._editor = _editor() if self.is_terminal and sys.stdout and sys.stdout.isatty() else None

    def remember(self, messages: Iterable[str]) -> None:
        """As if they had been typed: the arrow keys bring them back."""
        if self._editor:
            for message in messages:
                self._editor.add_history(message)

    def read(self) -> str | None:
        """The next message; None at the end. Raises RequestError for what is no text."""
        self._lines.clear()
        while True:
            line = self._line(NEXT if self._lines else FIRST)
            if line is None:
                return "\n".join(self._lines) if self._lines else None
            if not line.endswith("\\"):
                return "\n".join([*self._lines, line])
            self._lines.append(line.removesuffix("\\"))

    @property
    def was_begun(self) -> bool:
        """Whether there was something of a message when `read` was interrupted, as far as can be known."""
        return bool(self._lines or (self._editor and self._editor.get_line_buffer()))

    def _line(self, prompt: str) -> str | None:
        try:
            with _looking_up():
                return input(prompt) if self._editor else self._plain_line(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as e:
            raise RequestError(f"that is not {e.encoding} text: {e.reason}") from None

    def _plain_line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        if self.is_terminal:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.buffer.readline()
        return line.decode(sys.stdin.encoding).rstrip("\r\n") if line else None


@contextmanager
def _looking_up() -> Iterator[None]:
    """A signal that comes just before a key is waited for is heard when that key comes: Python looks for signals only
    when its wait is interrupted. So it is, a few times a second."""
    signal.signal(signal.SIGALRM, lambda signum, frame: None)  # for good: one more may be under way
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _editor() -> ModuleType | None:
    """Python's readline, through which `input` then goes. None where there is none: the terminal edits lines itself."""
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline
