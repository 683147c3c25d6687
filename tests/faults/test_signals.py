"""Ctrl-C, SIGTERM and SIGKILL at each step of the whole command."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from tests.fake_hub import Fault as HubFault
from tests.fake_vast import RUNS
from tests.faults.command import STEPS, UP, Rented, Step, until
from tests.faults.conftest import MODEL, Open, warm
from tests.faults.programs import changed
from tests.faults.scene import Ground, Scene, image

At = Callable[[Step, str], AbstractContextManager[tuple[Scene, Rented]]]


@pytest.fixture
def at(scene: Open, ground: Ground, goldens: Path, tmp_path: Path) -> At:
    """`with at(step, mode) as (it, command)`: the command is at that step."""

    @contextmanager
    def reach(step: Step, mode: str) -> Iterator[tuple[Scene, Rented]]:
        with FakeHub({MODEL: goldens / "llama-tied"}) as far, ExitStack() as stack:
            far.faults.append(HubFault("stall", "/lfs/", times=10**6))
            stack.callback(far.release.set)
            start = {
                "node": lambda: image(ground.cache_home),
                "slow": lambda: image(ground.cache_home, changed("slow", tmp_path)),
                "stalled": lambda: image(warm(tmp_path / "cold"), HF_ENDPOINT=far.url),
            }[step.image]()
            it = stack.enter_context(scene(mode, start, step.offers, life=step.life or RUNS))
            it.fake.faults += [replace(fault) for fault in step.faults]
            command = stack.enter_context(Rented(it, tmp_path, step.command))
            command.hub = far if step.image == "stalled" else ground.hub
            command.reach(step)
            yield it, command

    return reach


class Killed:
    """Commands that were killed, each at a step: what they left has time to end by itself while other tests run."""

    def __init__(self) -> None:
        self.stack, self.at = ExitStack(), dict[str, tuple[Scene, Rented]]()


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    killed = Killed()
    with killed.stack:
        yield killed


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_killed(at: At, killed: Killed, step: Step) -> None:
    """What it rented bills on: the command could not end it."""
    it, command = killed.stack.enter_context(at(step, f"SIGKILL at {step.name}"))
    it.may_bill = True
    killed.at[step.name] = it, command
    command.kill()
    assert bool(it.ours) == (step.name != "search")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_interrupted(at: At, step: Step, number: signal.Signals) -> None:
    """It ends what it rented, and says why it ends. A second signal changes nothing."""
    with at(step, f"{number.name} at {step.name}") as (it, command):
        command.signal(number)
        command.hub.release.set()
        if it.rented:
            until(lambda: it.fake.calls("destroy"), "the end of a machine")
            command.signal(signal.SIGTERM)
        ended = command.end()
        if step.command == UP:
            assert ended.code == 0
            assert "cluster default is down; it cost $0.0" in ended.stderr
        else:
            assert ended.code == 1, ended.stderr
            told = "manifest unknown" if step.name == "teardown" else "cancelled"
            assert told in ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_swept(killed: Killed, quick: None, step: Step) -> None:
    """Links, broker and workers have ended by themselves, as their run is gone; `pp sweep` ends the machines."""
    it, command = killed.at[step.name]
    until(command.is_gone, f"the end of what ran at {step.name}")
    it.sweep()
    assert ("nothing is left over" in it.said[-1]) == (not it.rented)
    assert command.left_over() == []
