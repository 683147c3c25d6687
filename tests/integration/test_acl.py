"""Workers with users of their own on a real Valkey: they can do their job, and nothing else."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis
from celery import Celery
from redis.lock import Lock

from orchestrator.acl import SCRIPTS, create_user, drop_user, drop_users, user_name
from orchestrator.broker import EmbeddedBroker
from pptasks.config import Settings
from pptasks.connect import connect
from pptasks.errors import BrokerError
from pptasks.keys import Keys
from pptasks.members import Member, read_member, read_members
from pptasks.membership import Lease
from tests.conftest import WaitUntil
from tests.integration.hand import by_hand, send, stock_app

RUN, KEYS = "acl", Keys("acl")
PROMPT, GREEDY = [131, 404, 408, 445, 371, 365, 455, 14, 160, 51, 430], [84, 108, 435, 119, 63, 254]


@pytest.fixture(scope="module")
def admin() -> Iterator[redis.Redis]:
    """The default user of a broker of this module's own: users and refusals are the whole server's."""
    with EmbeddedBroker() as broker, redis.Redis.from_url(broker.url) as client:
        client.url = broker.url
        yield client


@pytest.fixture
def clean(admin: redis.Redis) -> None:
    drop_users(admin, RUN)
    admin.flushall()
    admin.acl_log_reset()


@pytest.fixture(scope="module")
def workers(admin: redis.Redis) -> list[redis.Redis]:
    """What the users of three stages can do; index: stage."""
    return [connect(create_user(admin, RUN, stage, 3).login(admin.url)) for stage in range(3)]


@contextlib.contextmanager
def pipeline(admin: redis.Redis, goldens: Path, folder: Path, n_stages: int = 2, **given: object) -> Iterator[Celery]:
    """The stages of a golden model, each under its own user, and a client of the default user."""
    settings = replace(
        Settings.of_this_machine(), model=str(goldens / "llama-tied"), num_stages=n_stages, wire="f32", run=RUN,
        secret="ab" * 32, lease=True, **given,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(Lease(admin.url, KEYS))
        for stage in range(n_stages):
            url = create_user(admin, RUN, stage, n_stages).login(admin.url)
            stack.enter_context(by_hand(stage, replace(settings, broker=url), folder / str(stage)))
        yield stack.enter_context(stock_app(admin.url, KEYS.prefix))


def refused(admin: redis.Redis) -> list[tuple[str, ...]]:
    """What the server refused since the log was reset."""
    return [tuple(str(entry[k]) for k in ("username", "context", "reason", "object")) for entry in admin.acl_log()]


# ---- what a worker needs ----


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("readout", "n_stages"), [("first", 2), ("last", 3)])
def test_stages_answer_a_request_and_a_ping_and_nothing_is_refused(
    admin: redis.Redis, goldens: Path, tmp_path: Path, readout: str, n_stages: int, wait_until: WaitUntil
) -> None:
    for exchange in ("celery.pidbox", "reply.celery.pidbox", "celeryev"):  # overdue tables, which a worker sweeps
        admin.zadd(f"{KEYS.prefix}_kombu.binding_deadlines", {exchange: 1})
        admin.sadd(f"{KEYS.prefix}_kombu.binding.{exchange}", "of a client that is gone")
    with pipeline(admin, goldens, tmp_path, n_stages, readout=readout) as app:
        result = send(app, tokens=PROMPT, max_tokens=len(GREEDY))
        assert result.get(timeout=60)["token_ids"] == GREEDY
        assert sorted(next(iter(pong)).split("@")[0] for pong in app.control.ping(timeout=2)) == [
            f"pp-stage-{stage}" for stage in range(n_stages)
        ]
        assert not admin.exists(f"{KEYS.prefix}_kombu.binding.celeryev")
        later = send_later(app)
        wait_until(lambda: not admin.llen(f"{KEYS.prefix}stage0"), what="the head took it")
    assert admin.llen(f"{KEYS.prefix}stage0") == 1, f"{later.id} was not given back"
    assert refused(admin) == []


def send_later(app: Celery) -> object:
    """A request for later: the head keeps it, and gives it back when it stops."""
    return app.send_task("pptasks.generate", kwargs={"tokens": PROMPT}, queue="stage0", countdown=600)


@pytest.mark.usefixtures("clean")
def test_a_request_for_the_wrong_stage_ends_no_worker(
    admin: redis.Redis, goldens: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with pipeline(admin, goldens, tmp_path) as app:
        app.send_task("pptasks.generate", kwargs={"tokens": PROMPT}, queue="stage1")
        wait_until(lambda: any("celery-task-meta-" in what[3] for what in refused(admin)), 30, "stage 1 answers it")
        result = send(app, tokens=PROMPT, max_tokens=len(GREEDY))
        assert result.get(timeout=60)["token_ids"] == GREEDY


def test_a_worker_reads_the_start_of_its_record_and_the_head_of_everyones(workers: list[redis.Redis]) -> None:
    """GETRANGE: a record is read no further than one may be long."""
    for stage, worker in enumerate(workers):
        worker.set(KEYS.member(stage), json.dumps(asdict(Member(stage=stage))))
        found = read_member(worker, KEYS, stage)
        assert found is not None
        assert found.stage == stage
    assert set(read_members(workers[0], KEYS, 3)) == {0, 1, 2}


# ---- what it must not ----

FOREIGN: dict[str, Callable[[redis.Redis], object]] = {
    "FLUSHALL": lambda c: c.flushall(),
    "FLUSHDB": lambda c: c.flushdb(),
    "CONFIG GET": lambda c: c.config_get("*"),
    "CONFIG SET": lambda c: c.config_set("maxmemory", 1),
    "KEYS": lambda c: c.keys("*"),
    "SCAN": lambda c: c.scan(),
    "SHUTDOWN": lambda c: c.execute_command("SHUTDOWN", "NOSAVE"),
    "ACL LIST": lambda c: c.acl_list(),
    "ACL SETUSER": lambda c: c.execute_command("ACL", "SETUSER", user_name(RUN, 1), "+@all", "~*"),
    "CLIENT LIST": lambda c: c.client_list(),
    "CLIENT KILL": lambda c: c.execute_command("CLIENT", "KILL", "TYPE", "normal"),
    "MONITOR": lambda c: c.execute_command("MONITOR"),
    "SLOWLOG": lambda c: c.slowlog_get(),
    "INFO": lambda c: c.info(),
    "EVAL": lambda c: c.eval("return 1", 0),
    "SCRIPT LOAD": lambda c: c.script_load("return 1"),
    "SCRIPT FLUSH": lambda c: c.script_flush(),
    "FUNCTION": lambda c: c.function_list(),
    "another run's queue": lambda c: c.lpush("pp:other:stage0", b"x"),
    "another run's lease": lambda c: c.exists("pp:other:lease"),
    "another run's record": lambda c: c.get("pp:other:member:1"),
    "a key of nobody": lambda c: c.set("x", "y"),
    "the lease": lambda c: c.set(KEYS.lease, "mine"),
    "the owner": lambda c: c.get(KEYS.owner),
    "the head's queue": lambda c: c.brpop(f"{KEYS.prefix}stage0", timeout=0.1),
    "the next queue": lambda c: c.brpop(f"{KEYS.prefix}stage2", timeout=0.1),
    "clearing the head's queue": lambda c: c.delete(f"{KEYS.prefix}stage0"),
    "the length of the next queue": lambda c: c.llen(f"{KEYS.prefix}stage2"),
    "the head's lock": lambda c: Lock(c, KEYS.lock(0), timeout=5, blocking=False).acquire(),
    "the next lock": lambda c: c.delete(KEYS.lock(2)),
    "another's record": lambda c: c.set(KEYS.member(0), "{}"),
    "another's name": lambda c: c.set(KEYS.name("pp-entry"), "{}"),
    "another's log": lambda c: c.rpush(f"{KEYS.prefix}log:0", "x"),
    "a list as its record": lambda c: c.rpush(KEYS.member(1), "x"),
    "a list as its name": lambda c: c.rpush(KEYS.name("pp-stage-1"), "x"),
    "a text as its log": lambda c: c.set(KEYS.log(1), "x"),
    "its record for ever": lambda c: c.execute_command("PERSIST", KEYS.member(1)),
    "another's mailbox": lambda c: c.delete(f"{KEYS.prefix}pp-stage-0@host.celery.pidbox"),
    "the table of a queue": lambda c: c.delete(f"{KEYS.prefix}_kombu.binding.stage0"),
    "a result": lambda c: c.execute_command("SETEX", f"{KEYS.prefix}celery-task-meta-1", 9, "{}"),
    "a stream of tokens": lambda c: c.xread({KEYS.stream("1"): "0"}),
    "writing tokens": lambda c: c.xadd(KEYS.stream("1"), {"e": "{}"}),
    "a broadcast": lambda c: c.publish(f"{KEYS.prefix}/0.celery.pidbox", "{}"),
    "another run's broadcast": lambda c: c.publish("pp:other:/0.celery.pidbox", "{}"),
    "a result's channel": lambda c: c.publish(f"{KEYS.prefix}celery-task-meta-1", "{}"),
    "events of tasks": lambda c: c.publish(f"{KEYS.prefix}/0.celeryev/task.multi", "{}"),
    "another channel": lambda c: c.publish("news", "x"),
    "listening to all": lambda c: listen(c, "*"),
    "listening to another run": lambda c: listen(c, "pp:other:/0.celery.pidbox"),
    "moving a key": lambda c: c.rename(KEYS.member(1), KEYS.member(0)),
}


def listen(client: redis.Redis, channel: str) -> None:
    with client.pubsub() as heard:
        heard.psubscribe(channel)
        heard.get_message(timeout=2)


@pytest.mark.parametrize("what", FOREIGN)
def test_a_worker_may_not_do(workers: list[redis.Redis], what: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        FOREIGN[what](workers[1])


@pytest.mark.parametrize("what", ["the lease", "the next lock", "a broadcast", "the next queue", "another's log"])
def test_nor_may_the_head(workers: list[redis.Redis], what: str) -> None:
    calls = FOREIGN | {"another's log": lambda c: c.rpush(f"{KEYS.prefix}log:1", "x")}
    with pytest.raises(redis.exceptions.NoPermissionError):
        calls[what](workers[0])


def test_a_script_reaches_no_further_than_its_user(admin: redis.Redis, workers: list[redis.Redis]) -> None:
    """The scripts that are there take their key names from the caller."""
    sha = admin.script_load(SCRIPTS[1])  # the release of a lock: DEL, if the value is the caller's
    admin.set(KEYS.lock(2), "token")
    with pytest.raises(redis.exceptions.NoPermissionError):
        workers[1].evalsha(sha, 1, KEYS.lock(2), "token")
    sweep = admin.script_load(SCRIPTS[3])  # builds names of keys that it does not declare
    admin.zadd(f"{KEYS.prefix}_kombu.binding_deadlines", {"stage0": 1})
    admin.sadd(f"{KEYS.prefix}_kombu.binding.stage0", "x")
    with pytest.raises(redis.exceptions.ResponseError, match="ACL"):
        workers[1].evalsha(sweep, 1, f"{KEYS.prefix}_kombu.binding_deadlines", f"{KEYS.prefix}_kombu.binding.", "x", 9)
    assert admin.exists(KEYS.lock(2), f"{KEYS.prefix}_kombu.binding.stage0") == 2


# ---- coming and going ----


def test_who_is_dropped_is_out_at_once(admin: redis.Redis) -> None:
    user = create_user(admin, "brief", 1, 2)
    with connect(user.login(admin.url)) as client:
        assert client.ping()
        held = client.connection_pool.get_connection()
        held.send_command("BRPOP", "pp:brief:stage1", "5")
        drop_user(admin, "brief", 1)
        with pytest.raises(redis.ConnectionError):
            held.read_response()
        held.disconnect()
        with pytest.raises(redis.AuthenticationError):
            client.ping()
    assert user.name not in admin.acl_users()


def test_a_new_user_of_a_stage_puts_the_old_one_out(admin: redis.Redis) -> None:
    first = create_user(admin, "again", 0, 1)
    with connect(first.login(admin.url)) as client, client.client() as held:
        assert held.ping()
        second = create_user(admin, "again", 0, 1)
        assert (second.name, second.password == first.password) == (first.name, False)
        with pytest.raises((redis.ConnectionError, redis.AuthenticationError)):
            held.ping()
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        assert connect(second.login(admin.url)).ping()
        assert create_user(admin, "again", 0, 1, second.password) == second
        assert connect(second.login(admin.url)).ping()


def test_all_users_of_a_run_go_and_no_others(admin: redis.Redis) -> None:
    for run in ("one", "one-1", "two"):
        for stage in range(2):
            create_user(admin, run, stage, 2)
    assert drop_users(admin, "one") == 2
    assert drop_users(admin, "one") == 0
    assert {user_name(run, stage) for run in ("one-1", "two") for stage in range(2)} <= set(admin.acl_users())


def test_who_may_not_make_users_is_told(admin: redis.Redis, workers: list[redis.Redis]) -> None:
    password = secrets.token_hex(8)
    for call in (lambda: create_user(workers[1], RUN, 0, 2, password), lambda: drop_users(workers[1], RUN)):
        with pytest.raises(BrokerError) as raised:
            call()
        assert password not in str(raised.value)
