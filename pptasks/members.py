"""Who is there: what a stage's worker says of itself, how it is found by name, and when all of them make one pipeline.

The records are keys with a TTL that their owners renew (membership.py), so that a process that dies is gone by itself.
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import redis

from pptasks.config import MAX_STAGES
from pptasks.errors import NotReady, PlanError, StageFailed
from pptasks.keys import Keys
from pptasks.plan import Plan, Span
from pptasks.probe import expected
from pptasks.shown import MAX_LINE, line

_MAX_RECORD = 64 << 10
_MAX_TEXT, _MAX_NUMBER = 300, 1 << 60


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
    digest: str = ""  # hex, of its plan
    key_id: str = ""  # which PP_SECRET it has, see `wire.key_id`
    probe: str = ""  # digest of the probe's product as its device computed it, see `probe.expected`
    kernels: str = ""  # "c" or "tinygrad"
    gate_failure: str = ""  # why its fast kernels were switched off at the start
    arithmetic: str = ""  # equal on two stages that round alike, bit for bit
    weights_bytes: int = 0
    rss_bytes: int = 0
    error: str = ""
    error_type: str = ""  # of errors.py
    rtt_ms: float = 0.0  # to the broker and back, at its last heartbeat
    # How it does; counters rise from the worker's start.
    at_us: int = 0  # when this was so, on the worker's own steady clock
    steps: int = 0  # laps that it computed
    rows: int = 0  # positions that it computed
    busy_us: int = 0  # spent computing
    lanes: int = 0  # of its last lap
    slots: int = 0  # sequences that its KV cache holds
    kv_bytes: int = 0  # of that cache
    compiles: int = 0  # programs compiled or loaded when it started
    refused: int = 0  # messages that it did not serve
    # The head alone.
    live: int = 0  # requests in a slot
    waiting: int = 0
    in_flight: int = 0  # laps
    tokens: int = 0  # generated
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, not computed again
    requests: int = 0  # that were answered
    cancelled: int = 0
    failed: int = 0
    hop_us: float = 0.0  # a recent median; 0: none was measured

    @classmethod
    def from_json(cls, raw: bytes | str) -> "Member":
        """Its texts are cut and made harmless to a terminal. Raises ValueError for what is no member record, or has a
        figure out of bounds."""
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
        if not all(_is_in_bounds(value) for value in [*known.values(), *(span or ())]) or known["stage"] >= MAX_STAGES:
            raise ValueError("a member record with a figure out of bounds")
        shown = {
            name: line(value, MAX_LINE if name == "error" else _MAX_TEXT)
            for name, value in known.items()
            if isinstance(value, str)
        }
        return cls(**known | shown, span=None if span is None else (span[0], span[1]))


def _is_in_bounds(value: object) -> bool:
    return not isinstance(value, int | float) or 0 <= value <= _MAX_NUMBER  # which NaN is not


def read_member(client: redis.Redis, keys: Keys, stage: int) -> Member | None:
    """None if nobody says hello, or what is said is no record of that stage."""
    try:
        member = Member.from_json(_read(client, keys.member(stage)))
    except ValueError:
        return None
    return member if member.stage == stage else None


def _read(client: redis.Redis, key: str) -> bytes | str:
    """The start of a record, as long as one may be; empty if there is none, or another type of key in its place: its
    owner may write anything."""
    try:
        return client.getrange(key, 0, _MAX_RECORD)
    except redis.ResponseError as e:
        if str(e).startswith("WRONGTYPE"):
            return b""
        raise


def read_members(client: redis.Redis, keys: Keys, n_stages: int) -> dict[int, Member]:
    """All stages that say hello now."""
    return {i: m for i in range(n_stages) if (m := read_member(client, keys, i)) is not None}


def resolve(client: redis.Redis, keys: Keys, name: str) -> Mapping[str, Any]:
    """Where a name such as pp-entry is served: queue, node, stage, incarnation. Raises NotReady if nobody answers to
    it, or with what is no record."""
    raw = _read(client, keys.name(name))
    if not raw:
        raise NotReady(f"nobody answers to {name} in run {keys.run}: is its worker up and ready?")
    try:
        where = json.loads(raw) if len(raw) <= _MAX_RECORD else None
    except (ValueError, RecursionError):
        where = None
    if not isinstance(where, dict):
        raise NotReady(f"what answers to {name} in run {keys.run} is no record: replace its worker")
    return where


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
                "start every stage with the same model, stages, split, wire, readout, context, slots and weights"
            )
        if (member.probe or member.state == "ready") and member.probe != expected():
            raise StageFailed(f"{who}: {member.device or 'its device'} multiplies matrices wrongly (probe): replace it")
        if member.key_id != key_id:
            raise PlanError(f"{who} has another PP_SECRET than this run: give every stage the same 64 hex digits")
    return all(stage in members and members[stage].state == "ready" for stage in range(plan.n_stages))


def _ends(span: Span) -> tuple[int, int]:
    return span.lo, span.hi
