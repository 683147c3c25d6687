"""How a command is interrupted, and when it is not."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_once() -> None:
    """The first of these signals is an interrupt; later ones must not disturb how we end, which takes seconds."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        _ignore()
        raise KeyboardInterrupt

    for name in ENDING:
        signal.signal(name, interrupt)


def _ignore() -> None:
    for name in ENDING:
        signal.signal(name, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What is in the block is done to its end. In the main thread."""
    before = {name: signal.getsignal(name) for name in ENDING}
    _ignore()
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
