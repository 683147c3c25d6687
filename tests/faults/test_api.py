"""The API is busy or broken for a while, at each kind of call; and what it costs: time, but no machine."""

from collections.abc import Callable

import pytest

from pptasks.errors import NoAnswer, StageFailed
from tests.fake_vast import Fault
from tests.faults.conftest import Open
from tests.faults.light import Light
from tests.faults.scene import HASTY, SLEEP, WORKING, Scene

BUSY = [
    ("429 in plain text", lambda kind: Fault(kind, 429, "API requests too frequent", {"Retry-After": "0"}, times=2)),
    ("429 with detail", lambda kind: Fault(kind, 429, {"detail": "slow down"}, times=2)),
    ("5xx", lambda kind: Fault(kind, 502, "<html>bad gateway</html>", times=2)),
    ("connection closed", lambda kind: Fault(kind, drop=True, times=2)),
]


def passes(it: Scene, machines: int = 2) -> None:
    with it.fleet(WORKING):
        assert len(it.ours) == 2
    assert len(it.rented) == machines


@pytest.mark.parametrize("kind", ["search", "list", "show", "destroy"])
@pytest.mark.parametrize(("what", "fault"), BUSY, ids=[what for what, _ in BUSY])
def test_calls_that_are_repeated(scene: Open, kind: str, what: str, fault: Callable[[str], Fault]) -> None:
    with scene(f"{kind}: 429, 5xx, closed", Light) as it:
        it.fake.faults.append(fault(kind))
        passes(it)
        assert it.fake.faults[0].times == 0, "it has struck"


@pytest.mark.parametrize(("stage", "fault"), [(0, BUSY[0][1]), (1, BUSY[1][1])], ids=["text", "detail"])
def test_a_create_that_comes_too_soon_is_repeated(scene: Open, stage: int, fault: Callable[[str], Fault]) -> None:
    with scene("create: 429", Light) as it:
        it.fake.faults.append(fault("create"))
        it.fake.faults[0].skip = stage
        passes(it)
        assert len(it.fake.calls("create")) == 4


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_create_that_breaks(scene: Open, status: int, takes_effect: bool) -> None:
    with scene("create: 5xx", Light) as it:
        it.fake.faults.append(Fault("create", status, "oops", takes_effect=takes_effect, skip=1))
        passes(it)
        assert len(it.fake.calls("create")) == (2 if takes_effect else 3)


@pytest.mark.parametrize("status", [500, 429])
def test_a_search_that_is_never_answered(scene: Open, status: int) -> None:
    with scene("search: 429, 5xx, closed") as it:
        it.fake.faults.append(Fault("search", status, "oops", times=10**6))
        with pytest.raises(NoAnswer, match=rf"vast.ai did not answer search \({status}: oops\)"), it.fleet():
            pass
        assert it.rented == []


def test_a_list_that_is_never_answered(scene: Open) -> None:
    """The run goes on, and what the ledger knows is ended."""
    with scene("list: 429, 5xx, closed", Light) as it:
        it.fake.faults.append(Fault("list", 500, "oops", times=10**6))
        passes(it)
        assert "vast: vast.ai did not answer list (500: oops)" in it.told


def test_a_destroy_that_took_effect_and_broke(scene: Open) -> None:
    with scene("destroy: 429, 5xx, closed", Light) as it:
        it.fake.faults += [
            Fault("destroy", 500, "oops", takes_effect=True),
            Fault("destroy", drop=True, takes_effect=True),
        ]
        passes(it)


@pytest.mark.parametrize("status", [500, 429])
def test_logs_that_are_not_given(scene: Open, status: int) -> None:
    """They are asked for when a stage has failed; its own message stays."""
    with scene("logs: 429, 5xx") as it:
        it.fake.faults.append(Fault("logs", status, "oops", times=10**6))
        with pytest.raises(StageFailed, match="says no hello") as caught, it.fleet(HASTY, command=SLEEP):
            pass
        assert caught.value.log == (f"(no log: vast.ai did not answer logs ({status}: oops); try again later)",)
