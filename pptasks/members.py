"""Who is there: each stage's worker says hello, keeps a lock, and is found by name; whoever started the run holds its
lease.

Everything is a key with a TTL that its owner renews, so that a process that dies is gone by itself. A stage is served
by one worker: two consumers on one queue would swap frames.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import psutil
import redis
from redis.exceptions import LockError
from redis.lock import Lock

from pptasks.connect import connect
from pptasks.errors import BrokerError, NotReady, PlanError, PPError, StageFailed, StageTaken
from pptasks.keys import Keys, names_of, stage_queue
from pptasks.plan import Plan, Span

log = logging.getLogger(__name__)

BEAT_S = 1.0
TTL_S = 6.0  # of a member, its names and its lock
LEASE_TTL_S = 5.0
LEASE_GRACE_S = (
    2.5  # without a lease for that long, on a broker that answers: the run is gone, 10 s after its owner at most
)
BROKER_GRACE_S = 7.0  # without a broker for that long: the run is gone; a broker that restarts needs less
_MAX_RECORD = 64 << 10


@dataclass(frozen=True)
class Member:
    """What a stage's worker says of itself. `phase`, `done` and `total` are its progress: download, load, compile."""

    stage: int
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    node: str = ""  # Celery node name
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    state: str = "starting"  # starting, ready, failed
    phase: str = "start"
    done: int = 0
    total: int = 0
    device: str = ""
    span: tuple[int, int] | None = None
    n_blocks: int = 0
    digest: str = ""  # hex, of its plan
    key_id: str = ""  # which PP_SECRET it has, see `wire.key_id`
    weights_bytes: int = 0
    rss_bytes: int = 0
    error: str = ""

    @classmethod
    def from_json(cls, raw: bytes | str) -> "Member":
        """Raises ValueError for what is no member record."""
        try:
            record = json.loads(raw) if len(raw) <= _MAX_RECORD else None
        except RecursionError:
            record = None
        if not isinstance(record, dict) or "stage" not in record:
            raise ValueError("not a member record")
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        span = known.pop("span", None)
        if any(type(value) is not cls.__dataclass_fields__[name].type for name, value in known.items()) or not (
            span is None or (isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span))
        ):
            raise ValueError("a member record with a field of another type")
        return cls(**known, span=None if span is None else (span[0], span[1]))


class Membership:
    """The worker's side: a thread that renews what the worker holds, and calls `on_gone(reason)` once when it must
    leave.

    Heartbeats have their own thread and connection, so they go on while a step computes or a model loads.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        stage: int,
        n_stages: int,
        *,
        node: str,
        watch_lease: bool,
        on_gone: Callable[[str], None],
    ):
        self._client, self._keys, self._n_stages = connect(url), keys, n_stages
        self._member = Member(stage=stage, node=node)
        self._lock = Lock(self._client, keys.lock(stage), timeout=TTL_S, blocking=False, thread_local=False)
        self._watch_lease, self._on_gone = watch_lease, on_gone
        self._on_restart: Callable[[int], None] | None = None
        self._incarnations: dict[int, str] = {}
        self._guard = threading.Lock()
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="members", daemon=True)

    def join(self) -> None:
        """Take the stage's lock and say hello. Waits one TTL for a predecessor that died. Raises StageTaken or
        BrokerError."""
        stage = self._member.stage
        try:
            if not self._lock.acquire(blocking=True, blocking_timeout=TTL_S + BEAT_S):
                other = read_member(self._client, self._keys, stage)
                who = f"{other.node} (pid {other.pid} on {other.host})" if other else "another worker"
                raise StageTaken(
                    f"stage {stage} of run {self._keys.run} is served by {who}: stop it first, or start another stage"
                )
            self._publish()
        except redis.RedisError as e:
            raise BrokerError(f"stage {stage} cannot say hello: {explain(e)}") from None
        self._thread.start()

    def __enter__(self) -> "Membership":
        self.join()
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def update(self, **changes: Any) -> None:
        """Change what the worker says of itself; sent soon, at most ten times a second."""
        with self._guard:
            self._member = replace(self._member, **changes)
        self._changed.set()

    def everyone_ready(self, plan: Plan) -> bool:
        """True when all stages are ready and hold `plan` and our secret, as the broker says. Raises as check_ready."""
        try:
            return check_ready(read_members(self._client, self._keys, self._n_stages), plan, self._member.key_id)
        except redis.RedisError:
            return False

    def watch_restarts(self, on_restart: Callable[[int], None]) -> None:
        """Call `on_restart(stage)` when a stage is ready again in another incarnation: its KV cache is empty."""
        self._on_restart = on_restart

    def broker_clock_us(self) -> int:
        """The broker's clock, microseconds: the same for every machine. Raises BrokerError."""
        try:
            seconds, microseconds = self._client.time()
        except redis.RedisError as e:
            raise BrokerError(f"the broker does not tell its time: {explain(e)}") from None
        return int(seconds) * 1_000_000 + int(microseconds)

    def leave(self) -> None:
        """Say a last word (a failure stays readable for a TTL), give the lock back."""
        self._stop.set()
        self._changed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        try:
            if self._lock.owned():
                self._publish()
                if self._member.state != "failed":
                    self._client.delete(self._keys.member(self._member.stage), *self._names())
                self._lock.release()
        except (redis.RedisError, LockError) as e:
            log.info("could not say goodbye: %s", explain(e))
        self._client.close()

    def _beat(self) -> None:
        broker_seen = lease_seen = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            try:
                if not self._hold_lock():
                    reason = "another worker took the stage's lock"
                    break
                self._publish()
                self._look_for_restarts()
                broker_seen = now
                if not self._watch_lease or self._client.exists(self._keys.lease):
                    lease_seen = now
            except redis.RedisError as e:
                if broker_seen > lease_seen - BEAT_S:  # the first of an outage
                    log.warning("no heartbeat: %s", explain(e))
                lease_seen = now  # nobody knows
            if self._watch_lease and now - broker_seen > BROKER_GRACE_S:
                reason = "the run is gone: its broker cannot be reached"
                break
            if now - lease_seen > LEASE_GRACE_S:
                reason = "the run is gone: nobody renews its lease"
                break
            self._changed.wait(BEAT_S)
            self._changed.clear()
            self._stop.wait(0.1)
        else:
            return
        self._on_gone(reason)

    def _look_for_restarts(self) -> None:
        if self._on_restart is None:
            return
        for stage, member in read_members(self._client, self._keys, self._n_stages).items():
            if member.state == "ready" and self._incarnations.get(stage) != member.incarnation:
                if stage in self._incarnations:
                    self._on_restart(stage)
                self._incarnations[stage] = member.incarnation

    def _hold_lock(self) -> bool:
        """Renew the lock; take it again if the broker forgot it. False if it is another's."""
        try:
            return self._lock.extend(TTL_S, replace_ttl=True)
        except LockError:
            return self._lock.acquire(blocking=False)

    def _publish(self) -> None:
        member = replace(self._member, rss_bytes=psutil.Process().memory_info().rss)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._keys.member(member.stage), json.dumps(asdict(member)), px=int(TTL_S * 1000))
            if member.state == "ready":
                where = {
                    "queue": stage_queue(member.stage),
                    "node": member.node,
                    "stage": member.stage,
                    "incarnation": member.incarnation,
                }
                for key in self._names():
                    pipe.set(key, json.dumps(where), px=int(TTL_S * 1000))
            pipe.execute()

    def _names(self) -> list[str]:
        return [self._keys.name(name) for name in names_of(self._member.stage, self._n_stages)]


class Lease:
    """The orchestrator's side: holds the run's lease while it lives. A context manager."""

    def __init__(self, url: str, keys: Keys):
        self._client, self._keys = connect(url), keys
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        try:
            self._set()
            self._client.set(self._keys.owner, self._holder)
        except redis.RedisError as e:
            raise BrokerError(f"the run's lease cannot be written: {explain(e)}") from None
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * BEAT_S)
        try:
            self._client.delete(self._keys.lease)
        except redis.RedisError as e:
            log.info("the run's lease was not deleted, it ends by itself: %s", explain(e))
        self._client.close()

    def _set(self) -> None:
        self._client.set(self._keys.lease, self._holder, px=int(LEASE_TTL_S * 1000))

    def _renew(self) -> None:
        renewed = True
        while not self._stop.wait(BEAT_S):
            try:
                self._set()
                renewed = True
            except redis.RedisError as e:
                if renewed:  # the first of an outage
                    log.warning("the run's lease was not renewed: %s", explain(e))
                renewed = False


def read_member(client: redis.Redis, keys: Keys, stage: int) -> Member | None:
    raw = client.get(keys.member(stage))
    try:
        return Member.from_json(raw) if raw else None
    except ValueError:
        return None


def read_members(client: redis.Redis, keys: Keys, n_stages: int) -> dict[int, Member]:
    """All stages that say hello now."""
    return {i: m for i in range(n_stages) if (m := read_member(client, keys, i)) is not None}


def resolve(client: redis.Redis, keys: Keys, name: str) -> Mapping[str, Any]:
    """Where a name such as pp-entry is served: queue, node, stage, incarnation. Raises NotReady if nobody answers to
    it."""
    raw = client.get(keys.name(name))
    if raw is None:
        raise NotReady(f"nobody answers to {name} in run {keys.run}: is its worker up and ready?")
    return json.loads(raw)


def check_ready(members: Mapping[int, Member], plan: Plan, key_id: str = "") -> bool:
    """True when every stage is ready and all of them hold `plan` and the secret `key_id`; False until they are. Pure.

    Raises StageFailed for a stage that failed, PlanError for one with another plan, span or secret.
    """
    for stage, member in sorted(members.items()):
        who = f"stage {stage} ({member.node})"
        if member.state == "failed":
            raise StageFailed(f"{who} failed: {member.error}")
        if not member.digest and member.state != "ready":
            continue  # it has not read its model yet
        if member.digest != plan.digest.hex() or member.span != _ends(plan.spans[stage]):
            raise PlanError(
                f"{who} has plan {member.digest[:8] or 'none'} and blocks {member.span}, "
                f"this run {plan.digest.hex()[:8]} and {_ends(plan.spans[stage])}: "
                "start every stage with the same model, stages, split, wire, readout, context and slots"
            )
        if member.key_id != key_id:
            raise PlanError(f"{who} has another PP_SECRET than this run: give every stage the same 64 hex digits")
    return all(stage in members and members[stage].state == "ready" for stage in range(plan.n_stages))


def _ends(span: Span) -> tuple[int, int]:
    return span.lo, span.hi


def explain(error: Exception) -> str:
    """A Redis error in words that hold no password."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if not isinstance(error, PPError) else text
