"""When a machine is given up, and when there is hope: its life as one look at it after another."""

from dataclasses import replace

import pytest

from orchestrator.provider import Instance, State
from orchestrator.watch import HELLO, START, Patience, Trouble, Watch, trouble
from pptasks.members import Member
from pptasks.probe import expected

PATIENCE = Patience(start_s=60, step_s=30, lost_s=15, floor_mb_min=30)
MEMBER = Member(stage=0)
SHOWN = Instance("1", "label", State.RUNNING, "running", 0.1, None)
LOADING = replace(SHOWN, state=State.LOADING, status="loading: pulling")
Look = tuple[float, Instance | None, Member | None]


def lives(*looks: Look, start: float = 0.0) -> Trouble | None:
    """The first trouble that is seen."""
    watch = Watch(START, start)
    for now, instance, member in looks:
        if (found := trouble(watch, instance, member, now, PATIENCE)) is not None:
            return found
        watch = watch.seen(instance, member, now, PATIENCE.step_s)
    return None


def download(done_mb: float, total_mb: float = 1000) -> Member:
    return replace(MEMBER, phase="download", done=int(done_mb * 1e6), total=int(total_mb * 1e6))


def test_a_usual_life_is_no_trouble() -> None:
    ready = replace(MEMBER, state="ready", phase="ready", probe=expected())
    looks: list[Look] = [
        (0, None, None),
        (1, LOADING, None),
        (50, LOADING, None),
        (55, SHOWN, None),
        (80, SHOWN, MEMBER),
    ]
    looks += [(80 + 10 * i, SHOWN, download(100 * i)) for i in range(11)]
    looks += [(185, SHOWN, replace(MEMBER, phase="load", done=1)), (200, SHOWN, ready), (9999, SHOWN, ready)]
    assert lives(*looks) is None


@pytest.mark.parametrize(
    ("looks", "says", "replaceable"),
    [
        ([(61, LOADING, None)], "does not come up in 60 s (loading: pulling)", True),
        ([(61, None, None)], "does not come up in 60 s", True),
        ([(10, SHOWN, None), (41, SHOWN, None)], "says no hello in 30 s", True),
        ([(1, replace(SHOWN, state=State.ENDED, status="exited: 1"), None)], "has ended (exited: 1)", True),
        ([(1, replace(SHOWN, state=State.ENDED, status="loading: Manifest Unknown"), None)], "Manifest", False),
        ([(1, SHOWN, None), (2, None, None)], "its provider does not list it", True),
        ([(1, SHOWN, MEMBER), (17, SHOWN, None)], "was lost", True),
        ([(1, SHOWN, replace(MEMBER, state="failed", error="boom", error_type="ValueError"))], "failed: boom", False),
        ([(1, SHOWN, replace(MEMBER, state="failed", error="x", error_type="ProbeFailed"))], "failed: x", True),
        ([(1, SHOWN, replace(MEMBER, probe="other", device="CPU"))], "CPU multiplies matrices wrongly", True),
        ([(1, SHOWN, replace(MEMBER, state="ready"))], "multiplies matrices wrongly", True),
        ([(1, SHOWN, download(0)), (32, SHOWN, download(0))], "stuck in download: nothing for 30 s", True),
        ([(1, SHOWN, download(0)), (20, SHOWN, download(9)), (32, SHOWN, download(10))], "19.4 MB a minute", True),
        ([(1, SHOWN, replace(MEMBER, phase="load")), (32, SHOWN, replace(MEMBER, phase="load"))], "in load", True),
    ],
)
def test_trouble(looks: list[Look], says: str, replaceable: bool) -> None:
    assert lives(*looks[:-1]) is None
    found = lives(*looks)
    assert found is not None
    assert says in found.why
    assert found.replaceable is replaceable


@pytest.mark.parametrize(
    "looks",
    [
        [(59, LOADING, None)],
        [(1, None, None), (2, None, None), (3, SHOWN, None)],  # a list may lag behind a create
        [(1, SHOWN, MEMBER), (15, SHOWN, None), (20, SHOWN, MEMBER), (34, SHOWN, None)],  # a link that comes back
        [(1, SHOWN, download(0)), (25, SHOWN, download(8)), (31, SHOWN, download(16)), (60, SHOWN, download(31))],
        [(1, SHOWN, download(999)), (25, SHOWN, download(1000)), (54, SHOWN, download(1000))],  # done, and slow
        [(1, SHOWN, replace(MEMBER, phase="load", done=i)) for i in range(3)],
        [(29 * i, SHOWN, replace(MEMBER, phase="load", done=i, total=99)) for i in range(9)],
        [(29 * i, SHOWN, replace(MEMBER, phase=f"phase {i}")) for i in range(9)],
    ],
)
def test_hope(looks: list[Look]) -> None:
    assert lives(*looks) is None


def test_a_machine_that_runs_late_has_all_of_its_time_for_hello() -> None:
    assert lives((59, LOADING, None), (59.5, SHOWN, None), (89, SHOWN, None)) is None
    watch = Watch(START, 0.0).seen(SHOWN, None, 59.5, 30)
    assert (watch.step, watch.since) == (HELLO, 59.5)


def test_the_defaults_are_those_of_the_default_timeout() -> None:
    assert Patience.of(120.0) == Patience()
