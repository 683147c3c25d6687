"""Two readings of a pipeline, and what follows from them."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.serve.pipeline import MAX_GAP_US, Rates, Snapshot, doing, snapshot
from pptasks.members import Member

S = 1_000_000


def member(stage: int, seconds: float = 10.0, **figures: Any) -> Member:
    ready = {"state": "ready", "incarnation": f"i{stage}", "lanes": 4}
    return Member(stage, **(ready | {"at_us": int(seconds * S)} | figures))


def after(*readings: tuple[Member, ...], queues: tuple[int, ...] = (0, 0)) -> Snapshot:
    """What is known after readings a second apart."""
    shot = None
    for at, members in enumerate(readings):
        shot = snapshot(shot, at, {m.stage: m for m in members}, queues)
    assert shot is not None
    return shot


def test_a_counter_becomes_a_rate_by_the_workers_own_clock() -> None:
    first = member(0, 10, steps=100, rows=400, tokens=50, busy_us=3 * S)
    shot = after((first,), (replace(first, at_us=12 * S, steps=140, rows=560, tokens=90, busy_us=4 * S),))
    assert shot.rates[0] == Rates(steps_per_s=20, rows_per_s=80, tokens_per_s=20, busy=0.5)


def test_one_reading_tells_no_rate() -> None:
    assert after((member(0, steps=100),)).rates == (Rates(), Rates())


def test_a_record_that_was_not_renewed_keeps_its_rates() -> None:
    """We look about as often as workers write: some records are seen twice, and say nothing new."""
    first, second = member(0, 10, steps=0), member(0, 11, steps=30)
    assert after((first,), (second,), (second,)).rates[0].steps_per_s == 30


def test_a_worker_that_was_started_again_counts_from_nothing() -> None:
    first, again = member(0, 10, steps=900), member(0, 3, steps=5, incarnation="other")
    assert after((first,), (again,)).rates[0] == Rates()
    assert after((first,), (again,), (replace(again, at_us=4 * S, steps=9),)).rates[0] == Rates(steps_per_s=4)


@pytest.mark.parametrize("later", [-1.0, MAX_GAP_US / S + 1])
def test_a_clock_that_jumps_or_a_gap_too_long_gives_no_rate(later: float) -> None:
    assert after((member(0, 10),), (member(0, 10 + later, steps=7),)).rates[0] == Rates()


def test_nothing_is_more_than_busy_and_no_rate_is_negative() -> None:
    """A record may come from anybody."""
    shot = after((member(0, 10, steps=9, busy_us=0),), (member(0, 11, steps=2, busy_us=99 * S),))
    assert shot.rates[0] == Rates(busy=1.0)


def test_who_is_away_keeps_what_it_was() -> None:
    shot = after((member(0), member(1, host="far")), (member(0, 11),))
    assert shot.present == {0}
    assert shot.members[1].host == "far"
    assert shot.rates[1] == Rates()


@pytest.mark.parametrize(
    ("member", "rates", "word"),
    [
        (None, Rates(), "away"),
        (member(1, state="failed"), Rates(), "failed"),
        (member(1, state="starting", phase="download"), Rates(), "loading"),
        (member(1), Rates(), "idle"),
        (member(1, lanes=4), Rates(steps_per_s=10, rows_per_s=40), "decode"),
        (member(1, lanes=4), Rates(steps_per_s=10, rows_per_s=1280), "prefill"),
        (member(1, lanes=1), Rates(steps_per_s=1, rows_per_s=1), "decode"),
    ],
)
def test_what_a_stage_does_in_a_word(member: Member | None, rates: Rates, word: str) -> None:
    assert doing(member, rates) == word
