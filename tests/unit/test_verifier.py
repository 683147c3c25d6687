"""The keeper of verified requests: what it refuses, when it checks, and what it does with a check that fails."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pptasks.errors import PPError, RequestError, RequestFailed
from pptasks.wire import Frame, Kind, Lane, Sampling, short_id
from workers.scheduler import Sequence
from workers.verifier import Outcome, Verifier
from workers.verify import Traces

DIM = 4


def stage(n_stages: int = 2, dim: int = DIM) -> Any:
    """What the keeper needs to know of a stage."""
    return SimpleNamespace(
        plan=SimpleNamespace(n_stages=n_stages), slice=SimpleNamespace(dim=dim), check=lambda frame: None
    )


def sequence(name: str, max_tokens: int = 2) -> Sequence:
    made = Sequence(name, short_id(name), [5, 6, 7], 3, max_tokens, frozenset(), Sampling(), traced=True)
    made.ids += [8, 9]
    return made


def told(sequence: Sequence, sender: int, position: int, rows: int) -> Frame:
    lane = Lane(sequence.short_id, 0, 0, position, rows, 0)
    payload = np.full((rows, DIM), sender, np.float32)
    return Frame(Kind.TRACE, b"p" * 16, b"r" * 16, 1, 0, (lane,), payload, sender=sender)


def tell_all(keeper: Verifier, sequence: Sequence) -> None:
    for sender in range(2):
        keeper.record(told(sequence, sender, 0, 3))
        keeper.record(told(sequence, sender, 3, 1))


def test_a_check_waits_until_every_stage_has_told() -> None:
    asked, outcomes = list[tuple[Any, ...]](), list[Outcome]()

    def verify(*args: Any) -> Any:
        asked.append(args)
        return "verified"

    keeper, a = Verifier(verify, stage(), patience_s=60), sequence("a")
    keeper.watch(a)
    assert a.request_id in keeper
    keeper.record(told(a, 0, 0, 4))
    keeper.ended(a, outcomes.append)
    keeper.tick()
    assert not asked
    keeper.record(told(a, 1, 0, 4))
    keeper.record(told(a, 1, 2, 40))  # a stage that tells more than was asked
    keeper.record(told(a, 9, 0, 1))  # a stage that is not there
    keeper.record(told(sequence("b"), 1, 0, 1))  # a request that nobody watches
    keeper.tick()
    assert outcomes == ["verified"]
    assert asked[0][:2] == ([5, 6, 7, 8, 9], 3)
    assert a.request_id not in keeper


def test_what_never_comes_fails_the_check_by_name() -> None:
    outcomes: list[Any] = []
    keeper, a = Verifier(pytest.fail, stage(), patience_s=0.0), sequence("a")
    keeper.watch(a)
    keeper.record(told(a, 0, 0, 4))
    keeper.record(told(a, 1, 0, 2))
    keeper.ended(a, outcomes.append)
    keeper.tick()
    assert isinstance(outcomes[0], RequestFailed)
    assert "stage 1 did not tell what it computed for position 2" in str(outcomes[0])


def test_one_check_a_turn_and_the_others_get_the_time_that_it_took() -> None:
    outcomes: list[Any] = []
    keeper = Verifier(lambda *args: "verified", stage(), patience_s=60)
    a, b = sequence("a"), sequence("b")
    for one in (a, b):
        keeper.watch(one)
        tell_all(keeper, one)
        keeper.ended(one, outcomes.append)
    keeper.tick()
    assert len(outcomes) == 1
    keeper.tick()
    assert len(outcomes) == 2


@pytest.mark.parametrize("error", [RequestFailed("no such layer"), MemoryError("too large"), ValueError("x")])
def test_a_check_that_fails_is_the_requests_own_loss(error: Exception) -> None:
    def verify(*args: Any) -> Any:
        raise error

    outcomes: list[Any] = []
    keeper, a = Verifier(verify, stage(), patience_s=60), sequence("a")
    keeper.watch(a)
    tell_all(keeper, a)
    keeper.ended(a, outcomes.append)
    keeper.tick()
    assert isinstance(outcomes[0], PPError)
    assert str(error) in str(outcomes[0])


def test_more_than_is_kept_is_refused_with_both_numbers() -> None:
    keeper = Verifier(pytest.fail, stage(n_stages=8, dim=8192), patience_s=60)
    with pytest.raises(RequestError, match=r"131075 positions of 8 stages take 34361 MB, and at most 1074 MB"):
        keeper.watch(sequence("a", max_tokens=1 << 17))
    assert sequence("a").request_id not in keeper


def test_whoever_waits_is_told_when_the_worker_stops() -> None:
    outcomes: list[Any] = []
    keeper, a, b = Verifier(pytest.fail, stage(), patience_s=60), sequence("a"), sequence("b")
    keeper.watch(a)
    keeper.watch(b)
    keeper.ended(a, outcomes.append)
    keeper.forget(b)
    keeper.close(RequestFailed("stopped"))
    assert [str(outcome) for outcome in outcomes] == ["stopped"]


def test_what_lies_outside_is_not_recorded() -> None:
    traces = Traces(2, 4, DIM)
    for position in (3, 4, 9):
        traces.record(1, position, np.ones((3, DIM), np.float32))
    traces.record(2, 0, np.ones((1, DIM), np.float32))
    assert traces.missing(4) == (0, 0)
    assert traces.of(1, 4)[3].tolist() == [1.0] * DIM
