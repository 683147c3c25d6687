"""The differential check: an answer computed again on one machine, every layer of it, and compared.

While a request that asks for it is served, every stage also tells the head what its blocks gave for each row (TRACE
frames, not rounded). Afterwards the head computes the same positions by itself, one range of layers after the other so
that it never holds more than fits. Each stage is computed from what the one before it told, rounded as on the wire, so
that a difference belongs to the stage where it shows; and the tokens from what the last one told.

Stages whose arithmetic is the same as ours (`Slice.arithmetic`) must agree in every bit: on one processor the C kernels
sum in one order, however many rows a step had. Across devices float32 differs in its last bits: there a row may be off
by TOLERANCE of what the stage changed in it, and a token by a margin of that size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from pptasks.modelinfo import Model, OnProgress, memory_bytes
from pptasks.plan import Plan, Span, cache_bytes
from pptasks.wire import DTYPES, Sampling
from workers.sample import penalised, sample

if TYPE_CHECKING:
    from workers.model import Slice

MEMORY_SHARE = 0.5  # of what is free, for one range of layers
TOLERANCE = 1e-3  # of the rms of a row's change, on stages that round otherwise than we do
MARGIN = 1e-3  # of the spread of a position's logits: closer than that, rounding may choose either


class OpenSlice(Protocol):
    def __call__(self, span: Span, *, embedding: bool, readout: bool, n_slots: int, context: int) -> "Slice": ...


class Traces:
    """What the stages told of one sequence: float32 (stages, positions, D), filled as its laps come back."""

    def __init__(self, n_stages: int, n_positions: int, dim: int):
        self._values = np.empty((n_stages, n_positions, dim), np.float32)  # costs memory where it is written
        self._known = np.zeros((n_stages, n_positions), bool)

    @staticmethod
    def nbytes(n_stages: int, n_positions: int, dim: int) -> int:
        return 4 * n_stages * n_positions * dim

    def record(self, stage: int, position: int, rows: np.ndarray) -> None:
        """rows: float32 (n, D), those of `position` and on. What lies outside is ignored."""
        n_stages, n_positions = self._known.shape
        if stage < n_stages and position < n_positions:
            end = min(position + len(rows), n_positions)
            self._values[stage, position:end] = rows[: end - position]
            self._known[stage, position:end] = True

    def missing(self, n_positions: int) -> tuple[int, int] | None:
        """(stage, position) of the first row that nobody has told; None when `n_positions` of every stage are here."""
        absent = np.argwhere(~self._known[:, :n_positions])
        return (int(absent[0, 0]), int(absent[0, 1])) if len(absent) else None

    def of(self, stage: int, n_positions: int) -> np.ndarray:
        return self._values[stage, :n_positions]


@dataclass(frozen=True)
class StageCheck:
    """How what a stage told differs from what we computed, over all positions."""

    stage: int
    max_abs_diff: float | None  # None: one side has a value that is no number
    values_differ: int  # in their bits: -0.0 and 0.0 differ
    first_position: int | None  # where a value differs, or is no number
    worst: float | None  # the largest difference of a row, of the rms of what the stage changed in it


@dataclass(frozen=True)
class Verification:
    """`passed`: hidden states and tokens are ours, where `exact` to the last bit, else but for rounding."""

    passed: bool
    exact: bool  # all stages compute as we do, bit for bit
    reason: str  # of a failure, one line
    token_ids: tuple[int, ...]  # ours, at each position given the pipeline's tokens before it
    first_difference: int | None  # index into them
    stages: tuple[StageCheck, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    model: Model,
    plan: Plan,
    ids: Sequence[int],
    n_prompt: int,
    sampling: Sampling,
    traces: Traces,
    *,
    open_slice: OpenSlice,
    arithmetics: Callable[[], set[str]],
    on_progress: OnProgress,
) -> Verification:
    """Compute `ids` (prompt and answer) again and compare. `arithmetics`: those of the stages."""
    n = len(ids) - 1  # the last token was never computed on
    budget = int(psutil.virtual_memory().available * MEMORY_SHARE)
    head = open_slice(Span(0, 0), embedding=True, readout=False, n_slots=1, context=n)
    exact = bool(head.arithmetic) and arithmetics() == {head.arithmetic}
    positions = np.arange(n, dtype=np.int32)
    x = np.concatenate([head.embed(np.array(ids[rows], np.int32), positions[rows]) for rows in _chunks(n, plan)])
    del head
    checks = []
    for stage, span in enumerate(plan.spans):
        y = x
        for piece in pieces(model, span, plan.weights, n, budget):
            slice_ = open_slice(piece, embedding=False, readout=False, n_slots=1, context=n)
            y = _forward(slice_, y, plan, partial(on_progress, f"verify stage {stage}"))
            del slice_
        told = traces.of(stage, n)
        checks.append(_compare(stage, x, y, told))
        rounded = stage < plan.n_stages - 1 or plan.is_ring
        x = told.astype(DTYPES[plan.wire]).astype(np.float32) if rounded else told
    slice_ = open_slice(Span(plan.n_blocks, plan.n_blocks), embedding=False, readout=True, n_slots=1, context=1)
    choices, counts = [], Counter[int]()  # of the ids that were generated before
    for i in range(n_prompt - 1, n):
        choices.append(_Choice.of(slice_.logits(x[i : i + 1])[0], sampling, i, counts, ids[i + 1]))
        counts[ids[i + 1]] += 1
    return _verdict(choices, tuple(checks), exact=exact, greedy=sampling.temperature == 0)


def _forward(slice_: "Slice", x: np.ndarray, plan: Plan, on_progress: Callable[[int, int], None]) -> np.ndarray:
    """All positions of one sequence, float32 (n, D), in frames as long as a stage takes them."""
    n, out = len(x), []
    for rows in _chunks(n, plan):
        on_progress(rows.start, n)
        positions = np.arange(rows.start, rows.stop, dtype=np.int32)
        out.append(slice_.forward(x[rows], np.zeros_like(positions), positions))
    return np.concatenate(out)


@dataclass(frozen=True)
class _Choice:
    """One position of the answer: the pipeline's token, ours, how much higher our logit is, and the logits' spread;
    less penalties."""

    theirs: int
    ours: int
    margin: float
    spread: float

    @classmethod
    def of(
        cls, logits: np.ndarray, sampling: Sampling, position: int, counts: Mapping[int, int], theirs: int
    ) -> "_Choice":
        ours = sample(logits, sampling, position, counts.items())
        logits = penalised(logits, sampling, counts.items())
        return cls(theirs, ours, float(logits[ours] - logits[theirs]), float(np.ptp(logits)))


def pieces(model: Model, span: Span, weights: str, n_positions: int, budget: int) -> Iterator[Span]:
    """`span` in consecutive ranges whose weights and KV cache fit `budget` bytes, each of one block at least. Pure."""
    lo, held, cache = span.lo, 0, cache_bytes(model, 1, n_positions)
    for i in range(span.lo, span.hi):
        size = memory_bytes(model.block_tensors(i), weights) + cache
        if i > lo and held + size > budget:
            yield Span(lo, i)
            lo, held = i, 0
        held += size
    if lo < span.hi:
        yield Span(lo, span.hi)


def _chunks(n: int, plan: Plan) -> Iterator[slice]:
    for first in range(0, n, plan.max_rows):
        yield slice(first, min(first + plan.max_rows, n))


def _compare(stage: int, x: np.ndarray, ours: np.ndarray, told: np.ndarray) -> StageCheck:
    """x: what the stage was given, float32 (n, D); ours and told: what came out."""
    if not (np.isfinite(ours).all() and np.isfinite(told).all()):
        broken = np.flatnonzero(~(np.isfinite(ours) & np.isfinite(told)).all(1))
        return StageCheck(stage, None, int((ours.view(np.uint32) != told.view(np.uint32)).sum()), int(broken[0]), None)
    differ = ours.view(np.uint32) != told.view(np.uint32)  # (n, D)
    rows, off = np.flatnonzero(differ.any(1)), np.abs(ours - told)
    change = np.sqrt(((ours - x).astype(np.float64) ** 2).mean(1)) if np.any(ours != x) else np.ones(len(x))
    worst = float((off.max(1) / np.maximum(change, np.finfo(np.float32).tiny)).max(initial=0.0))
    first = int(rows[0]) if len(rows) else None
    return StageCheck(stage, float(off.max(initial=0.0)), int(differ.sum()), first, worst)


def _verdict(choices: Sequence[_Choice], checks: tuple[StageCheck, ...], *, exact: bool, greedy: bool) -> Verification:
    """Sampled tokens are not judged where stages round otherwise: a draw may fall to either side of a border."""
    differ = [i for i, choice in enumerate(choices) if choice.ours != choice.theirs]
    wrong = [i for i in differ if exact or (greedy and not choices[i].margin <= MARGIN * choices[i].spread)]
    broken = next((check for check in checks if not _holds(check, exact)), None)
    reason = ""
    if broken is not None:
        reason = _reason(broken)
    elif wrong:
        choice = choices[wrong[0]]
        reason = (
            f"token {wrong[0]} of the answer is {choice.theirs}; computed on the head it is {choice.ours}, "
            f"whose logit is {choice.margin:.3g} higher"
        )
    ours = tuple(choice.ours for choice in choices)
    return Verification(not reason, exact, reason, ours, differ[0] if differ else None, checks)


def _holds(check: StageCheck, exact: bool) -> bool:
    if check.worst is None:
        return False
    return check.values_differ == 0 if exact else check.worst <= TOLERANCE


def _reason(check: StageCheck) -> str:
    if check.worst is None:
        return f"the hidden state after stage {check.stage} is not a number at position {check.first_position}"
    what = f"{check.values_differ} values, by {check.max_abs_diff:.3g} at most"
    return f"the hidden state after stage {check.stage} differs from position {check.first_position} on: {what}"
