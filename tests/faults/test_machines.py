"""What becomes of rented machines before their workers say anything: each is replaced, up to a limit, or explained."""

import re
import time

import pytest

from orchestrator.watch import Patience
from pptasks.errors import StageFailed
from tests.fake_vast import (
    BAD_IMAGE,
    EXITS,
    GOES_OFFLINE,
    NEVER_RUNS,
    OCI_FAILS,
    VANISHES,
    Machine,
    Phase,
)
from tests.faults.conftest import Open
from tests.faults.light import Light
from tests.faults.scene import WORKING

HEAD, TAIL = 700, 702  # the machines that the choice takes first, for the stages
DENIED = (Phase(0.0, "loading", "Error response from daemon: pull access denied for x, repository does not exist"),)
PATIENT = Patience(start_s=1.0, step_s=10.0, lost_s=8.0)
FATES = [
    ("never running", NEVER_RUNS, r"its machine does not come up in .* s \(loading: Pulling from image\)"),
    ("OCI runtime fails", OCI_FAILS, r"its machine has ended \(created: Error: OCI runtime create failed"),
    ("container exits", EXITS, r"its machine has ended \(exited: exit code 1\)"),
    ("goes offline", GOES_OFFLINE, r"its machine has ended \(offline\)"),
    ("vanishes", VANISHES, r"its machine is gone: its provider does not list it any more"),
]
IMAGES = [(BAD_IMAGE, "manifest unknown"), (DENIED, "pull access denied")]


class Silent:
    """A container that runs, and says nothing."""

    def __init__(self, machine: Machine):
        self._ended = False

    def poll(self) -> int | None:
        return 0 if self._ended else None

    def terminate(self) -> None:
        self._ended = True

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("mode", "life", "why"), FATES, ids=[mode for mode, *_ in FATES])
def test_one_machine_is_replaced(scene: Open, stage: int, mode: str, life: tuple[Phase, ...], why: str) -> None:
    """By a spare on another machine, and the run becomes ready. The other stage's machine stays."""
    bad, other = (HEAD, TAIL) if stage == 0 else (TAIL, HEAD)
    with scene(mode, lambda m: (Silent if m.offer["machine_id"] == bad else Light)(m)) as it:
        it.fake.lives[bad] = life
        with it.fleet(PATIENT):
            places = {machine.offer["machine_id"] for machine in it.ours}
            assert bad not in places
            assert other in places
        assert len(it.rented) == 3
        assert_told(it.told, rf"stage {stage}: machine {bad} \(.*\) {why}.*; taking another machine")


@pytest.mark.parametrize(("mode", "life", "why"), FATES, ids=[mode for mode, *_ in FATES])
def test_all_machines_alike(scene: Open, mode: str, life: tuple[Phase, ...], why: str) -> None:
    """Two replacements of a stage are enough."""
    with scene(mode, Silent, life=life) as it:
        with pytest.raises(StageFailed, match=rf"stage [01] on machine \d+ \(.*\) {why}"), it.fleet():
            pass
        assert 4 <= len(it.rented) <= 6


@pytest.mark.parametrize(("life", "why"), IMAGES)
def test_an_image_that_cannot_be_pulled(scene: Open, life: tuple[Phase, ...], why: str) -> None:
    """No other machine could pull it: nothing is replaced, and the remedy is told."""
    with scene("image cannot be pulled", life=life) as it:
        with pytest.raises(StageFailed, match=rf"stage 0 on .*{why}.*: push the image .*, or give --image"), it.fleet():
            pass
        assert len(it.rented) == 2


@pytest.mark.parametrize("stage", [0, 1])
def test_a_machine_that_never_says_hello(scene: Open, stage: int) -> None:
    bad = (HEAD, TAIL)[stage]
    with scene("never says hello", lambda m: (Silent if m.offer["machine_id"] == bad else Light)(m)) as it:
        with it.fleet(Patience(start_s=30.0, step_s=2.5, lost_s=8.0)):
            pass
        assert len(it.rented) == 3
        assert_told(it.told, rf"stage {stage}: machine {bad} .* its machine runs, but says no hello in 2 s")


def test_machines_that_never_say_hello(scene: Open) -> None:
    words = r"stage [01] on .* its machine runs, but says no hello"
    with scene("never says hello", Silent) as it, pytest.raises(StageFailed, match=words), it.fleet():
        pass


def test_a_machine_that_never_runs_and_no_spare(scene: Open) -> None:
    with scene("never running", n=2, life=NEVER_RUNS) as it:
        with pytest.raises(StageFailed, match=r"stage 0 on .* its machine does not come up in"), it.fleet():
            pass
        assert len(it.rented) == 2


@pytest.mark.parametrize("fate", ["offline", "exited", "vanished"])
def test_a_machine_that_is_lost_when_all_were_ready(scene: Open, fate: str) -> None:
    with scene("lost when ready", Light) as it, it.fleet(WORKING) as fleet:
        lost = it.ours[1]
        lost.now(None if fate == "vanished" else fate, vanished=fate == "vanished")
        words = "its machine is gone" if fate == "vanished" else rf"its machine has ended \({fate}\)"
        with pytest.raises(StageFailed, match=rf"stage 1 on machine {TAIL} .*{words}"):
            until(fleet.check)


def test_a_machine_that_is_silent_when_all_were_ready(scene: Open) -> None:
    """Its provider shows it as running."""
    patience = Patience(start_s=40.0, step_s=40.0, lost_s=1.0)
    with scene("lost when ready", Light) as it, it.fleet(patience) as fleet:
        it.ours[1].process.hush()
        with pytest.raises(StageFailed, match=rf"stage 1 on machine {TAIL} .* was lost: it is silent"):
            until(fleet.check)


def test_a_machine_that_is_lost_is_replaced_in_a_cluster_that_stays(scene: Open) -> None:
    with scene("lost when ready", Light) as it, it.fleet(WORKING) as fleet:
        lost = it.ours[1]
        lost.now("offline")
        until(lambda: fleet.tend() and len(it.rented) == 3)
        assert not lost.bills
        assert len(it.ours) == 2


def until(step, timeout_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    """Call it until it is true, or raises."""
    deadline = time.monotonic() + timeout_s
    while not step():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_told(told: str, pattern: str) -> None:
    assert re.search(pattern, told), told
