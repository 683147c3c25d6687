"""When a signal interrupts, and when it waits."""

import signal
from collections.abc import Iterator

import pytest

from orchestrator import signals
from orchestrator.signals import held, interrupt_once, interruptible


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in signals.ENDING}
    monkeypatch.setattr(signals._State, "held", False)
    monkeypatch.setattr(signals._State, "came", False)
    interrupt_once()
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def test_the_first_signal_interrupts_and_later_ones_do_not() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    for name in signals.ENDING:
        signal.raise_signal(name)


def test_a_signal_waits_for_where_it_may_interrupt() -> None:
    done = []
    with held():
        signal.raise_signal(signal.SIGINT)
        done.append("held")
        with pytest.raises(KeyboardInterrupt), interruptible():
            done.append("never")
    assert done == ["held"]


def test_within_what_is_interruptible_it_interrupts_at_once_and_then_all_is_held_again() -> None:
    done = []
    with held():
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        done.append("the end")
    assert done == ["the end"]


def test_a_signal_at_the_very_end_of_what_is_held_does_not_undo_it() -> None:
    with held():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.check()


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_once()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
