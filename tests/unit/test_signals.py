"""When a signal interrupts, and when it waits."""

import signal
from collections.abc import Iterator

import pytest

from orchestrator import signals
from orchestrator.signals import held, interrupt_once, interruptible, stoppable


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


# ---- where Ctrl-C stops something, and ends nothing ----


def test_ctrl_c_stops_again_and_again_what_may_be_stopped() -> None:
    stopped = 0
    with stoppable():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)  # nothing to stop yet
            try:
                with interruptible():
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                stopped += 1
                signal.raise_signal(signal.SIGINT)  # impatience
                signals.check()
    assert stopped == 3


def interrupted(number: signal.Signals, again: signal.Signals, done: list[str]) -> None:
    """What one signal interrupts, and the other comes while it puts itself in order."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        signal.raise_signal(again)
        done.append("cancelled")
        raise


def test_impatience_does_not_disturb_how_something_stops() -> None:
    done: list[str] = []
    with stoppable():
        with pytest.raises(KeyboardInterrupt), interruptible():
            interrupted(signal.SIGINT, signal.SIGINT, done)
        signals.check()
    assert done == ["cancelled"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_ends_the_command_also_while_something_stops(first: signal.Signals) -> None:
    done: list[str] = []
    with stoppable():
        with pytest.raises(KeyboardInterrupt), interruptible():
            interrupted(first, signal.SIGTERM, done)
        done.append("saved")
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    assert done == ["cancelled", "saved"]
    for name in signals.ENDING:
        signal.raise_signal(name)  # nothing disturbs how it ends


def test_after_it_ctrl_c_ends_the_command() -> None:
    with stoppable(), pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
    signals.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.check()


def test_whoever_ends_by_himself_is_not_disturbed() -> None:
    with stoppable():
        signals.ignore()
    for name in signals.ENDING:
        signal.raise_signal(name)
