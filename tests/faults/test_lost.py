"""What is lost while a request is answered: a stage, its host, its link, the link that the run serves, the broker."""

import time
from collections.abc import Callable

import psutil
import pytest

from pptasks.errors import BrokerError, LinkError, StageFailed
from tests.fake_vast import Machine, Started
from tests.fake_vast.machine import Start
from tests.faults.conftest import Open
from tests.faults.scene import WORKING, Scene

BEFORE = 5  # pieces of text that come before it happens


class Strike:
    """Does `blow` once, when some text has come."""

    def __init__(self, blow: Callable[[], None]):
        self._left, self._blow = BEFORE, blow

    def __call__(self, text: str) -> None:
        self._left -= 1
        if self._left == 0:
            self._blow()

    @property
    def struck(self) -> bool:
        return self._left <= 0


def process_of(machine: Machine) -> psutil.Process:
    return psutil.Process(machine.process.pid)  # type: ignore[union-attr]


def child(parent: psutil.Process, *words: str) -> psutil.Process:
    (found,) = [p for p in parent.children(recursive=True) if all(word in " ".join(p.cmdline()) for word in words)]
    return found


def ask_and_lose(it: Scene, error: type[Exception], match: str, blow: Callable[[], None], **how: object) -> Exception:
    strike = Strike(blow)
    with pytest.raises(error, match=match) as caught, it.fleet(WORKING, **how) as fleet:  # type: ignore[arg-type]
        it.ask(fleet, strike)
    assert strike.struck
    return caught.value


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_killed(scene: Open, node: Start, stage: int) -> None:
    """All of it at once, as when a host loses power but still answers for it. Its last lines are shown."""
    with scene("a stage lost mid-decode", node) as it:
        words = rf"stage {stage} on machine 70{2 * stage} .* its machine has ended \(exited: exit code -9\)"
        error = ask_and_lose(it, StageFailed, words, lambda: it.ours[stage].process.kill())  # type: ignore[union-attr]
        assert "SecurityWarning" in "\n".join(error.log)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_host_that_vanishes(scene: Open, node: Start, stage: int) -> None:
    def vanish() -> None:
        lost = it.ours[stage]
        lost.ended_at = time.time()
        lost.process.kill()  # type: ignore[union-attr]

    with scene("a stage lost mid-decode", node) as it:
        words = rf"stage {stage} on machine 70{2 * stage} .* its machine is gone: its provider does not list it"
        ask_and_lose(it, StageFailed, words, vanish)


def test_a_worker_that_is_killed(scene: Open, node: Start) -> None:
    """Out of memory: its node tells so, and ends."""
    with scene("a stage lost mid-decode", node) as it:
        words = r"stage 1 on machine 702 .* (its machine has ended \(exited: exit code 1\)|was lost: it is silent)"
        error = ask_and_lose(it, StageFailed, words, lambda: child(process_of(it.ours[1]), "celery").kill())
        assert "the worker was ended by SIGKILL" in "\n".join(error.log)  # type: ignore[attr-defined]


def test_the_link_that_the_run_serves_is_killed_mid_decode(scene: Open, node: Start) -> None:
    with scene("link lost", node) as it:
        words = r"link was killed by SIGKILL"
        ask_and_lose(it, LinkError, words, lambda: child(psutil.Process(), "pptasks.link", "serve").kill(), linked=True)


def test_the_link_that_the_run_serves_is_killed_while_stages_load(scene: Open, node: Start) -> None:
    def start(machine: Machine) -> Started:
        if machine.env["STAGE"] == "1":
            child(psutil.Process(), "pptasks.link", "serve").kill()
        return node(machine)

    with scene("link lost", start) as it:
        with pytest.raises(LinkError, match=r"link was killed by SIGKILL"), it.fleet(WORKING, linked=True):
            pass
        assert len(it.rented) == 2


def test_a_link_of_a_machine_is_killed_and_the_answer_is_the_same(scene: Open, node: Start) -> None:
    with scene("link lost", node) as it, it.fleet(WORKING, linked=True) as fleet:
        alone = it.ask(fleet)["token_ids"]
        strike = Strike(lambda: child(process_of(it.ours[1]), "pptasks.link").kill())
        assert it.ask(fleet, strike)["token_ids"] == alone
        assert strike.struck


def test_the_broker_is_killed(scene: Open, node: Start) -> None:
    with scene("broker lost", node) as it:
        words = r"the (embedded )?broker (has ended|was lost)"
        ask_and_lose(it, BrokerError, words, lambda: child(psutil.Process(), "valkey").kill())
