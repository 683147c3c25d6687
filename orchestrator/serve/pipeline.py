"""The pipeline as it works: what its stages say of themselves, and how long their queues are, once a second at most.

Counters become rates by the worker's own clock: the difference of two of its records over the time between them.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from orchestrator.serve.openai_errors import away
from orchestrator.stages import Cluster
from pptasks.connect import connect, explain
from pptasks.errors import BrokerError
from pptasks.keys import Keys, stage_queue
from pptasks.members import Member, read_members
from pptasks.modelinfo import Model

EVERY_S = 1.0
MAX_GAP_US = 60_000_000  # over a longer time a rate says nothing of now
PREFILL_ROWS = 2.0  # rows a lane and lap: decoding has one


@dataclass(frozen=True)
class Rates:
    """Of one stage, over the time between its last two records. `busy`: share of it spent computing."""

    steps_per_s: float = 0.0
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0  # the head's alone
    busy: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """`at`: Unix time. `members`: the last record of each stage that ever said hello; `present`: who says hello now."""

    at: float
    members: Mapping[int, Member]
    present: frozenset[int]
    queues: Sequence[int]  # messages in each stage's queue
    rates: Sequence[Rates]


def snapshot(previous: Snapshot | None, at: float, members: Mapping[int, Member], queues: Sequence[int]) -> Snapshot:
    """`members`: who says hello now; `queues`: by stage. A record that has not been renewed since keeps its rates."""
    before = previous.members if previous is not None else {}
    rates = []
    for stage in range(len(queues)):
        now, then = members.get(stage), before.get(stage)
        if now is not None and then is not None and now.at_us == then.at_us and previous is not None:
            rates.append(previous.rates[stage])
        else:
            rates.append(_rates(then, now))
    return Snapshot(at, {**before, **members}, frozenset(members), tuple(queues), tuple(rates))


def _rates(then: Member | None, now: Member | None) -> Rates:
    if then is None or now is None or then.incarnation != now.incarnation:
        return Rates()
    elapsed_us = now.at_us - then.at_us
    if not 0 < elapsed_us <= MAX_GAP_US:
        return Rates()
    return Rates(
        steps_per_s=max(0, now.steps - then.steps) * 1e6 / elapsed_us,
        rows_per_s=max(0, now.rows - then.rows) * 1e6 / elapsed_us,
        tokens_per_s=max(0, now.tokens - then.tokens) * 1e6 / elapsed_us,
        busy=min(1.0, max(0, now.busy_us - then.busy_us) / elapsed_us),
    )


def doing(member: Member | None, rates: Rates) -> str:
    """What a stage does, in a word; None: it says nothing any more."""
    if member is None:
        return "away"
    if member.state == "failed":
        return "failed"
    if member.state != "ready":
        return "loading"
    if rates.steps_per_s == 0:
        return "idle"
    rows_per_lap = rates.rows_per_s / rates.steps_per_s
    return "prefill" if rows_per_lap > PREFILL_ROWS * max(1, member.lanes) else "decode"


def to_json(cluster: Cluster, model: Model, shot: Snapshot) -> dict[str, Any]:
    """What the page and other programs get."""
    plan = cluster.plan
    return {
        "model": {"name": model.name, "context": plan.context},
        "plan": {"spans": [[s.lo, s.hi] for s in plan.spans], "wire": plan.wire, "readout": plan.readout},
        "run": cluster.settings.run,
        "at": shot.at,
        "stages": [_stage(shot, stage, [span.lo, span.hi]) for stage, span in enumerate(plan.spans)],
        "head": _head(shot),
    }


def _stage(shot: Snapshot, stage: int, span: list[int]) -> dict[str, Any]:
    """A stage that is away keeps what it was, and does nothing."""
    is_here = stage in shot.present
    member = shot.members.get(stage) or Member(stage, incarnation="", host="", pid=0)
    rates = shot.rates[stage]
    return {
        "stage": stage,
        "state": member.state if is_here else "away",
        "phase": member.phase,
        "node": member.node,
        "host": member.host,
        "device": member.device,
        "kernels": member.kernels,
        "span": span,
        "weights_bytes": member.weights_bytes,
        "rss_bytes": member.rss_bytes,
        "kv_bytes": member.kv_bytes,
        "slots": member.slots,
        "rtt_ms": member.rtt_ms,
        "queue_depth": shot.queues[stage],
        "lanes": member.lanes if rates.steps_per_s else 0,
        "steps_per_s": rates.steps_per_s,
        "rows_per_s": rates.rows_per_s,
        "busy": rates.busy,
        "doing": doing(member if is_here else None, rates),
    }


def _head(shot: Snapshot) -> dict[str, Any]:
    head = shot.members[0] if 0 in shot.present else Member(0)
    return {
        "live": head.live,
        "waiting": head.waiting,
        "in_flight": head.in_flight,
        "tokens_per_s": shot.rates[0].tokens_per_s,
        "hop_us": head.hop_us,
        "requests": head.requests,
        "cached_tokens": head.cached_tokens,
    }


class Readings:
    """The pipeline as it was within the last second, read once for all who ask. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, model: Model):
        self.cluster, self.model = cluster, model
        self.last: Snapshot | BrokerError | None = None  # None: nobody asked yet
        self._keys, self._n_stages = Keys(cluster.settings.run), cluster.plan.n_stages
        self._redis = connect(cluster.settings.broker)
        self._lock, self._read_at = asyncio.Lock(), float("-inf")
        self._shot: Snapshot | None = None

    async def latest(self) -> Snapshot:
        """Raises BrokerError."""
        async with self._lock:
            if time.monotonic() - self._read_at >= EVERY_S:
                self.last = await asyncio.to_thread(self._read)  # the broker may take its time
                self._read_at = time.monotonic()
        if isinstance(self.last, Snapshot):
            return self.last
        raise self.last or BrokerError("the broker was not asked yet")

    def _read(self) -> Snapshot | BrokerError:
        try:
            members = read_members(self._redis, self._keys, self._n_stages)
            with self._redis.pipeline(transaction=False) as pipe:
                for stage in range(self._n_stages):
                    pipe.llen(self._keys.prefix + stage_queue(stage))
                lengths = pipe.execute(raise_on_error=False)
        except redis.RedisError as e:
            return BrokerError(f"the broker was lost: {explain(e)}")
        queues = [length if isinstance(length, int) else 0 for length in lengths]  # another type of key is no queue
        self._shot = snapshot(self._shot, time.time(), members, queues)
        return self._shot


def routes(readings: Readings) -> list[BaseRoute]:
    async def pipeline(request: Request) -> Response:
        try:
            shot = await readings.latest()
        except BrokerError as e:
            raise away(str(e)) from None
        return JSONResponse(to_json(readings.cluster, readings.model, shot), headers={"cache-control": "no-store"})

    return [Route("/api/pipeline", pipeline)]
