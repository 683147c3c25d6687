"""The head's part that knows requests: who is served, what goes out, what came back. All on the engine's thread.

What goes on the next lap is decided in scheduler.py, what a lap computes in stage.py, what a request was and is in
session.py; this is the book-keeping between them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from celery.worker import state as celery_state

from pptasks.errors import Busy, PPError, RequestError, RequestFailed
from pptasks.text import Text
from pptasks.wire import ErrorCode, Frame, Kind, short_id
from workers.reporter import Reporter, Said
from workers.sample import Token
from workers.scheduler import MAX_LOST, Batch, Sequence, State, schedule
from workers.session import Door, Session, is_id, reply_of
from workers.stage import Stage, not_finite
from workers.verifier import Outcome, Verifier
from workers.verify import Verification

log = logging.getLogger(__name__)

WAITING_EVERY_S = 0.2


@dataclass
class Counts:
    """What the head did since it started."""

    tokens: int = 0  # generated
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these
    requests: int = 0  # that were answered
    cancelled: int = 0
    failed: int = 0


class Head:
    """Requests in, batches out, tokens back. Knows the stage it sits on, and nothing of queues.

    Requests wait until `everyone_ready` says so for the first time.
    """

    def __init__(
        self,
        stage: Stage,
        text: Text,
        reporter: Reporter,
        *,
        lap_deadline_s: float,
        vocab_size: int,
        first_step: int,
        max_lanes: int,
        in_flight: int,
        max_waiting: int,
        everyone_ready: Callable[[], int],
        verify: Callable[..., Verification] | None,
    ):
        """first_step: laps are numbered on from it, above those of a head before. in_flight: laps. everyone_ready gives
        the slots that every stage holds, 0 while a stage is away; it may raise PPError. verify: None where requests may
        not ask for it."""
        plan = stage.plan
        self._max_waiting, self._counts = max_waiting, Counts()
        self._look_at_waiting_at = 0.0  # monotonic seconds
        self._said: list[Said] = []  # of the lap that is being received
        self._hops_us: deque[float] = deque(maxlen=256)
        self._stage, self._text, self._reporter = stage, text, reporter
        self._door = Door(text, vocab_size, plan.context)
        self._everyone_ready, self._open_for_all, self._problem = everyone_ready, False, ""
        self._verifier = Verifier(verify, stage, lap_deadline_s) if verify else None
        self._hops = plan.n_stages if plan.n_stages > 1 else 0
        self._sessions: dict[bytes, Session] = {}
        self._ids: set[str] = set()  # of their Celery requests
        self._first_step, self._n_opened = first_step, 0  # no two requests have one short id, whatever their ids are
        self._state = State(
            plan.slots, plan.max_rows, lap_deadline_s,
            next_step=first_step, max_lanes=max_lanes, in_flight=in_flight,
        )  # fmt: skip

    def submit(self, celery_request: Any) -> None:
        """Take a request in, or report why not."""
        if not is_id(celery_request.id):  # nobody can be told
            log.warning("a request without a usable id is dropped")
            return
        if celery_request.id in self._ids or (
            self._verifier is not None and celery_request.id in self._verifier
        ):  # a publish that was repeated; the first copy will answer
            log.warning("request %s came twice: the second is dropped", celery_request.id)
            return
        try:
            session = self._open(celery_request)
        except PPError as e:
            self._refuse(celery_request, e)
            return
        except Exception as e:  # what a stranger sent must never end the head
            log.exception("request %s", celery_request.id)
            self._refuse(celery_request, RequestError(f"the request cannot be read: {type(e).__name__}"))
            return
        self._sessions[session.sequence.short_id] = session
        self._ids.add(celery_request.id)
        if session.sequence.max_tokens == 0:
            self._reporter.started(celery_request)
            self._end(session, finish_reason="length")
            return
        self._state.waiting.append(session.sequence)

    def _refuse(self, celery_request: Any, error: PPError) -> None:
        self._counts.failed += 1
        self._reporter.failed(celery_request, reply_of(celery_request), error)

    def next_batch(self) -> Batch | None:
        """What goes on the next lap now, on record as sent."""
        if not self._open_for_all and any(self._state.sequences()):
            self._open_for_all = self._is_everyone_ready()
        if not self._open_for_all:
            return None
        for sequence in self._state.admit():
            session = self._sessions[sequence.short_id]
            if not session.started_at:  # else it was admitted before, and had to wait again
                session.started_at = time.monotonic()
                self._reporter.started(session.celery)
        if (batch := schedule(self._state)) is not None:
            self._state.sent(batch, time.monotonic())
        return batch

    def receive(self, frame: Frame) -> None:
        """A lap came back, or a stage could not do its part of it."""
        if frame.kind is Kind.ERROR:
            self._stage_error(frame)
            return
        if frame.kind is Kind.TRACE:
            if self._verifier is not None:
                self._verifier.record(frame)
            return
        lap, alone, now = self._state.laps.get(frame.step), len(self._state.laps) == 1, time.monotonic()
        tokens = {lane.request: of_lane for lane, of_lane in self._stage.tokens_of(frame)} if lap else {}
        for lane, sequence in self._state.returned(frame.step, frame.lanes):
            sequence.computed(lane)
            session = self._sessions[lane.request]
            if lap and alone and self._hops and lane.length == 1:  # a decode step that waited for no other
                session.hops_us.append(max(0.0, ((now - lap.sent_at) * 1e6 - frame.compute_us) / self._hops))
                self._hops_us.append(session.hops_us[-1])
            if (found := tokens[lane.request]) is None:
                self._end(session, error=RequestFailed(not_finite(lane)))
            else:
                self._append(session, found)
        self._tell()

    def fail_lanes(self, lanes: tuple[Any, ...], error: PPError) -> None:
        """The requests of these lanes cannot go on."""
        for lane in lanes:
            if (session := self._sessions.get(lane.request)) is not None:
                self._end(session, error=error)

    def tick(self) -> None:
        """What time brings: laps past their deadline, requests that were revoked."""
        if overdue := self._state.overdue(time.monotonic()):
            self._is_everyone_ready()
        for sequence, position in overdue:
            log.warning("request %s: a lap is overdue, sending again from position %d", sequence.request_id, position)
            self._again(sequence, position)
        if self._verifier is not None:
            self._state.postpone(self._verifier.tick())
        self._end_revoked()

    def _end_revoked(self) -> None:
        """Those that are served at once; those that wait, of whom there may be a thousand, now and then."""
        sequences = list(self._state.live.values())
        if (now := time.monotonic()) >= self._look_at_waiting_at:
            self._look_at_waiting_at = now + WAITING_EVERY_S
            for sequence in self._state.waiting:
                self._sessions[sequence.short_id].celery.maybe_expire()  # then it is among the revoked
            sequences += self._state.waiting
        for sequence in sequences:
            if sequence.request_id in celery_state.revoked:
                self._end(self._sessions[sequence.short_id], finish_reason="cancelled")

    def stage_restarted(self, stage: int) -> None:
        """Its KV cache is empty: every live sequence goes again from its first position."""
        log.warning("stage %d was started again: sending %d live requests again", stage, len(self._state.live))
        self._open_for_all = False  # until it is known that the new worker holds our plan
        self._state.rewind_all()

    def close(self) -> None:
        """The worker stops: whoever waits for an answer is told."""
        stopped = RequestFailed("the head was stopped before this request ended: send it again")
        for session in list(self._sessions.values()):
            self._end(session, error=stopped)
        if self._verifier is not None:
            self._verifier.close(stopped)

    def _is_everyone_ready(self) -> bool:
        """Asks the broker. Why not, if a stage failed or differs, is logged once and remembered."""
        try:
            slots, problem = self._everyone_ready(), ""
        except PPError as e:
            slots, problem = 0, str(e)
            if problem != self._problem:
                log.warning("requests wait: %s", problem)
        self._problem = problem
        if slots and slots != self._state.n_slots:
            self._state.resize(slots)
        return slots > 0

    def _open(self, celery_request: Any) -> Session:
        """Raises RequestError, or Busy."""
        if len(self._state.waiting) >= self._max_waiting:
            raise Busy(f"{self._max_waiting} requests are waiting already: send it again later")
        self._n_opened += 1
        session = self._door.open(celery_request, short_id(f"{self._first_step} {self._n_opened}"))
        if session.sequence.traced:
            if self._verifier is None:
                raise RequestError("this head verifies no requests: start it with PP_VERIFY=1, or use `pp verify`")
            self._verifier.watch(session.sequence)
        return session

    def _append(self, session: Session, tokens: list[Token]) -> None:
        for token in tokens:
            piece, reason = session.take(token, self._text)
            self._counts.tokens += 1
            self._said.append((session.reply, piece))
            if reason is not None:
                self._end(session, finish_reason=reason)
                return

    def _tell(self) -> None:
        if self._said:
            self._reporter.tokens(self._said)
            self._said = []

    def _stage_error(self, frame: Frame) -> None:
        message = frame.payload.tobytes().decode(errors="replace")
        for lane, sequence in self._state.returned(frame.step, frame.lanes):
            if frame.error is ErrorCode.CACHE_MISS:
                log.warning("request %s: %s; sending it again from the start", sequence.request_id, message)
                self._state.missed(lane, sequence)
                self._open_for_all = False  # a stage may be another than it was, and hold fewer slots
                self._give_up_if_lost(sequence, message)
            else:
                self._end(self._sessions[lane.request], error=RequestFailed(message))

    def _again(self, sequence: Sequence, position: int) -> None:
        self._state.rewind(sequence, position)
        self._give_up_if_lost(sequence, "look at the stages' logs, or raise PP_LAP_DEADLINE")

    def _give_up_if_lost(self, sequence: Sequence, why: str) -> None:
        if sequence.lost > MAX_LOST:
            why = self._problem or why
            error = RequestFailed(f"{sequence.lost} laps in a row were lost or late: {why}")
            self._end(self._sessions[sequence.short_id], error=error)

    def figures(self) -> dict[str, Any]:
        """Fields of `Member`. From any thread: each is read in one step of the interpreter."""
        state, hops = self._state, list(self._hops_us)
        return {
            "live": len(state.live), "waiting": len(state.waiting), "in_flight": len(state.laps),
            "hop_us": float(np.median(hops)) if hops else 0.0, **vars(self._counts),
        }  # fmt: skip

    def _end(self, session: Session, *, finish_reason: str = "", error: PPError | None = None) -> None:
        self._tell()  # its last tokens before its end
        (self._state.end if error is None else self._state.fail)(session.sequence)
        del self._sessions[session.sequence.short_id]
        self._ids.discard(session.celery.id)
        if self._verifier is not None and session.sequence.traced:
            if error is None and finish_reason != "cancelled":
                result = session.result(finish_reason)
                self._verifier.ended(session.sequence, partial(self._verified, session, result))
                return
            self._verifier.forget(session.sequence)
        if error is not None:
            self._counts.failed += 1
            self._reporter.failed(session.celery, session.reply, error)
        elif finish_reason == "cancelled":
            self._counts.cancelled += 1
            self._reporter.cancelled(session.celery, session.reply)
        else:
            self._finished(session, session.result(finish_reason))

    def _finished(self, session: Session, result: dict[str, Any]) -> None:
        self._counts.requests += 1
        self._counts.prompt_tokens += result["prompt_tokens"]
        self._counts.cached_tokens += result["cached_tokens"]
        self._reporter.finished(session.celery, session.reply, result)

    def _verified(self, session: Session, result: dict[str, Any], outcome: Outcome) -> None:
        if isinstance(outcome, PPError):
            self._counts.failed += 1
            self._reporter.failed(session.celery, session.reply, outcome)
        else:
            self._finished(session, result | {"verification": outcome.to_json()})
