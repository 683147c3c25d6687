"""What is left, and its end, with providers that do as they are told."""

import threading
import time
from pathlib import Path

import pytest

from orchestrator import sweep
from orchestrator.labels import Label
from orchestrator.ledger import Ledger
from orchestrator.provider import Instance, Instances, Need, Offer, Offers, Order, State
from orchestrator.sweep import Leftover
from pptasks.errors import BadKey, NoAnswer, PPError, ProviderError, StorageError

OWNER, RUN = "0123abcd", "run-aa"
NOW = 1000.0


def label(owner: str = OWNER, run: str = RUN, stage: int = 0, deadline: int = 2000, nonce: str = "0000") -> str:
    return str(Label(owner, run, stage, deadline, nonce))


def instance(instance_id: str, text: str) -> Instance:
    return Instance(instance_id, text, State.RUNNING, "running", 0.5, 1.0)


class Memory:
    """A provider whose machines are in a dict."""

    def __init__(self, name: str, *instances: Instance):
        self.name = name
        self.there = {i.id: i for i in instances}
        self.calls: list[tuple[str, str]] = []
        self.errors: dict[str, PPError | ValueError] = {}  # by call
        self.busy, self.most_busy, self.lock = 0, 0, threading.Lock()

    def _called(self, what: str, argument: str) -> None:
        self.calls.append((what, argument))
        if what in self.errors:
            raise self.errors[what]

    def search(self, need: Need) -> Offers:
        raise NotImplementedError

    def create(self, offer: Offer, order: Order) -> str:
        raise NotImplementedError

    def get(self, instance_id: str) -> Instance | None:
        self._called("get", instance_id)
        return self.there.get(instance_id)

    def list(self, label_prefix: str) -> Instances:
        self._called("list", label_prefix)
        return [i for i in self.there.values() if i.label.startswith(label_prefix)]

    def destroy(self, instance_id: str) -> None:
        with self.lock:
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
        try:
            self._called("destroy", instance_id)
            time.sleep(0.05)
            self.there.pop(instance_id, None)
        finally:
            with self.lock:
                self.busy -= 1

    def logs(self, instance_id: str, lines: int) -> str:
        raise NotImplementedError


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "rentals.sqlite")


def rent(ledger: Ledger, text: str, instance_id: str | None, provider: str = "vast", run: str = RUN) -> None:
    ledger.intend(text, run=run, stage=0, provider=provider, offer_id="5", deadline=2000)
    if instance_id is not None:
        ledger.created(text, instance_id)


def find(ledger: Ledger, *providers: Memory, said: list[str] | None = None, **more: object) -> list[Leftover]:
    more = {"is_live": lambda run: False} | more
    say = (lambda line: None) if said is None else said.append
    return sweep.find(ledger, providers, say, owner=OWNER, now=NOW, **more)  # type: ignore[arg-type]


def end(ledger: Ledger, found: list[Leftover], *providers: Memory) -> tuple[list[Leftover], list[str]]:
    said: list[str] = []
    return sweep.end(found, providers, ledger, said.append, patience_s=0.2), said


def test_a_dead_run_is_ended_and_confirmed(ledger: Ledger) -> None:
    vast = Memory("vast", instance("1", label()), instance("2", label(stage=1)), instance("9", "pptasks-evil"))
    rent(ledger, label(), "1")
    found = find(ledger, vast)
    assert [(x.instance_id, x.why, x.price_usd_hour) for x in found] == [
        ("1", "its run has ended", 0.5), ("2", "its run has ended", 0.5),
    ]  # fmt: skip
    unconfirmed, said = end(ledger, found, vast)
    assert (unconfirmed, ledger.open_rows(), list(vast.there)) == ([], [], ["9"])
    assert len(said) == 2
    assert all(line.endswith("ended") for line in said)


def test_what_is_not_ours_is_not_found(ledger: Ledger) -> None:
    other = label("ffffffff")
    vast = Memory("vast", *(instance(str(i), text) for i, text in enumerate(["pptasks-evil", "pptasks-", other])))
    assert find(ledger, vast) == find(ledger, vast, all_=True) == find(ledger, vast, run=RUN) == []


@pytest.mark.parametrize(("owner", "deadline", "is_due"), [(OWNER, 999, True), ("ffffffff", 999, True),
                                                           (OWNER, 1000, False), (OWNER, 0, False)])  # fmt: skip
def test_past_its_deadline_alive_or_not_and_whosever(ledger: Ledger, owner: str, deadline: int, is_due: bool) -> None:
    """0: it has none."""
    vast = Memory("vast", instance("1", label(owner, deadline=deadline)))
    found = find(ledger, vast, is_live=lambda run: True)
    assert [x.why for x in found] == ["past its deadline"] * is_due


def test_living_runs_are_left_alone_but_for_all_and_for_their_own_end(ledger: Ledger) -> None:
    dead = "run-bb"
    vast = Memory("vast", instance("1", label()), instance("2", label(run=dead)))
    rent(ledger, label(), "1")
    rent(ledger, label(nonce="0001"), None)
    rent(ledger, label(run=dead), "2", run=dead)

    def ids(**more: object) -> list[str | None]:
        return [x.instance_id for x in find(ledger, vast, is_live=lambda run: run == RUN, **more)]

    assert ids() == ["2"]
    assert ids(all_=True) == ["1", "2", None]
    assert ids(run=RUN) == ["1", None]


def test_an_id_that_is_another_machine_now(ledger: Ledger) -> None:
    """Left alone, and nothing is marked: seen in the list, or, if there is no list, just before its end."""
    vast = Memory("vast", instance("1", "somebody else's"), instance("2", "pptasks-of-another"))
    rent(ledger, label(), "2")
    rent(ledger, label(stage=1), "1")
    found = find(ledger, vast)
    assert [x.instance_id for x in found] == ["1"]  # its label is not under our prefix: not in the list
    vast.errors["list"] = NoAnswer("vast.ai does not answer")
    said: list[str] = []
    assert {x.instance_id for x in find(ledger, vast, said=said)} == {"1", "2"}
    assert said == ["vast.ai does not answer; going on with what is known"]
    unconfirmed, told = end(ledger, find(ledger, vast), vast)
    assert {x.instance_id for x in unconfirmed} == {"1", "2"}
    assert all("now, so it may be another's: not ended" in x.why for x in unconfirmed)
    assert told == []
    assert set(vast.there) == {"1", "2"}
    assert len(ledger.open_rows()) == 2
    assert not [call for call in vast.calls if call[0] == "destroy"]


def test_equal_ids_of_two_providers(ledger: Ledger) -> None:
    rent(ledger, label(), "1", provider="vast")
    vast, local = Memory("vast"), Memory("local", instance("1", label("ffffffff")))
    assert [(x.provider, x.instance_id) for x in find(ledger, vast, local)] == [("vast", "1")]
    assert find(ledger, local) == []  # vast is not at hand
    assert end(ledger, find(ledger, vast), vast)[0] == []
    assert (list(local.there), ledger.open_rows()) == (["1"], [])


def test_nothing_can_be_known(ledger: Ledger) -> None:
    vast = Memory("vast")
    vast.errors["list"] = ProviderError("no list")
    with pytest.raises(ProviderError, match="no list"):
        find(ledger, vast)
    assert find(ledger, vast, Memory("local")) == []


def test_a_ledger_that_fails_hides_nothing(ledger: Ledger) -> None:
    vast = Memory("vast", instance("1", label()))
    ledger.path.unlink()
    ledger.path.mkdir()
    said: list[str] = []
    found = find(ledger, vast, said=said)
    assert [x.instance_id for x in found] == ["1"]
    assert "cannot use the ledger" in said[0]
    unconfirmed, told = end(ledger, found, vast)
    assert (unconfirmed, vast.there) == ([], {})
    assert "is ended all the same" in told[0]
    vast.errors["list"] = NoAnswer("no list")
    with pytest.raises(PPError):
        find(ledger, vast)


def test_a_machine_without_an_id(ledger: Ledger) -> None:
    """Found late by its label; or never, and then it never was."""
    late, never = label(stage=1), label(stage=2)
    vast = Memory("vast")
    rent(ledger, late, None)
    rent(ledger, never, None)
    found = find(ledger, vast)
    assert [(x.instance_id, x.price_usd_hour) for x in found] == [(None, None)] * 2
    timer = threading.Timer(0.1, vast.there.update, [{"8": instance("8", late + "0"), "7": instance("7", late)}])
    timer.start()
    unconfirmed, said = end(ledger, found, vast)
    timer.join()
    assert (unconfirmed, ledger.open_rows(), list(vast.there)) == ([], [], ["8"])
    assert sorted(line.rpartition(": ")[2] for line in said) == ["ended", "never came up"]


def test_without_a_complete_list_it_is_not_said_that_it_never_was(ledger: Ledger) -> None:
    vast = Memory("vast")
    rent(ledger, label(), None)
    found = find(ledger, vast)
    vast.errors["list"] = NoAnswer("no list today")
    unconfirmed, _ = end(ledger, found, vast)
    assert [x.why for x in unconfirmed] == ["no list today"]
    assert len(ledger.open_rows()) == 1


@pytest.mark.parametrize("error", [NoAnswer("not confirmed"), ValueError("of our own making")])
def test_one_that_cannot_be_ended_does_not_save_the_others(ledger: Ledger, error: PPError | ValueError) -> None:
    bad, vast = Memory("bad", instance("1", label())), Memory("vast", instance("2", label(stage=1)))
    bad.errors["destroy"] = error
    rent(ledger, label(), "1", provider="bad")
    rent(ledger, label(stage=1), "2")
    unconfirmed, _ = end(ledger, find(ledger, bad, vast), bad, vast)
    assert [(x.instance_id, x.why) for x in unconfirmed] == [
        ("1", "not confirmed" if isinstance(error, NoAnswer) else "ValueError while it was ended")
    ]
    assert ([row.instance_id for row in ledger.open_rows()], vast.there) == (["1"], {})


def test_a_refused_key_is_not_tried_for_each_machine(ledger: Ledger) -> None:
    vast = Memory("vast", *(instance(str(i), label(stage=i)) for i in range(40)))
    vast.errors["destroy"] = BadKey("the key is refused")
    unconfirmed, _ = end(ledger, find(ledger, vast), vast)
    assert [x.why for x in unconfirmed] == ["the key is refused"] * 40
    assert len([call for call in vast.calls if call[0] == "destroy"]) <= sweep.THREADS


def test_several_at_once(ledger: Ledger) -> None:
    vast = Memory("vast", *(instance(str(i), label(stage=i)) for i in range(20)))
    assert end(ledger, find(ledger, vast), vast)[0] == []
    assert vast.there == {}
    assert 1 < vast.most_busy <= sweep.THREADS


def test_no_access(ledger: Ledger) -> None:
    rent(ledger, label(), "1")
    found = find(ledger, Memory("vast"))
    unconfirmed, _ = end(ledger, found)
    assert [x.why for x in unconfirmed] == ["there is no key, give VAST_API_KEY"]


def test_what_no_provider_at_hand_can_show_is_told(ledger: Ledger) -> None:
    rent(ledger, label(), "1")
    rent(ledger, label(stage=1), "2")
    rent(ledger, label(stage=2), "ssh:a:x", provider="ssh")
    said: list[str] = []
    assert find(ledger, Memory("local"), said=said) == []
    assert said == [
        "2 machines at vast cannot be looked at: there is no key, give VAST_API_KEY",
        "1 machine at ssh cannot be looked at: there is no access to ssh",
    ]
    seen = sweep.survey(ledger, [Memory("local")], owner=OWNER, is_live=lambda run: False, now=NOW)
    assert [x.instance_id for x in seen.beyond] == ["1", "2", "ssh:a:x"]
    assert find(ledger, Memory("local"), is_live=lambda run: True, said=said) == []
    assert len(said) == 2


def test_the_error_names_each_machine_and_the_command_that_ends_it() -> None:
    def left(provider: str, instance_id: str | None, why: str) -> Leftover:
        return Leftover(provider, instance_id, label(), RUN, 0, 0.5, 2000, why)

    one = sweep.still_billing([left("vast", "31", "no answer.")])
    assert str(one) == "a machine may bill on: vast 31 (no answer; end it with: vastai destroy instance 31)"
    two = sweep.still_billing([left("vast", None, "x"), left("ssh", "ssh:h:l", "y")])
    assert two.instance_ids == (label(), "ssh:h:l")
    assert "2 machines" in str(two)
    assert f"look for the label {label()}" in str(two)
    assert "ssh ssh:h:l (y; end it with: pp sweep)" in str(two)
    assert isinstance(two, ProviderError)
    assert not isinstance(two, StorageError)
