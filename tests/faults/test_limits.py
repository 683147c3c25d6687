"""Time and money: the deadline passes, a laptop sleeps past it, the budget is spent."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.fleet import Fleet
from orchestrator.labels import Label
from pptasks.errors import BudgetReached, DeadlineReached
from tests.fake_vast import NEVER_RUNS, Fault
from tests.fake_vast.machine import Start
from tests.faults.command import UP, Rented, until
from tests.faults.conftest import Open
from tests.faults.scene import WORKING, Scene

ASLEEP_S = 9.0  # the deadline of commands that are stopped once their workers start
DEAR = 400.0  # dollars an hour


def test_the_deadline_passes_while_machines_are_made(scene: Open) -> None:
    with scene("deadline passed") as it:
        it.fake.faults.append(Fault("create", seconds=0.8))
        with pytest.raises(DeadlineReached, match="the deadline has passed"), it.fleet(WORKING, deadline_s=0.5):
            pass
        assert len(it.rented) == 1


def test_the_deadline_passes_while_machines_boot(scene: Open) -> None:
    with scene("deadline passed", life=NEVER_RUNS) as it:
        with pytest.raises(DeadlineReached, match="the deadline has passed"), it.fleet(WORKING, deadline_s=1.5):
            pass
        assert len(it.rented) == 2


def test_the_deadline_passes_while_text_comes(scene: Open, node: Start) -> None:
    with scene("deadline passed", node) as it, pytest.raises(DeadlineReached, match="the deadline has passed"):
        answer_under(it, lambda fleet: {"deadline": time.time()})


@pytest.mark.parametrize("while_", ["made", "boot"])
def test_the_budget_is_spent(scene: Open, while_: str) -> None:
    """In time for what it buys: about 0.1 dollars a second for each machine."""
    budget = {"made": 0.05, "boot": 0.3}[while_]
    with scene("budget reached") as it:
        for offer in it.fake.offers.values():
            offer["dph_total"] = DEAR
        it.fake.faults += [Fault("create", seconds=0.8)] if while_ == "made" else []
        words = rf"the budget of \${budget:.2f} is spent: give a higher --budget-usd"
        with pytest.raises(BudgetReached, match=words), it.fleet(WORKING, budget_usd=budget, max_price=DEAR):
            pass
        assert len(it.rented) == (1 if while_ == "made" else 2)


def test_the_budget_is_spent_while_text_comes(scene: Open, node: Start) -> None:
    with scene("budget reached", node) as it, pytest.raises(BudgetReached, match="is spent"):
        answer_under(it, lambda fleet: {"budget_usd": fleet.spent_usd})


def answer_under(it: Scene, limits: Callable[[Fleet], dict[str, float]]) -> None:
    """Once some text has come, these limits are the run's."""
    texts: list[str] = []

    def tighten(text: str) -> None:
        texts.append(text)
        if len(texts) == 5:
            fleet.terms = replace(fleet.terms, **limits(fleet))

    with it.fleet(WORKING) as fleet:
        it.ask(fleet, tighten)


def has_workers(it: Scene) -> bool:
    """Whether a worker runs on both machines: their links are up."""
    nodes = [psutil.Process(machine.process.pid) for machine in it.rented if machine.process]  # type: ignore[attr-defined]
    return [any("celery" in p.cmdline() for p in node.children()) for node in nodes] == [True, True]


def test_a_laptop_that_sleeps_past_the_deadline(scene: Open, node: Start, tmp_path: Path) -> None:
    """The machines stop working by themselves. When it wakes, the command ends them; when it never does, pp sweep."""
    mode = "asleep past the deadline"
    with ExitStack() as stack:
        scenes = [stack.enter_context(scene(mode, node, state=tmp_path / name)) for name in ("wakes", "dies")]
        commands = [stack.enter_context(Rented(it, tmp_path, UP, deadline=f"{ASLEEP_S}s")) for it in scenes]
        for command in commands:
            command.wait_for(lambda it=command.it: has_workers(it), "workers")
        ends = [Label.parse(it.rented[0].label).deadline for it in scenes]  # type: ignore[union-attr]
        until(lambda: time.time() > min(ends) - 1.0, "just before the deadline: a run that is gone would end them too")
        asleep = [process for command in commands for process in command.processes()]
        for process in asleep:
            process.suspend()
        for it in scenes:
            codes = [machine.process for machine in it.rented if machine.process]
            until(lambda codes=codes: all(p.poll() is not None for p in codes), "the end of the workers")
            assert [p.poll() for p in codes] == [3, 3], "the deadline"
            assert len(it.ours) == 2
        (wakes, dies), (woken, dead) = scenes, commands
        dead.kill()
        dies.may_bill = True
        for process in asleep:
            if process.is_running():
                process.resume()
        ended = woken.end()
        assert (ended.code, wakes.ours) == (1, [])
        assert "error: the deadline has passed" in ended.stderr
        until(dead.is_gone, "the end of what it started")
        dies.sweep()
