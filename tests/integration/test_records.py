"""What a stage's machine may have written into its keys of a real Redis, as those who read it take it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from orchestrator.job import Job
from orchestrator.stages import Cluster, Stages
from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.connect import connect
from pptasks.errors import Busy, NotReady, PromptTooLong, RequestError, RequestFailed, StageFailed
from pptasks.keys import Keys
from pptasks.members import Member, read_member, resolve
from pptasks.membership import Membership
from pptasks.plan import Plan, Span
from pptasks.probe import expected
from pptasks.request import Request
from pptasks.stream import Account, Piece, Writer
from tests.conftest import WaitUntil

KEYS = Keys("records")
PLAN = Plan(
    spans=(Span(0, 1), Span(1, 2)), n_blocks=2, fingerprint="ab", wire="bf16", readout="last", context=64, slots=2,
    max_rows=16,
)  # fmt: skip


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return replace(Settings.from_env(), broker=redis_url, run=KEYS.run, num_stages=2, secret="ab" * 32)


def test_a_record_of_another_stage_or_type_is_none(client: redis.Redis) -> None:
    assert read_member(client, KEYS, 1) is None
    client.set(KEYS.member(1), json.dumps({"stage": 0}))
    assert read_member(client, KEYS, 1) is None
    client.set(KEYS.member(1), json.dumps({"stage": 1}))
    assert isinstance(read_member(client, KEYS, 1), Member)
    client.delete(KEYS.member(1))
    client.rpush(KEYS.member(1), "x")
    assert read_member(client, KEYS, 1) is None


def test_a_long_record_is_not_fetched(client: redis.Redis) -> None:
    client.set(KEYS.member(1), json.dumps({"stage": 1, "mood": "x" * (8 << 20)}))
    client.set(KEYS.name("pp-exit"), json.dumps({"mood": "x" * (8 << 20)}))
    before = client.info("stats")["total_net_output_bytes"]
    assert read_member(client, KEYS, 1) is None
    with pytest.raises(NotReady, match="no record"):
        resolve(client, KEYS, "pp-exit")
    assert client.info("stats")["total_net_output_bytes"] - before < 1 << 20


@pytest.mark.parametrize("raw", [b"x", b"\xff", b"[" * 50_000, b"[]", b"5"])
def test_a_name_with_what_is_no_record_is_not_ready(client: redis.Redis, raw: bytes) -> None:
    client.set(KEYS.name("pp-entry"), raw)
    with pytest.raises(NotReady, match=r"pp-entry .* is no record"):
        resolve(client, KEYS, "pp-entry")


def test_a_name_of_another_type_is_not_ready(client: redis.Redis) -> None:
    client.rpush(KEYS.name("pp-entry"), "x")
    with pytest.raises(NotReady, match="nobody answers to pp-entry"):
        resolve(client, KEYS, "pp-entry")


def test_the_log_of_a_stage_is_short_and_harmless(client: redis.Redis, settings: Settings) -> None:
    stages = Stages(client, PLAN, settings)
    assert stages.log(1, 3) == ()
    client.rpush(KEYS.log(1), "old", b"x" * (8 << 20), "a\x1b[2J\rb\nerror: c\x07", b"\xff")
    before = client.info("stats")["total_net_output_bytes"]
    assert stages.log(1, 3) == ("x" * 2000, "a[2Jb error: c", "�")
    assert client.info("stats")["total_net_output_bytes"] - before < 1 << 20
    assert stages.log(1, 9)[0] == "old"
    client.delete(KEYS.log(1))
    client.set(KEYS.log(1), "x")
    assert stages.log(1, 3) == ()


# ---- how many slots all stages hold ----


def ready(stage: int, **changes: Any) -> dict[str, Any]:
    span = PLAN.spans[stage]
    return {
        "stage": stage, "state": "ready", "digest": PLAN.digest.hex(), "span": [span.lo, span.hi], "probe": expected(),
        "slots": PLAN.slots,
    } | changes  # fmt: skip


@pytest.fixture
def membership(client: redis.Redis, redis_url: str) -> Iterator[Membership]:
    """The head's; the record of stage 1 is what a test writes."""
    with Membership(redis_url, KEYS, 0, 2, node="test", watch_lease=False, on_gone=pytest.fail) as membership:
        yield membership


@pytest.mark.parametrize(("slots", "of_all"), [(1, 1), (2, 2), (9, 2), (0, 0)])
def test_there_are_as_many_slots_as_each_stage_holds(
    client: redis.Redis, membership: Membership, slots: int, of_all: int, wait_until: WaitUntil
) -> None:
    """And no more than the plan has: its digest says so."""
    client.set(KEYS.member(1), json.dumps(ready(1, slots=slots)))
    assert membership.slots_of_all(PLAN) == 0  # stage 0 itself is not ready
    membership.update(**ready(0) | {"span": (0, 1)})
    wait_until(lambda: (read_member(client, KEYS, 0) or Member(0)).state == "ready", what="stage 0 says so")
    assert membership.slots_of_all(PLAN) == of_all
    client.set(KEYS.member(1), json.dumps(ready(1, state="starting")))
    assert membership.slots_of_all(PLAN) == 0
    client.delete(KEYS.member(1))
    assert membership.slots_of_all(PLAN) == 0
    client.set(KEYS.member(1), json.dumps(ready(1, state="failed", error="no such file")))
    with pytest.raises(StageFailed, match="no such file"):
        membership.slots_of_all(PLAN)


def test_a_worker_tells_how_it_does_with_each_heartbeat(
    client: redis.Redis, membership: Membership, wait_until: WaitUntil
) -> None:
    """Figures are asked for anew; what it said of itself besides stays."""
    laps = iter(range(1, 1000))
    membership.update(device="CPU")
    membership.watch_figures(lambda: {"steps": next(laps), "hop_us": 0.5})
    wait_until(lambda: (read_member(client, KEYS, 0) or Member(0)).steps >= 2, what="two heartbeats")
    member = read_member(client, KEYS, 0)
    assert member is not None
    assert (member.device, member.hop_us) == ("CPU", 0.5)


# ---- what a head stores of a request ----


def write(client: redis.Redis, *pieces: Piece) -> None:
    """Into one stream, in one go: nothing after an end would be written otherwise."""
    writer = Writer(client, KEYS, 1)
    writer.write(writer.prepare({"id": pieces}))


def store(client: redis.Redis, status: str, result: object) -> None:
    meta = {"status": status, "result": result, "traceback": None, "children": [], "task_id": "id"}
    client.set(f"{KEYS.prefix}celery-task-meta-id", json.dumps(meta))


def an_error(kind: str, module: str, *args: Any) -> dict[str, Any]:
    return {"exc_type": kind, "exc_module": module, "exc_message": list(args)}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (an_error("SystemExit", "builtins", 0), "^request id failed: SystemExit$"),
        (an_error("KeyboardInterrupt", "builtins"), "^request id failed: KeyboardInterrupt$"),
        (an_error("StillBilling", "pptasks.errors", "x\x1b[2J", ["1"]), "^request id failed: StillBilling$"),
        (an_error("Odd\x1b[2J", "nowhere", "x"), r"^request id failed: Odd\[2J$"),
        (an_error("RequestFailed", "pptasks.errors", "a lap was lost\x07"), "^a lap was lost$"),
        (an_error("system", "os", "true"), "cannot be read: SecurityError"),
        ("x", "cannot be read"),
    ],
)
def test_no_stored_error_is_raised_as_it_is(client: redis.Redis, settings: Settings, result: object, says: str) -> None:
    store(client, "FAILURE", result)
    with pytest.raises(RequestFailed, match=says):
        Client(make_app(settings)).result("id", 2)


@pytest.mark.parametrize("kind", [RequestError, PromptTooLong, Busy])
def test_a_request_that_cannot_be_served_stays_one(
    client: redis.Redis, settings: Settings, kind: type[Exception]
) -> None:
    store(client, "FAILURE", an_error(kind.__name__, "pptasks.errors", "the prompt is empty"))
    with pytest.raises(kind, match=r"^the prompt is empty$") as raised:
        Client(make_app(settings)).result("id", 2)
    assert raised.type is kind


def test_a_revoked_request_was_cancelled(client: redis.Redis, settings: Settings) -> None:
    store(client, "REVOKED", an_error("TaskRevokedError", "celery.exceptions", "cancelled"))
    with pytest.raises(RequestFailed, match=r"^request id was cancelled$"):
        Client(make_app(settings)).result("id", 2)


@pytest.mark.parametrize("raw", [b"\xff", b'["x"]', b"{", b'{"status": "SUCCESS", "result": {"text": 5}}'])
def test_what_is_no_result_fails_and_ends_the_stream(client: redis.Redis, settings: Settings, raw: bytes) -> None:
    client.set(f"{KEYS.prefix}celery-task-meta-id", raw)
    caller = Client(make_app(settings))
    assert set(caller.stream("id")) == {None}
    with pytest.raises(RequestFailed, match="stored"):
        caller.result("id", 2)


@pytest.mark.parametrize(
    "end",
    [
        Piece("id", end="ok", account=Account("stop", 1, 0, 2)),
        Piece("id", end="failed", error="x", error_type="RequestFailed"),
        Piece("id", end="cancelled"),
    ],
)
def test_a_stream_ends_with_its_last_piece(client: redis.Redis, settings: Settings, end: Piece) -> None:
    """Without a look at what is stored, of which there is nothing here."""
    pieces = [Piece("id", (1,), "x"), Piece("id", (2,), "y"), end]
    write(client, *pieces, Piece("id", (3,), "more"))
    assert list(Client(make_app(settings)).stream("id")) == pieces


def test_a_head_that_gives_no_end_of_tokens_is_stopped(
    client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SimpleNamespace(settings=settings, stages=Stages(client, PLAN, settings), folder=Path(), check=bool)
    write(client, *(Piece("id", (i,), "x") for i in range(8)))
    monkeypatch.setattr(Client, "submit", lambda caller, request: "id")
    shown: list[str] = []
    with pytest.raises(RequestFailed, match="more than the 5 tokens"):
        Job(cast(Cluster, cluster), 5).run(Request(prompt="x", max_tokens=5), shown.append)
    assert shown == ["x"] * 5
