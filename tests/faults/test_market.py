"""What the market refuses: too few offers, an offer that is gone, no credit, a key that is refused, lost answers."""

import threading
import time
from typing import Any

import pytest

from orchestrator.fleet import Fleet
from pptasks.errors import BadKey, NoCredit, ProviderError, StillBilling
from tests.fake_vast import FakeVast, Fault
from tests.faults.conftest import Open
from tests.faults.light import Light
from tests.faults.scene import SLEEP, WORKING, Scene

GONE = {"success": False, "error": "no_such_ask", "msg": "error 404/3603: no_such_ask is not available."}
POOR = {"success": False, "error": "insufficient_credit", "msg": "Your account lacks credit; see the billing page."}
REFUSED = {"success": False, "error": "auth_error", "msg": "Invalid user key"}


def comes_up(it: Scene, machines: int = 2, **how: object) -> None:
    """A run of two stages becomes ready all the same; `machines` were made for it."""
    with it.fleet(WORKING, **how):  # type: ignore[arg-type]
        assert len(it.ours) == 2
    assert len(it.rented) == machines


def fails(it: Scene, error: type[Exception], match: str) -> Exception:
    with pytest.raises(error, match=match) as caught, it.fleet(command=SLEEP):
        pass
    return caught.value


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_offers_than_stages(scene: Open, n: int) -> None:
    with scene("fewer offers than stages", n=n) as it:
        fails(it, ProviderError, rf"2 machines are needed; of {n} offers {n} fit")
        assert it.rented == []


def test_offers_that_are_all_too_dear(scene: Open) -> None:
    with scene("fewer offers than stages", ignored=frozenset({"dph_total"})) as it:
        for offer in it.fake.offers.values():
            offer["dph_total"] = 9.0
        fails(it, ProviderError, r"of 6 offers 0 fit.*--max-price")
        assert it.rented == []


@pytest.mark.parametrize(("stage", "status"), [(0, 400), (0, 404), (1, 404), (1, 410)])
def test_an_offer_that_is_gone(scene: Open, stage: int, status: int) -> None:
    with scene("offer gone at create", Light) as it:
        it.fake.faults.append(Fault("create", status, GONE, skip=stage))
        comes_up(it)
        assert f"stage {stage}: offer" in it.told
        assert "is gone: somebody else rented it; taking another offer" in it.told


def test_all_offers_are_gone(scene: Open) -> None:
    with scene("offer gone at create") as it:
        it.fake.faults.append(Fault("create", 404, GONE, times=99, skip=1))
        fails(it, ProviderError, r"stage 1 has no machine, and no offer is left \(6 machines tried\)")
        assert len(it.rented) == 1


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("status", [400, 402])
def test_no_credit(scene: Open, stage: int, status: int) -> None:
    with scene("no credit") as it:
        it.fake.faults.append(Fault("create", status, POOR, times=99, skip=stage))
        fails(it, NoCredit, "the vast.ai account has no credit .* add some")
        assert (len(it.rented), len(it.fake.calls("create"))) == (stage, stage + 1)


@pytest.mark.parametrize(
    ("kind", "skip", "status"),
    [
        ("search", 0, 401),
        ("search", 0, 403),
        ("create", 0, 403),
        ("create", 1, 401),
        ("list", 0, 401),
        ("list", 2, 403),
    ],
)
def test_a_key_that_is_refused_once(scene: Open, kind: str, skip: int, status: int) -> None:
    """Nothing is tried again with it, but for ending what there is."""
    with scene("key refused") as it:
        it.fake.faults.append(Fault(kind, status, REFUSED, skip=skip))
        fails(
            it,
            BadKey,
            rf"vast.ai refuses the key for {kind} \({status}: auth_error, Invalid user key\): check VAST_API_KEY",
        )
        assert len(it.fake.calls("create")) == {"search": 0, "create": skip + 1, "list": 2}[kind]


def keep(fleet: Fleet, *, while_: bool) -> None:
    while while_:
        fleet.tend()


REVOKED = [("create", 1, 1), ("list", 3, 2), ("destroy", 0, 2)]  # first call that is refused, and how many bill then


@pytest.mark.parametrize(("kind", "skip", "machines"), REVOKED)
def test_a_key_that_is_revoked_for_good(scene: Open, kind: str, skip: int, machines: int) -> None:
    """The machines cannot be ended then: they are named, with the command; with the key back, pp sweep ends them."""
    with scene("key revoked", Light) as it:
        it.may_bill = True
        later = {"create": ("list", "show", "destroy"), "list": ("show", "destroy"), "destroy": ()}[kind]
        it.fake.faults += [Fault(other, 401, REFUSED, times=99) for other in later]
        it.fake.faults.append(Fault(kind, 401, REFUSED, skip=skip, times=99))
        with pytest.raises(StillBilling) as caught, it.fleet(WORKING) as fleet:
            keep(fleet, while_=kind != "destroy")
        error, ids = caught.value, {str(machine.id) for machine in it.ours}
        assert (len(ids), set(error.instance_ids)) == (machines, ids)
        assert all(f"vastai destroy instance {i}" in str(error) for i in ids)
        assert f"refuses the key for {kind}" in str(error if kind == "destroy" else error.__context__)
        it.fake.faults.clear()
        it.sweep()


@pytest.mark.parametrize(("stage", "status"), [(0, 200), (1, 200), (1, 500)])
def test_a_refusal_that_makes_a_machine(scene: Open, stage: int, status: int) -> None:
    with scene("refused, and yet made", Light) as it:
        contract = max(it.fake.instances) + 1 + stage
        body = {"success": False, "msg": "try again", "new_contract": contract}
        it.fake.faults.append(Fault("create", status, body, takes_effect=True, skip=stage))
        comes_up(it, machines=3)
        assert f"and yet made instance {contract}; taking another offer" in it.told
        assert not it.fake.instances[contract].bills


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, {"drop": True}),
        (1, {"drop": True}),
        (0, {"status": 504, "body": "<html>"}),
        (1, {"status": 200, "body": ""}),
    ],
)
@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_create_without_an_answer(scene: Open, stage: int, how: dict[str, Any], takes_effect: bool) -> None:
    """What was made is used; else another offer is taken. Never the same call again."""
    with scene("create timed out", Light) as it:
        it.fake.faults.append(Fault("create", takes_effect=takes_effect, skip=stage, **how))
        comes_up(it)
        assert len(it.fake.calls("create")) == (2 if takes_effect else 3)
        assert ("no instance has the label" in it.told) == (not takes_effect)


@pytest.mark.parametrize("after_s", [0.15, 0.8])
def test_a_create_that_takes_effect_late(scene: Open, after_s: float) -> None:
    """While we look for it: it is used. After we gave up: it is ended with the others, though its id was never told."""
    with scene("create timed out", Light) as it:
        it.fake.faults.append(Fault("create", drop=True))
        late = threading.Thread(target=create_late, args=(it.fake, after_s))
        late.start()
        with it.fleet(WORKING):
            late.join()
        assert len(it.rented) == (2 if after_s < 0.5 else 3)


def test_creates_that_are_never_answered(scene: Open) -> None:
    with scene("create timed out") as it:
        it.fake.faults.append(Fault("create", drop=True, times=99, takes_effect=False))
        fails(it, ProviderError, "vast.ai did not answer create")
        assert len(it.fake.calls("create")) == 3


def create_late(fake: FakeVast, after_s: float) -> None:
    """Do what the first create asked for, so long after it."""
    while not fake.calls("create"):
        time.sleep(0.01)
    (asked,) = fake.calls("create")[:1]
    time.sleep(after_s)
    fake.create(asked.path.strip("/").rsplit("/", 1)[-1], asked.body)
