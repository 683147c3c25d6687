"""The client against the fake API, over sockets: lives of machines, faults at each call, limits, what is billed."""

import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import orchestrator.vastcalls as vastcalls
from orchestrator.ledger import Ledger
from orchestrator.offers import choose
from orchestrator.provider import Need, Offer, Order, State
from orchestrator.vast import Vast
from pptasks.errors import BadKey, CreatedAnyway, NoAnswer, NoCredit, OfferGone, PPError, ProviderError
from tests.fake_vast import (
    BAD_IMAGE,
    EXITS,
    GOES_OFFLINE,
    NEVER_RUNS,
    OCI_FAILS,
    VANISHES,
    FakeVast,
    Fault,
    offers,
    run_args,
)
from tests.fake_vast.fake import MIN_DISK_GB

ROOT = Path(__file__).parents[2]
NEED = Need(min_vram_bytes=8 * 10**9)
WaitUntil = Callable[..., None]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries as short as the fake's limits."""
    monkeypatch.setattr(vastcalls, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(vastcalls, "MOST_WAIT_S", 0.1)
    monkeypatch.setattr(vastcalls, "PATIENCE_S", 1.5)


def client(fake: FakeVast, key: str = "") -> Vast:
    return Vast(key or fake.key, fake.url, gaps_s=fake.gaps_s, sleep=lambda s: threading.Event().wait(min(s, 0.1)))


def order(label: str = "pptasks-run-0", command: str = "exec sleep 60", **env: str) -> Order:
    return Order("image", label, command, env, 20)


def test_a_whole_life(wait_until: WaitUntil, tmp_path: Path) -> None:
    """Search, choose, rent, run, read the log, destroy; with the ledger beside it, within the limits (scaled)."""
    ledger = Ledger(tmp_path / "rentals.sqlite")
    with FakeVast(offers(6), start=run_args, scale=0.02) as fake, client(fake) as vast:
        choice = choose(vast.search(NEED), NEED, 2)
        assert [o.machine_id for o in choice.stages] == ["700", "702"]  # both in Sweden
        assert len(choice.spares) == 4
        ids = []
        for stage, offer in enumerate(choice.stages):
            label = f"pptasks-run-{stage}"
            ledger.intend(label, run="run", stage=stage, provider="vast", offer_id=offer.id, deadline=0.0)
            command = 'echo "stage $STAGE"; echo bad >&2; sleep 60 & exec sleep 60'
            ids.append(vast.create(offer, order(label, command, STAGE=str(stage))))
            ledger.created(label, ids[-1])
        assert [m.id for m in fake.billing] == [int(i) for i in ids]
        for stage, instance_id in enumerate(ids):
            wait_until(lambda i=instance_id: vast.get(i).state is State.RUNNING, what="running")
            wait_until(lambda i=instance_id: vast.logs(i, 10).endswith("bad"), what="the log")
            assert vast.logs(instance_id, 10) == f"stage {stage}\nbad"
        groups = [machine.process.pid for machine in fake.billing]
        assert [i.id for i in vast.list("pptasks-run-")] == ids
        assert fake.cost_usd > 0
        for instance_id in ids:
            vast.destroy(instance_id)
            ledger.destroyed(instance_id)
        assert (fake.billing, vast.list("pptasks-"), ledger.open_rows()) == ([], [], [])
        assert [vast.get(i) for i in ids] == [None, None]
        for group in groups:  # the `sleep` in the background too
            wait_until(lambda g=group: not group_exists(g), what="the end of its processes")
        assert fake.too_fast == []
        assert all(r.host == ("localhost" if r.kind == "result" else "127.0.0.1") for r in fake.log)
        assert all(bool(r.authorization) == (r.kind != "result") for r in fake.log)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


LIVES = [
    (NEVER_RUNS, State.LOADING, "Pulling"), (BAD_IMAGE, State.ENDED, "manifest unknown"),
    (OCI_FAILS, State.ENDED, "OCI runtime create failed"), (EXITS, State.ENDED, "exit code 1"),
    (GOES_OFFLINE, State.ENDED, "offline"),
]  # fmt: skip


@pytest.mark.parametrize(("life", "state", "told"), LIVES)
def test_what_becomes_of_machines(wait_until: WaitUntil, life: tuple, state: State, told: str) -> None:
    with FakeVast(offers(2)) as fake, client(fake) as vast:
        fake.lives[700] = life
        offer = next(o for o in vast.search(NEED) if o.machine_id == "700")
        instance_id = vast.create(offer, order())
        wait_until(lambda: vast.get(instance_id).state is state and told in vast.get(instance_id).status)
        assert len(fake.billing) == 1
        vast.destroy(instance_id)
        assert fake.billing == []


def test_a_machine_that_vanishes_and_one_whose_process_ends(wait_until: WaitUntil) -> None:
    with FakeVast(offers(2), start=run_args) as fake, client(fake) as vast:
        first, second = vast.search(NEED)[:2]
        fake.lives[int(first.machine_id)] = VANISHES
        gone, ends = vast.create(first, order()), vast.create(second, order("pptasks-run-1", "exit 3"))
        wait_until(lambda: vast.get(gone) is None, what="gone")
        vast.destroy(gone)
        wait_until(lambda: vast.get(ends).status == "exited: exit code 3", what="exited")
        assert vast.get(ends).state is State.ENDED
        assert [m.id for m in fake.billing] == [int(ends)]


def test_an_offer_that_is_taken_meanwhile() -> None:
    for status in (400, 404, 410):
        with FakeVast(offers(2), gone=status) as fake, client(fake) as vast:
            offer = vast.search(NEED)[0]
            fake.rent_as_another()
            with pytest.raises(OfferGone):
                vast.create(offer, order())
            assert [o.machine_id for o in vast.search(NEED)] == ["701"]
            assert len(fake.billing) == 1


def test_no_credit_and_a_wrong_key() -> None:
    with FakeVast(offers(1), credit=False) as fake, client(fake) as vast:
        with pytest.raises(NoCredit):
            vast.create(vast.search(NEED)[0], order())
        with client(fake, "0" * 64) as other, pytest.raises(BadKey):
            other.search(NEED)
        assert fake.instances == {}


def test_filters_that_the_server_does_not_apply_are_applied_by_the_choice() -> None:
    market = [*offers(3), *({**o, "id": 9, "machine_id": 9, "gpu_ram": 4000, "dph_total": 0.01} for o in offers(1))]
    with FakeVast(market, ignored=frozenset({"gpu_ram"})) as fake, client(fake) as vast:
        found = vast.search(NEED)
        assert found[0].machine_id == "9"
        assert "9" not in {o.machine_id for o in choose(found, NEED, 2).stages}


def test_a_spot_machine_is_rented_at_our_price() -> None:
    with FakeVast(offers(1)) as fake, client(fake) as vast:
        [offer] = vast.search(Need(0, spot=True))
        assert offer.price_usd_hour == 0.05
        instance_id = vast.create(offer, Order("image", "l", "c", {}, 20, spot_price_usd_hour=0.06))
        assert vast.get(instance_id).price_usd_hour == 0.06


CREATES = [
    (Fault("create", 500, "oops", takes_effect=True), "made"),
    (Fault("create", 502, "<html>", takes_effect=False), NoAnswer),
    (Fault("create", drop=True, takes_effect=True), "made"),
    (Fault("create", drop=True), NoAnswer),
    (Fault("create", 200, "", takes_effect=True), "made"),
    (Fault("create", 200, {"success": True}, takes_effect=True), "made"),
    (Fault("create", 200, {"success": False, "msg": "no"}), ProviderError),
    (Fault("create", 200, {"success": False, "msg": "no", "new_contract": 31000000}, takes_effect=True), CreatedAnyway),
    (Fault("create", 500, {"success": False, "new_contract": 31000000}, takes_effect=True), CreatedAnyway),
    (Fault("create", 400, {"success": False, "error": "invalid_args"}), ProviderError),
    (Fault("create", 429, "slow", times=3), "made"),
    (Fault("create", 429, {"detail": "slow"}, {"Retry-After": "1"}), "made"),
    (Fault("create", seconds=1.5, takes_effect=True), "made"),  # longer than the client waits
    (Fault("create", 429, "slow", times=99), NoAnswer),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "outcome"), CREATES, ids=range(len(CREATES)))
def test_faults_of_a_create_leave_at_most_one_machine_and_it_can_be_found(
    fault: Fault, outcome: object, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vastcalls, "TIMEOUT", 0.5)
    with FakeVast(offers(3)) as fake, client(fake) as vast:
        offer = vast.search(NEED)[0]
        fake.faults.append(fault)
        came_out, made = attempt(vast, offer)
        assert came_out == outcome
        assert made == (str(fake.billing[0].id) if fake.billing else None)
        assert (made is not None) == (outcome in ("made", CreatedAnyway))
        assert len(fake.instances) <= 1
        for instance in vast.list("pptasks-run-"):
            vast.destroy(instance.id)
        assert fake.billing == []


def attempt(vast: Vast, offer: Offer) -> tuple[object, str | None]:
    """How a create comes out, and the instance that we know of then."""
    try:
        return "made", vast.create(offer, order())
    except ProviderError as error:
        return type(error), getattr(error, "instance_id", None)


def test_a_create_that_takes_effect_late_is_found_while_we_look() -> None:
    with FakeVast(offers(3)) as fake, client(fake) as vast:
        fake.faults += [Fault("create", 504, "timeout", takes_effect=True),
                        Fault("list", 200, {"success": True, "instances": [], "next_token": None})]  # fmt: skip
        assert vast.create(vast.search(NEED)[0], order()) == str(fake.billing[0].id)
        assert len(fake.calls("create")) == 1


DESTROYS = [
    Fault("destroy", 500, "x", times=3), Fault("destroy", 429, "x", times=5), Fault("destroy", drop=True, times=2),
    Fault("destroy", 500, "x", takes_effect=True), Fault("destroy", drop=True, takes_effect=True),
    Fault("destroy", 200, {"success": True}), Fault("destroy", 200, {"success": False, "msg": "busy"}),
    Fault("show", 500, "x", times=3), Fault("show", 429, "x", times=3), Fault("show", drop=True, times=3),
    Fault("show", 200, "<html>"), Fault("destroy", 404, "<html>404</html>"),
]  # fmt: skip


@pytest.mark.parametrize("fault", DESTROYS, ids=range(len(DESTROYS)))
def test_faults_of_a_destroy_do_not_leave_it_billing(fault: Fault, quick: None) -> None:
    with FakeVast(offers(1)) as fake, client(fake) as vast:
        instance_id = vast.create(vast.search(NEED)[0], order())
        fake.faults.append(fault)
        vast.destroy(instance_id)
        assert fake.billing == []
        vast.destroy(instance_id)  # again: nothing to do


def test_a_destroy_that_never_succeeds_is_told(quick: None) -> None:
    with FakeVast(offers(1)) as fake, client(fake) as vast:
        instance_id = vast.create(vast.search(NEED)[0], order())
        fake.faults.append(Fault("destroy", 200, {"success": True}, times=99))
        with pytest.raises(NoAnswer, match=f"instance {instance_id} is not confirmed to be destroyed"):
            vast.destroy(instance_id)
        assert len(fake.billing) == 1


def test_many_pages_and_only_ours() -> None:
    with FakeVast(offers(120)) as fake, client(fake) as vast:
        for i in range(120):
            fake.rent_as_another(f"pptasks-x-{i}" if i % 2 else ("somebody's", None)[i % 4 // 2])
        assert len(vast.list("pptasks-")) == 60
        assert len(fake.calls("list")) == 5
        fake.faults.append(Fault("list", 500, "x", skip=3, times=99))
        with Vast(fake.key, fake.url, gaps_s=fake.gaps_s, clock=Steps()) as hasty, pytest.raises(NoAnswer):
            hasty.list("pptasks-")


class Steps:
    """A clock that runs ten seconds at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def test_the_old_list_is_no_empty_list() -> None:
    with FakeVast(offers(1)) as fake, client(fake) as vast:
        body = {"success": False, "error": "deprecated_endpoint"}
        fake.faults.append(Fault("list", 410, body))
        with pytest.raises(ProviderError, match="update pptasks"):
            vast.list("pptasks-")
        answer = vast._calls.call("list", "GET", "/api/v0/instances/")
        assert (answer.status, answer.fields["error"]) == (410, "deprecated_endpoint")


def test_logs_wait_until_they_are_there(quick: None) -> None:
    with FakeVast(offers(1), log_s=0.3) as fake, client(fake) as vast:
        instance_id = vast.create(vast.search(NEED)[0], order())
        fake.billing[0].log.write_text("".join(f"{i}\n" for i in range(50)))
        assert vast.logs(instance_id, 3) == "47\n48\n49"
        assert len(fake.calls("result")) > 1


def test_many_threads_are_never_too_fast() -> None:
    """Eight machines rented, shown and destroyed by eight threads at once, with one client."""
    with FakeVast(offers(8), scale=0.02) as fake, client(fake) as vast:
        found = vast.search(NEED)

        def life(i: int) -> None:
            instance_id = vast.create(found[i], order(f"pptasks-run-{i}"))
            assert vast.get(instance_id) is not None
            assert instance_id in [instance.id for instance in vast.list("pptasks-")]
            vast.destroy(instance_id)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(life, range(8)))
        assert fake.too_fast == []
        assert (len(fake.instances), fake.billing) == (8, [])


def test_the_fake_counts_who_is_too_fast(quick: None) -> None:
    with FakeVast(offers(1), scale=0.1) as fake:
        with Vast(fake.key, fake.url, gaps_s=dict.fromkeys(fake.gaps_s, 0.0)) as vast:
            for _ in range(2):
                vast.list("")
        assert [kind for kind, _ in fake.too_fast][:1] == ["list"]
        assert 429 in [request.status for request in fake.log]


def test_the_fake_refuses_what_the_api_refuses() -> None:
    with FakeVast(offers(1)) as fake, client(fake) as vast:
        assert vast.get("31") is None
        for query in ({"limit": 65}, {"gpu_rom": {"eq": 1}}, {"gpu_ram": {"like": 1}}, {"type": "free"}, []):
            answer = vast._calls.call("search", "POST", "/api/v0/bundles/", body=query)
            assert (answer.status, answer.fields["error"]) == (400, "invalid_args")
        for wrong in ({"disk": MIN_DISK_GB - 1}, {"image": None}, {"env": {"A": "x" * 257}}, {"env": {"A": 1}}):
            answer = vast._calls.call("create", "PUT", "/api/v0/asks/5000/", body={"image": "i", "disk": 8, **wrong})
            assert (answer.status, fake.instances) == (400, {})


def test_the_key_is_in_no_url_log_or_error(caplog: pytest.LogCaptureFixture, quick: None) -> None:
    """Every call fails with an answer that shows the key, in the body, the headers and the state of a machine."""
    caplog.set_level(logging.DEBUG)
    texts = []
    with FakeVast(offers(2)) as fake, client(fake) as vast:
        offer = vast.search(NEED)[0]
        instance_id = vast.create(offer, order(PP_SECRET="f00d" * 16))
        fake.billing[0].now("loading", f"docker run -e KEY={fake.key} -e PP_SECRET={'f00d' * 16}")
        texts.append(repr(vast.get(instance_id)))
        for status in (200, 302, 400, 401, 404, 500):
            for body in (f"you sent {fake.key}", {"error": fake.key, "msg": f"PP_SECRET={'f00d' * 16}"}):
                for call in (
                    lambda: vast.search(NEED), lambda: vast.create(offer, order(PP_SECRET="f00d" * 16)),
                    lambda: vast.get(instance_id), lambda: vast.list("x"), lambda: vast.logs(instance_id, 5),
                ):  # fmt: skip
                    kinds = ("search", "create", "show", "list", "logs")
                    fake.faults[:] = [Fault(k, status, body, {"X-Key": fake.key}, times=3) for k in kinds]
                    try:
                        texts.append(repr(call()))
                    except PPError as error:
                        texts.append("".join(traceback.format_exception(error)) + repr(vars(error)))
        fake.faults.clear()
        vast.destroy(instance_id)
        assert all(fake.key not in request.path for request in fake.log)
    assert len(texts) == 61
    told = "\n".join(texts) + caplog.text
    assert fake.key[:12] not in told
    assert "f00df00d" not in told


def test_it_runs_on_its_own(wait_until: WaitUntil) -> None:
    command = [sys.executable, "-m", "tests.fake_vast", "--port", "0", "--offers", "2", "--scale", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url, key = process.stdout.readline().split("  VAST_API_KEY=")
        with Vast(key.strip(), url) as vast:
            instance_id = vast.create(vast.search(NEED)[0], order(command="echo hello; exec sleep 60"))
            wait_until(lambda: vast.get(instance_id).state is State.RUNNING)
            wait_until(lambda: vast.logs(instance_id, 5) == "hello")
    finally:
        process.terminate()
        told = process.communicate(timeout=20)[0]
    assert process.returncode == 0
    assert told.startswith("1 rented, 1 still billing, $0.0000")
    assert ", 0 too fast" in told
