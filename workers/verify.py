"""The differential check: an answer computed again on one machine, every layer of it, and compared bit by bit.

While a request that asks for it is served, every stage also tells the head what its blocks gave for each row (TRACE
frames, not rounded). Afterwards the head computes the same positions by itself, one range of layers after the other so
that it never holds more than fits, with the wire's rounding between the stages. What it gets after each stage is
compared with what that stage told, and its tokens with the pipeline's.

Stages whose arithmetic is the same as ours (`Slice.arithmetic`) must agree in every bit: on one processor the C kernels
sum in one order, however many rows a step had. Across devices float32 differs in its last bits, and the tokens decide.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from pptasks.modelinfo import Model, memory_bytes
from pptasks.plan import Plan, Span
from pptasks.wire import DTYPES, Sampling
from workers.sample import sample

if TYPE_CHECKING:
    from workers.model import Slice

MEMORY_SHARE = 0.5  # of what is free, for one range of layers


class OpenSlice(Protocol):
    def __call__(self, span: Span, *, embedding: bool, readout: bool, n_slots: int, context: int) -> "Slice": ...


class Traces:
    """What the stages told of one sequence: float32 (stages, positions, D), filled as its laps come back."""

    def __init__(self, n_stages: int, n_positions: int, dim: int):
        self._values = np.empty((n_stages, n_positions, dim), np.float32)  # costs memory where it is written
        self._known = np.zeros((n_stages, n_positions), bool)

    def record(self, stage: int, position: int, rows: np.ndarray) -> None:
        """rows: float32 (n, D), those of `position` and on. What lies outside is ignored."""
        if stage < len(self._values):
            end = min(position + len(rows), self._known.shape[1])
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
    max_abs_diff: float
    values_differ: int  # in their bits: -0.0 and 0.0 differ
    first_position: int | None


@dataclass(frozen=True)
class Verification:
    """`passed`: the tokens are the same, and where `exact` is asked for, every bit of every hidden state."""

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
    open_slice: OpenSlice,
    arithmetics: Callable[[], set[str]],
) -> Verification:
    """Compute `ids` (prompt and answer) again and compare. `arithmetics`: those of the stages."""
    n = len(ids) - 1  # the last token was never computed on
    positions = np.arange(n, dtype=np.int32)
    head = open_slice(Span(0, 0), embedding=True, readout=False, n_slots=1, context=n)
    same = head.exact and arithmetics() == {head.arithmetic}
    x = np.concatenate([head.embed(np.array(ids[rows], np.int32), positions[rows]) for rows in _chunks(n, plan)])
    del head
    checks = []
    for stage, span in enumerate(plan.spans):
        for piece in pieces(model, span, plan.weights, int(psutil.virtual_memory().available * MEMORY_SHARE)):
            slice_ = open_slice(piece, embedding=False, readout=False, n_slots=1, context=n)
            x = np.concatenate(
                [slice_.forward(x[rows], 0 * positions[rows], positions[rows]) for rows in _chunks(n, plan)]
            )
            del slice_
        checks.append(_compare(stage, x, traces.of(stage, n)))
        if stage < plan.n_stages - 1 or plan.is_ring:
            x = x.astype(DTYPES[plan.wire]).astype(np.float32)
    slice_ = open_slice(Span(plan.n_blocks, plan.n_blocks), embedding=False, readout=True, n_slots=1, context=1)
    choices = [_Choice.of(slice_.logits(x[i : i + 1])[0], sampling, i, ids[i + 1]) for i in range(n_prompt - 1, n)]
    return _verdict(choices, tuple(checks), exact=same)


@dataclass(frozen=True)
class _Choice:
    """One position of the answer: the pipeline's token, ours, and how much higher our logit is."""

    theirs: int
    ours: int
    margin: float

    @classmethod
    def of(cls, logits: np.ndarray, sampling: Sampling, position: int, theirs: int) -> "_Choice":
        ours = sample(logits, sampling, position)
        return cls(theirs, ours, float(logits[ours] - logits[theirs]))


def pieces(model: Model, span: Span, weights: str, budget: int) -> Iterator[Span]:
    """`span` in consecutive ranges whose weights fit `budget` bytes, each of one block at least. Pure."""
    lo, held = span.lo, 0
    for i in range(span.lo, span.hi):
        size = memory_bytes(model.block_tensors(i), weights)
        if i > lo and held + size > budget:
            yield Span(lo, i)
            lo, held = i, 0
        held += size
    if lo < span.hi:
        yield Span(lo, span.hi)


def _chunks(n: int, plan: Plan) -> Iterator[slice]:
    for first in range(0, n, plan.max_rows):
        yield slice(first, min(first + plan.max_rows, n))


def _compare(stage: int, ours: np.ndarray, told: np.ndarray) -> StageCheck:
    differ = ours.view(np.uint32) != told.view(np.uint32)  # (n, D)
    rows = np.flatnonzero(differ.any(1))
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(ours - told).max(initial=0.0))
    return StageCheck(stage, largest, int(differ.sum()), int(rows[0]) if len(rows) else None)


def _verdict(choices: Sequence[_Choice], checks: tuple[StageCheck, ...], *, exact: bool) -> Verification:
    first = next((i for i, choice in enumerate(choices) if choice.ours != choice.theirs), None)
    broken = next((c for c in checks if (exact and c.values_differ) or not math.isfinite(c.max_abs_diff)), None)
    reason = ""
    if broken is not None:
        what = f"{broken.values_differ} values, by {broken.max_abs_diff:.3g} at most"
        reason = f"the hidden state after stage {broken.stage} differs from position {broken.first_position} on: {what}"
    elif first is not None:
        choice = choices[first]
        reason = (
            f"token {first} of the answer is {choice.theirs}; computed on the head it is {choice.ours}, "
            f"whose logit is {choice.margin:.3g} higher"
        )
    return Verification(not reason, exact, reason, tuple(choice.ours for choice in choices), first, checks)
