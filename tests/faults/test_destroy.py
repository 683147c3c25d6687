"""A machine that cannot be ended: it is named with the command that ends it, and the others are ended."""

from pathlib import Path

import pytest

from pptasks.errors import StageFailed, StillBilling
from tests.fake_vast import BAD_IMAGE, EXITS, Fault
from tests.faults.command import Rented
from tests.faults.conftest import Open
from tests.faults.light import Light
from tests.faults.scene import WORKING
from tests.integration.run import assert_one_line

NEVER = 10**6  # that it ends
HOW = [
    (0, {"status": 500, "body": "oops"}, "500: oops"),
    (1, {"status": 500, "body": "oops"}, "500: oops"),
    (0, {"status": 200, "body": {"success": True}}, "it still exists"),
    (1, {"status": 200, "body": {"success": True}}, "it still exists"),
    (0, {"status": 200, "body": {"success": False, "msg": "busy"}}, "200: busy"),
    (1, {"drop": True}, "ConnectError|ReadError|RemoteProtocolError"),
    (0, {"status": 404, "body": "<html>404</html>"}, "404: <html>404</html>"),
]


@pytest.mark.parametrize(("stage", "how", "why"), HOW)
def test_one_that_cannot_be_destroyed(scene: Open, stage: int, how: dict[str, object], why: str) -> None:
    with scene("destroy fails", Light) as it:
        it.may_bill = True
        kept = max(it.fake.instances) + 1 + stage
        it.fake.faults.append(Fault("destroy", match=f"/{kept}/", times=NEVER, **how))  # type: ignore[arg-type]
        words = rf"a machine may bill on: vast {kept} \(.*({why}).*\)"
        with pytest.raises(StillBilling, match=words) as caught, it.fleet(WORKING):
            pass
        assert [machine.id for machine in it.ours] == [kept]
        assert caught.value.instance_ids == (str(kept),)
        assert f"end it with: vastai destroy instance {kept}" in str(caught.value)
        it.fake.faults.clear()
        it.sweep()


def test_what_failed_first_is_told_too(scene: Open, tmp_path: Path) -> None:
    """The whole command: both errors, each id with its command; the next command ends them before it rents."""
    with scene("destroy fails", life=BAD_IMAGE) as it:
        it.may_bill = True
        it.fake.faults.append(Fault("destroy", 500, "oops", times=NEVER))
        with Rented(it, tmp_path) as command:
            ended = command.end()
        first, second = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
        assert ended.code == 1
        assert "stage 0 on machine 700" in first
        assert "2 machines may bill on" in second
        assert all(f"end it with: vastai destroy instance {machine.id}" in second for machine in it.ours)
        assert len(it.ours) == 2
        it.count()
        it.fake.faults.clear()
        before = it.rented
        with Rented(it, tmp_path) as command:
            ended = command.end()
        it.count(swept=True)
        assert ended.stderr.count("left over: vast") == 2
        assert_one_line(ended.stderr, "manifest unknown")
        assert not any(machine.bills for machine in before)
        assert it.ours == []


def test_a_machine_that_was_replaced_and_cannot_be_destroyed(scene: Open) -> None:
    """The run goes on with another; at its end that one is tried again, and named."""
    with scene("destroy fails", Light) as it:
        it.may_bill = True
        it.fake.lives[702] = EXITS
        it.fake.faults.append(Fault("destroy", 500, "oops", match=f"/{max(it.fake.instances) + 2}/", times=NEVER))
        with pytest.raises(StillBilling) as caught, it.fleet(WORKING):
            assert len(it.ours) == 3
        kept = it.rented[1]
        assert caught.value.instance_ids == (str(kept.id),)
        it.fake.faults.clear()
        it.sweep()


def test_an_error_and_a_machine_that_cannot_be_destroyed(scene: Open) -> None:
    with scene("destroy fails", life=BAD_IMAGE) as it:
        it.may_bill = True
        it.fake.faults.append(Fault("destroy", drop=True, times=NEVER))
        with pytest.raises(StillBilling) as caught, it.fleet():
            pass
        assert isinstance(caught.value.__context__, StageFailed)
        it.fake.faults.clear()
        it.sweep()
