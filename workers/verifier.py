"""The head's requests that asked to be verified: what the stages tell of them, and the check when all of it is here."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from celery.worker import state as celery_state

from pptasks.errors import PPError, RequestError, RequestFailed
from pptasks.wire import Frame
from workers.scheduler import Sequence
from workers.stage import Stage
from workers.verify import Traces, Verification

log = logging.getLogger(__name__)

MAX_TOLD_BYTES = 1 << 30  # of one request, from all stages

Outcome = Verification | PPError
OnChecked = Callable[[Outcome], None]


@dataclass
class _Watched:
    """`on_checked` is set when the answer has ended; what the stages told must be here `by` then (monotonic time)."""

    sequence: Sequence
    traces: Traces
    on_checked: OnChecked | None = None
    by: float = 0.0


class Verifier:
    """Not shared between threads. `verify(ids, n_prompt, sampling, traces)` computes an answer again."""

    def __init__(self, verify: Callable[..., Verification], stage: Stage, patience_s: float):
        """patience_s: how long after the end of an answer a TRACE frame may still come."""
        self._verify, self._stage, self._patience_s = verify, stage, patience_s
        self._watched: dict[bytes, _Watched] = {}

    def watch(self, sequence: Sequence) -> None:
        """Keep what the stages will tell of it. Raises RequestError if that is more than the head keeps."""
        shape = self._stage.plan.n_stages, sequence.n_prompt + sequence.max_tokens, self._stage.slice.dim
        if (size := Traces.nbytes(*shape)) > MAX_TOLD_BYTES:
            told = f"{shape[1]} positions of {shape[0]} stages take {size / 1e6:.0f} MB"
            limit = f"at most {MAX_TOLD_BYTES / 1e6:.0f} MB are kept for a verification"
            raise RequestError(f"{told}, and {limit}: ask for fewer tokens")
        self._watched[sequence.short_id] = _Watched(sequence, Traces(*shape))

    def record(self, frame: Frame) -> None:
        """What a stage tells of the rows that it computed. Raises WireError for a frame that is not of this run."""
        self._stage.check(frame)
        row = 0
        for lane in frame.lanes:
            if (watched := self._watched.get(lane.request)) is not None:
                watched.traces.record(frame.sender, lane.position, frame.payload[row : row + lane.length])
            row += lane.length

    def ended(self, sequence: Sequence, on_checked: OnChecked) -> None:
        """The answer is complete: check it as soon as all stages have told all of it."""
        watched = self._watched[sequence.short_id]
        watched.on_checked, watched.by = on_checked, time.monotonic() + self._patience_s

    def __contains__(self, request_id: str) -> bool:
        """Whether this request is being answered or checked."""
        return any(watched.sequence.request_id == request_id for watched in self._watched.values())

    def forget(self, sequence: Sequence) -> None:
        """It failed, or was cancelled: there is nothing to check."""
        self._watched.pop(sequence.short_id, None)

    def tick(self) -> float:
        """Check one answer that can be; the seconds that it took, in which the engine did nothing else."""
        began = time.monotonic()
        for watched in list(self._watched.values()):
            if watched.on_checked is not None and (outcome := self._check(watched)) is not None:
                self.forget(watched.sequence)
                watched.on_checked(outcome)
                break  # what came for the others meanwhile is in the inbox
        took = time.monotonic() - began
        for watched in self._watched.values():
            watched.by += took
        return took

    def close(self, error: PPError) -> None:
        """The worker stops: whoever waits for a check is told."""
        for watched in self._watched.values():
            if watched.on_checked is not None:
                watched.on_checked(error)

    def _check(self, watched: _Watched) -> Outcome | None:
        """None while something is still on its way."""
        sequence = watched.sequence
        if sequence.request_id in celery_state.revoked:
            return RequestFailed("it was cancelled before it could be verified")
        untold = watched.traces.missing(len(sequence.ids) - 1)
        if untold is not None and time.monotonic() < watched.by:
            return None
        if untold is not None:
            stage, position = untold
            return RequestFailed(f"stage {stage} did not tell what it computed for position {position}: verify again")
        try:
            return self._verify(sequence.ids, sequence.n_prompt, sequence.sampling, watched.traces)
        except PPError as e:
            return e
        except Exception as e:
            log.exception("request %s cannot be verified", sequence.request_id)
            return RequestFailed(f"the answer cannot be verified: {type(e).__name__}: {e}")
