"""Holding what says that we are there: a worker's lock, record and names; the lease of whoever started the run.

Everything is a key with a TTL that its owner renews from a thread of its own, so that a process that dies is gone by
itself. What the records say, and how they are read, is in members.py.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import psutil
import redis
from redis.exceptions import LockError
from redis.lock import Lock

from pptasks.config import BROKER_GRACE_S
from pptasks.connect import connect, explain
from pptasks.errors import BrokerError, NotReady, StageTaken
from pptasks.keys import Keys, names_of, stage_queue
from pptasks.members import Member, check_ready, read_member, read_members
from pptasks.plan import Plan

log = logging.getLogger(__name__)

BEAT_S = 1.0
TTL_S = 6.0  # of a member, its names and its lock
LEASE_TTL_S = 5.0
LEASE_GRACE_S = 2.5  # without a lease for that long, on a broker that answers: the run is gone, 10 s after its owner


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
        broker_grace_s: float = BROKER_GRACE_S,
        on_gone: Callable[[str], None],
    ):
        self._client, self._keys, self._n_stages = connect(url), keys, n_stages
        self._member = Member(stage=stage, node=node)
        self._lock = Lock(self._client, keys.lock(stage), timeout=TTL_S, blocking=False, thread_local=False)
        self._watch_lease, self._broker_grace_s, self._on_gone = watch_lease, broker_grace_s, on_gone
        self._on_restart: Callable[[int], None] | None = None
        self._figures: Callable[[], dict[str, Any]] = dict
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

    def slots_of_all(self, plan: Plan) -> int:
        """How many slots every stage holds, once all are ready with `plan` and our secret, as the broker says; 0 until
        then. Raises as check_ready."""
        try:
            members = read_members(self._client, self._keys, self._n_stages)
        except redis.RedisError:
            return 0
        if not check_ready(members, plan, self._member.key_id):
            return 0
        return min(plan.slots, *(member.slots for member in members.values()))

    def arithmetics(self) -> set[str]:
        """Those of all stages, as the broker says now. Raises BrokerError, or NotReady for a stage that is away."""
        try:
            members = read_members(self._client, self._keys, self._n_stages)
        except redis.RedisError as e:
            raise BrokerError(f"the stages' records cannot be read: {explain(e)}") from None
        if away := [i for i in range(self._n_stages) if i not in members]:
            raise NotReady(f"stage {away[0]} is away: verify again when it is back")
        return {member.arithmetic for member in members.values()}

    def watch_figures(self, figures: Callable[[], dict[str, Any]]) -> None:
        """Call `figures()` at each heartbeat: fields of `Member` that tell how the worker does."""
        self._figures = figures

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
        outage = False
        while not self._stop.is_set():
            now = time.monotonic()
            try:
                if not self._hold_lock():
                    reason = "another worker took the stage's lock"
                    break
                self._publish()
                self._look_for_restarts()
                broker_seen, outage = now, False
                if not self._watch_lease or self._client.exists(self._keys.lease):
                    lease_seen = now
            except redis.RedisError as e:
                if not outage:
                    log.warning("no heartbeat: %s", explain(e))
                lease_seen, outage = now, True  # whether the lease is there, nobody knows
            if self._watch_lease and now - broker_seen > self._broker_grace_s:
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
        began = time.monotonic()
        member = replace(self._member, rss_bytes=psutil.Process().memory_info().rss, **self._figures())
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
        with self._guard:
            self._member = replace(self._member, rtt_ms=(time.monotonic() - began) * 1000)

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
