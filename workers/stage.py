"""The computation of one step on one stage: an activation in, the frames it makes out. No queue, no thread, no clock
but the compute time.

Rows are positions; a lane of `length` rows occupies that many rows of the payload, in the order of the lanes.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pptasks.errors import CacheMiss, MalformedFrame, WrongPlan
from pptasks.plan import Plan
from pptasks.routing import produces
from pptasks.wire import DTYPES, ErrorCode, Frame, Kind, Lane, columns
from workers.kv import Place, SlotTable
from workers.sample import Token, choose, rows_of
from workers.scheduler import Batch

if TYPE_CHECKING:
    from workers.model import Slice


class Stage:
    """Stage `index` of `plan`: checks a frame, keeps the slots, runs its slice, and makes the frames that go on."""

    def __init__(self, plan: Plan, index: int, run: bytes, slice_: "Slice"):
        self.plan, self.index, self.slice = plan, index, slice_
        self.n_steps = self.n_rows = self.n_lanes = self.busy_us = 0  # so far; lanes: of the last lap
        self._run_id, self._digest = run, plan.digest
        self._wire = DTYPES[plan.wire]
        self._slots = SlotTable(slice_.n_slots, plan.context)

    def start(self, batch: Batch) -> list[Frame]:
        """The head's part of a lap: embedding and its own blocks."""
        began = time.perf_counter_ns()
        x = self.slice.embed(np.array(batch.ids, np.int32), _positions(batch.lanes))  # (R, D)
        return self._compute(_Lap(batch.step, batch.traced, 0, began), batch.lanes, x)

    def step(self, frame: Frame) -> list[Frame]:
        """A later stage's part of a lap. Raises WrongPlan or MalformedFrame for a frame that is not for this stage."""
        began = time.perf_counter_ns()
        self.check(frame)
        if frame.kind is not Kind.ACTIVATION or self.index == 0:
            raise MalformedFrame(f"stage {self.index} got a frame of kind {frame.kind.name}")
        lap = _Lap(frame.step, frame.traced, frame.compute_us, began)
        return self._compute(lap, frame.lanes, frame.payload.astype(np.float32))

    def read_out(self, lanes: Sequence[Lane], hidden: np.ndarray) -> list[Token | None]:
        """Sampled tokens, one a read-out in the order of the lanes; hidden: float32 (sum of read-outs, D). None where
        no logit is the largest: something on the way here overflowed, or is broken."""
        logits = self.slice.logits(hidden) if len(hidden) else hidden  # (n, V)
        places = [
            (lane, position)
            for lane in lanes
            for position in range(lane.position + lane.length - lane.readout, lane.position + lane.length)
        ]
        return [self._sample(row, *place) for row, place in zip(logits, places, strict=True)]

    def _sample(self, logits: np.ndarray, lane: Lane, position: int) -> Token | None:
        return choose(logits, lane.sampling, position, lane.counts) if np.isfinite(logits.max()) else None

    def tokens_of(self, frame: Frame) -> list[tuple[Lane, list[Token] | None]]:
        """What a frame brings back to the head: read out here in a ring, on the last stage in a line. None for a lane
        that has none, see `not_finite`. Raises MalformedFrame for ids that are none."""
        began = time.perf_counter_ns()
        self.check(frame)
        if frame.kind is Kind.RETURN:
            tokens: Iterator[Token | None] = iter(self.read_out(frame.lanes, frame.payload.astype(np.float32)))
            self.busy_us += (time.perf_counter_ns() - began) // 1000
        elif frame.kind is Kind.TOKENS:
            owners = [lane for lane in frame.lanes for _ in range(lane.readout)]
            rows = zip(frame.payload, owners, strict=True)
            tokens = (Token.from_row(row, lane.sampling, self.slice.vocab_size) for row, lane in rows)
        else:
            raise MalformedFrame(f"the head got a frame of kind {frame.kind.name}")
        return [(lane, _all(islice(tokens, lane.readout))) for lane in frame.lanes]

    def check(self, frame: Frame) -> None:
        """Raises WrongPlan unless the frame belongs to this run and this plan, MalformedFrame if its rows are not our
        width."""
        if frame.run != self._run_id or frame.plan != self._digest:
            raise WrongPlan(
                f"stage {self.index} got a frame of plan {frame.plan.hex()}, but its own is {self._digest.hex()}: "
                "start every stage with the same model, stages, split, wire, readout, context, slots and weights"
            )
        if frame.kind in (Kind.ACTIVATION, Kind.RETURN, Kind.TRACE) and frame.payload.shape[1] != self.slice.dim:
            raise MalformedFrame(f"a hidden state of width {frame.payload.shape[1]}; this model's is {self.slice.dim}")

    def error(self, code: ErrorCode, step: int, lanes: Sequence[Lane], message: str) -> Frame:
        """Tells the head that these lanes were not computed here."""
        text = np.frombuffer(f"stage {self.index}: {message}".encode()[:1000], np.uint8)[None, :]
        return self._frame(Kind.ERROR, step, tuple(lanes), text, error=code)

    def _compute(self, lap: "_Lap", lanes: tuple[Lane, ...], x: np.ndarray) -> list[Frame]:
        step = lap.step
        places = [self._slots.place(lane, step) for lane in lanes]
        missed = [lane for lane, place in zip(lanes, places, strict=True) if place is Place.MISS]
        frames = (
            [self.error(ErrorCode.CACHE_MISS, step, missed, str(CacheMiss("positions are missing")))] if missed else []
        )
        if not all(place is Place.RUN for place in places):
            x = x[np.repeat([place is Place.RUN for place in places], [lane.length for lane in lanes])]
            lanes = tuple(lane for lane, place in zip(lanes, places, strict=True) if place is Place.RUN)
        if lanes:
            frames += self._run(lap, lanes, x)
        self.n_steps, self.n_rows, self.n_lanes = self.n_steps + 1, self.n_rows + len(x), len(lanes)
        self.busy_us += lap.so_far_us() - lap.before_us
        return frames

    def _run(self, lap: "_Lap", lanes: tuple[Lane, ...], x: np.ndarray) -> list[Frame]:
        lengths = [lane.length for lane in lanes]
        slots = np.repeat(np.array([lane.slot for lane in lanes], np.int32), lengths)  # (R,)
        try:
            for lane in lanes:
                if lane.shared is not None and lane.shared.slot != lane.slot:
                    self.slice.copy(lane.shared.slot, lane.slot, lane.shared.length)
            computed = x = self.slice.forward(x, slots, _positions(lanes))  # (R, D)
        except BaseException:
            for lane in lanes:
                self._slots.forget(lane.slot)
            raise
        kind = produces(self.plan, self.index)
        if kind is not Kind.ACTIVATION:
            ends = np.cumsum(lengths)
            x = x[np.concatenate([np.arange(end - lane.readout, end) for end, lane in zip(ends, lanes, strict=True)])]
        trace = [self._frame(Kind.TRACE, lap.step, lanes, computed)] if lap.traced else []
        if kind is Kind.TOKENS:
            return self._tokens(lap, lanes, x) + trace
        payload = x.astype(self._wire)
        return [self._frame(kind, lap.step, lanes, payload, compute_us=lap.so_far_us(), traced=lap.traced), *trace]

    def _tokens(self, lap: "_Lap", lanes: tuple[Lane, ...], hidden: np.ndarray) -> list[Frame]:
        """The read-out of a line: an error for each lane that has no token, and the tokens of all others."""
        tokens = iter(self.read_out(lanes, hidden))
        found = [(lane, _all(islice(tokens, lane.readout))) for lane in lanes]
        frames = [self.error(ErrorCode.FAILED, lap.step, [lane], not_finite(lane)) for lane, of in found if of is None]
        sound = tuple(lane for lane, of in found if of is not None)
        if sound:
            rows = rows_of([token for _, of in found if of is not None for token in of], columns(sound))
            us = lap.so_far_us()
            frames.append(self._frame(Kind.TOKENS, lap.step, sound, rows, compute_us=us, traced=lap.traced))
        return frames

    def _frame(
        self,
        kind: Kind,
        step: int,
        lanes: tuple[Lane, ...],
        payload: np.ndarray,
        *,
        compute_us: int = 0,
        error: ErrorCode = ErrorCode.NONE,
        traced: bool = False,
    ) -> Frame:
        return Frame(kind, self._digest, self._run_id, step, compute_us, lanes, payload, error, self.index, traced)


@dataclass(frozen=True)
class _Lap:
    """The lap that is being computed."""

    step: int
    traced: bool
    before_us: int  # compute time of the stages before, microseconds
    began: int  # here, ns of the performance counter

    def so_far_us(self) -> int:
        return self.before_us + (time.perf_counter_ns() - self.began) // 1000


def not_finite(lane: Lane) -> str:
    """Why a lane has no token: something on the way here overflowed, or is broken."""
    position = lane.position + lane.length - 1
    return f"the logits of position {position} are not finite: verify the model with `pp verify`"


def _all(tokens: Iterable[Token | None]) -> list[Token] | None:
    """None if one is missing."""
    found = list(tokens)
    return None if None in found else found  # type: ignore[return-value]


def _positions(lanes: Sequence[Lane]) -> np.ndarray:
    """int32 (R,): the position of each row."""
    return np.concatenate([np.arange(lane.position, lane.position + lane.length, dtype=np.int32) for lane in lanes])
