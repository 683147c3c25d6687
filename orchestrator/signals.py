"""How a command is interrupted, and when it is not."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _State:
    held = False  # a signal waits
    came = False  # a signal has come


def interrupt_once() -> None:
    """The first of these signals is an interrupt; later ones must not disturb how we end, which takes seconds."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        _State.came = True
        if not _State.held:
            ignore()
            raise KeyboardInterrupt

    for name in ENDING:
        if signal.getsignal(name) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(name, interrupt)


def check() -> None:
    """Raise the interrupt of a signal that has come: while it had to wait, or where Python could not raise."""
    if _State.came:
        ignore()
        raise KeyboardInterrupt


class held:
    """A context manager: signals wait in the block, but where it is `interruptible`. What must not be skipped happens
    at the edges of such blocks, where an interrupt would skip it."""

    _value = True

    def __enter__(self) -> None:
        self._before, _State.held = _State.held, self._value
        if not self._value:
            check()

    def __exit__(self, *exc: object) -> None:
        _State.held = self._before


class interruptible(held):
    """A context manager, for use within a block of `held`."""

    _value = False


@contextmanager
def stoppable() -> Iterator[None]:
    """In the block, which is `held`, Ctrl-C ends nothing: it interrupts what is `interruptible`, each time anew, and
    nothing else. Whoever catches that asks `check` whether it was another signal, which does end the command."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if not _State.held:
            _State.held = True  # what it interrupts is on its way out: once is enough
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with held():
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is stop:
                signal.signal(signal.SIGINT, before)


def ignore() -> None:
    """No signal disturbs how the command ends."""
    for name in ENDING:
        signal.signal(name, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What is in the block is done to its end. In the main thread."""
    before = {name: signal.getsignal(name) for name in ENDING}
    ignore()
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
