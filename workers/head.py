"""The head's part that knows requests: text to ids at the door, ids to text on the way out. All on the engine's
thread.

What goes on the next lap is decided in scheduler.py, what a lap computes in stage.py; this is the book-keeping between
them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from celery.worker import state as celery_state

from pptasks.errors import Busy, PPError, PromptTooLong, RequestError, RequestFailed
from pptasks.request import Request, is_stream_name
from pptasks.stops import StopFilter
from pptasks.stream import Piece, TokenLogprobs
from pptasks.text import Decoder, Text
from pptasks.wire import ErrorCode, Frame, Kind, short_id
from workers.reporter import Reporter, Said
from workers.sample import Token
from workers.scheduler import MAX_LOST, Batch, Sequence, State, schedule
from workers.stage import Stage
from workers.verifier import Outcome, Verifier
from workers.verify import Verification

log = logging.getLogger(__name__)

CHARS_AT_ONCE = 1 << 16  # are tokenized in some 50 ms
RECENT_HOPS = 4096


@dataclass
class Session:
    """A request in the head's hands: Celery's side of it, its sequence, its text, its times (monotonic seconds)."""

    celery: Any  # celery.worker.request.Request
    sequence: Sequence
    decoder: Decoder
    stops: StopFilter
    reply: str  # name of the stream that its pieces go to
    logprobs: list[TokenLogprobs] | None  # None: not asked for
    started_at: float = 0.0
    first_at: float = 0.0
    text: list[str] = field(default_factory=list)
    hops_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_HOPS))


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
        self._said: list[Said] = []  # of the lap that is being received
        self._hops_us: deque[float] = deque(maxlen=256)
        self._stage, self._text, self._reporter, self._vocab = stage, text, reporter, vocab_size
        self._everyone_ready, self._open_for_all, self._problem = everyone_ready, False, ""
        self._verifier = Verifier(verify, stage, lap_deadline_s) if verify else None
        self._hops = plan.n_stages if plan.n_stages > 1 else 0
        self._sessions: dict[bytes, Session] = {}
        self._state = State(
            plan.slots, plan.max_rows, lap_deadline_s,
            next_step=first_step, max_lanes=max_lanes, in_flight=in_flight,
        )  # fmt: skip

    def submit(self, celery_request: Any) -> None:
        """Take a request in, or report why not."""
        key = short_id(celery_request.id)
        if key in self._sessions or (
            self._verifier is not None and key in self._verifier
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
        if session.sequence.max_tokens == 0:
            self._reporter.started(celery_request)
            self._end(session, finish_reason="length")
            return
        self._state.waiting.append(session.sequence)

    def _refuse(self, celery_request: Any, error: PPError) -> None:
        self._counts.failed += 1
        self._reporter.failed(celery_request, _reply_of(celery_request), error)

    def next_batch(self) -> Batch | None:
        """What goes on the next lap now, on record as sent."""
        if not self._open_for_all and any(self._state.sequences()):
            self._open_for_all = self._is_everyone_ready()
        if not self._open_for_all:
            return None
        for sequence in self._state.admit():
            session = self._sessions[sequence.short_id]
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
                session.hops_us.append(((now - lap.sent_at) * 1e6 - frame.compute_us) / self._hops)
                self._hops_us.append(session.hops_us[-1])
            if tokens[lane.request]:
                self._append(session, tokens[lane.request])
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
        for session in list(self._sessions.values()):
            if not session.started_at:
                session.celery.maybe_expire()  # then it is among the revoked
            if session.sequence.request_id in celery_state.revoked:
                self._end(session, finish_reason="cancelled")

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
        """Raises RequestError."""
        if len(self._state.waiting) >= self._max_waiting:
            raise Busy(f"{self._max_waiting} requests are waiting already: send it again later")
        args, kwargs, _ = celery_request._payload
        if args:
            raise RequestError(
                "pptasks.generate takes keyword arguments only: prompt, messages or tokens, max_tokens, ..."
            )
        request = Request.from_kwargs(kwargs)
        ids = self._encode(request)
        context = self._stage.plan.context
        if len(ids) > context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, but the context holds {context}: shorten it, or raise --context"
            )
        sequence = Sequence(
            request_id=celery_request.id,
            short_id=short_id(celery_request.id),
            ids=ids,
            n_prompt=len(ids),
            max_tokens=min(request.max_tokens, context - len(ids) + 1),
            stop_ids=self._text.stop_ids,
            sampling=request.sampling,
            traced=request.verify,
        )
        if request.verify and self._verifier is None:
            raise RequestError("this head verifies no requests: start it with PP_VERIFY=1, or use `pp verify`")
        if request.verify and self._verifier is not None:
            self._verifier.watch(sequence)
        return Session(
            celery_request, sequence, self._text.decoder(), StopFilter(request.stop),
            request.reply or celery_request.id, None if request.logprobs is None else [],
        )  # fmt: skip

    def _encode(self, request: Request) -> list[int]:
        ids = list(request.tokens) if request.tokens is not None else self._tokenize(request)
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if (largest := max(ids)) >= self._vocab:
            raise RequestError(f"token id {largest} is outside the vocabulary of {self._vocab}")
        return ids

    def _tokenize(self, request: Request) -> list[int]:
        self._check_length(request)
        if request.messages is not None:
            return self._text.encode_chat([dict(m) for m in request.messages])
        if request.raw:
            return self._text.encode(request.prompt or "")
        return self._text.encode_chat([{"role": "user", "content": request.prompt or ""}])

    def _check_length(self, request: Request) -> None:
        """A text that no context could hold is refused before it is tokenized, which would hold every request up."""
        chars = len(request.prompt or "") + sum(len(message["content"]) for message in request.messages or ())
        context, least = self._stage.plan.context, chars // self._text.longest_token
        if chars > CHARS_AT_ONCE and least > context:
            raise PromptTooLong(f"the prompt has at least {least} tokens, but the context holds {context}: shorten it")

    def _append(self, session: Session, tokens: list[Token]) -> None:
        sequence = session.sequence
        if not sequence.n_generated:
            session.first_at = time.monotonic()
        for token in tokens:
            sequence.append(token.id)
            self._counts.tokens += 1
            piece = session.stops.push(session.decoder.push(token.id))
            reason = "stop" if session.stops.is_hit else sequence.finish_reason
            if reason is not None:
                piece += session.stops.push(session.decoder.finish()) + session.stops.finish()
            session.text.append(piece)
            logprobs = () if session.logprobs is None else (self._logprobs(token),)
            if session.logprobs is not None:
                session.logprobs += logprobs
            self._said.append((session.reply, Piece(sequence.request_id, (token.id,), piece, logprobs)))
            if reason is not None:
                self._end(session, finish_reason=reason)
                return

    def _tell(self) -> None:
        if self._said:
            self._reporter.tokens(self._said)
            self._said = []

    def _logprobs(self, token: Token) -> TokenLogprobs:
        text = self._text.of_token
        raw = text(token.id)
        top = tuple((i, text(i).decode(errors="replace"), p) for i, p in token.top)
        return TokenLogprobs(token.id, raw.decode(errors="replace"), raw, token.logprob or 0.0, top)

    def _stage_error(self, frame: Frame) -> None:
        message = frame.payload.tobytes().decode(errors="replace")
        for lane, sequence in self._state.returned(frame.step, frame.lanes):
            if frame.error is ErrorCode.CACHE_MISS:
                log.warning("request %s: %s; sending it again from the start", sequence.request_id, message)
                self._state.missed(lane, sequence)
                self._give_up_if_lost(sequence)
            else:
                self._end(self._sessions[lane.request], error=RequestFailed(message))

    def _again(self, sequence: Sequence, position: int) -> None:
        self._state.rewind(sequence, position)
        self._give_up_if_lost(sequence)

    def _give_up_if_lost(self, sequence: Sequence) -> None:
        if sequence.lost > MAX_LOST:
            why = self._problem or "look at the stages' logs, or raise PP_LAP_DEADLINE"
            error = RequestFailed(f"{sequence.lost} laps in a row were lost or late: {why}")
            self._end(self._sessions[sequence.short_id], error=error)

    def figures(self) -> dict[str, Any]:
        """Fields of `Member`. From any thread: what it reads is replaced, never half written."""
        state, hops = self._state, list(self._hops_us)
        return {
            "live": len(state.live), "waiting": len(state.waiting), "in_flight": len(state.laps),
            "hop_us": float(np.median(hops)) if hops else 0.0, **vars(self._counts),
        }  # fmt: skip

    def _end(self, session: Session, *, finish_reason: str = "", error: PPError | None = None) -> None:
        self._tell()  # its last tokens before its end
        self._state.end(session.sequence)
        del self._sessions[session.sequence.short_id]
        if self._verifier is not None and session.sequence.traced:
            if error is None and finish_reason != "cancelled":
                result = self._result(session, finish_reason)
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
            self._finished(session, self._result(session, finish_reason))

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

    def _result(self, session: Session, finish_reason: str) -> dict[str, Any]:
        sequence, now = session.sequence, time.monotonic()
        n = sequence.n_generated
        decode_s = now - session.first_at if n else 0.0
        p50, p99 = np.percentile(session.hops_us, [50, 99]).tolist() if session.hops_us else (None, None)
        return {
            "text": "".join(session.text),
            "token_ids": sequence.generated,
            "prompt_token_ids": sequence.ids[: sequence.n_prompt],
            "finish_reason": finish_reason,
            "seed": sequence.sampling.seed,
            "prompt_tokens": sequence.n_prompt,
            "cached_tokens": sequence.n_cached,
            "completion_tokens": n,
            "logprobs": None if session.logprobs is None else [t.to_json() for t in session.logprobs],
            "timings": {
                "prefill_s": session.first_at - session.started_at if n else None,
                "decode_s": decode_s,
                "tokens_per_s": (n - 1) / decode_s if n > 1 and decode_s else None,
                "hop_us_p50": p50,
                "hop_us_p99": p99,
            },
        }


def _reply_of(celery_request: Any) -> str:
    """Where a request that is refused wants to hear of it, as far as it can be read."""
    try:
        name = celery_request._payload[1].get("reply")
    except Exception:
        name = None
    return str(name) if is_stream_name(name) else str(celery_request.id)
