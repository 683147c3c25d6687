"""A whole pipeline in one process, through real frames: the scheduler, the stages, wire and routing, with nothing
between but a list.

A test may drop or double frames with `tamper`, which gets each hop's bytes and returns the bytes to deliver, in order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pptasks.config import Settings
from pptasks.errors import RequestFailed
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import Plan, Span, make_plan
from pptasks.routing import HEAD, route
from pptasks.wire import DTYPES, ErrorCode, Frame, Kind, Sampling, decode, encode, short_id
from workers import scheduler
from workers.model import Slice
from workers.scheduler import State, schedule
from workers.stage import Stage, not_finite
from workers.verify import Traces, Verification, verify

SECRET = b"s" * 32
RUN = short_id("test")
GREEDY = Sampling()
Tamper = Callable[[bytes], Iterable[bytes]]


class Pipeline:
    """All stages of a plan. `clock` is moved by the test's own faults: an idle pipeline jumps to the next deadline."""

    def __init__(
        self,
        model: Model | Path,
        split: str = "even",
        stages: int = 1,
        tamper: Tamper = lambda data: (data,),
        **settings: object,
    ):
        self.model = model if isinstance(model, Model) else open_model(model, cache=Path("/nonexistent"))
        self.settings = replace(Settings(), split=split, num_stages=stages, **settings)  # type: ignore[arg-type]
        self.plan = make_plan(self.model, self.settings)
        self.stages = [
            Stage(self.plan, i, RUN, load(self.model, self.plan, i, self.settings.kernels))
            for i in range(self.plan.n_stages)
        ]
        self.tamper = tamper
        self.hops: list[int] = []  # receiver of each
        self.clock = 0.0
        self.traces: Traces | None = None  # of the one sequence that `verify` generates
        self.state = State(
            self.plan.slots, self.plan.max_rows, 30.0,
            next_step=1, max_lanes=self.settings.lanes, in_flight=self.settings.in_flight or self.plan.n_stages,
        )  # fmt: skip
        self._wire: deque[tuple[int, bytes]] = deque()

    def generate(self, prompt: Sequence[int], max_tokens: int, **kwargs: object) -> list[int]:
        return self.generate_all([prompt], max_tokens, **kwargs)[0]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Iterable[int] = (),
    ) -> list[list[int]]:
        """Greedy ids of each prompt, all submitted at once."""
        sequences = []
        for prompt in prompts:
            name = f"request-{np.random.default_rng().integers(1 << 62)}"
            sequences.append(
                scheduler.Sequence(
                    name, short_id(name), list(prompt), len(prompt), max_tokens, frozenset(stop_ids), sampling
                )
            )
        self.state.waiting.extend(sequences)
        while any(True for _ in self.state.sequences()):
            self.turn()
        return [sequence.generated for sequence in sequences]

    def verify(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        changed: Mapping[int, Callable[[Slice], object]] = MappingProxyType({}),
    ) -> Verification:
        """Generate with every stage telling what it computes, then compute it again as the head would.

        changed: what to do with the slice that the head opens for a stage's blocks.
        """
        name = f"verified-{np.random.default_rng().integers(1 << 62)}"
        sequence = scheduler.Sequence(
            name, short_id(name), list(prompt), len(prompt), max_tokens, frozenset(), sampling, traced=True
        )
        self.traces = Traces(self.plan.n_stages, len(prompt) + max_tokens, self.stages[0].slice.dim)
        self.state.waiting.append(sequence)
        while any(True for _ in self.state.sequences()) or self._wire:
            self.turn()
        assert self.traces.missing(len(sequence.ids) - 1) is None
        return verify(
            self.model, self.plan, sequence.ids, len(prompt), sampling, self.traces,
            open_slice=partial(open_slice, self.model, self.plan, self.settings.kernels, changed),
            arithmetics=lambda: {stage.slice.arithmetic for stage in self.stages},
            on_progress=lambda phase, done, total: None,
        )  # fmt: skip

    def turn(self) -> None:
        """One thing happens: a lap starts, a frame arrives, or a deadline passes."""
        for sequence, position in self.state.overdue(self.clock):
            self.state.rewind(sequence, position)
        self.state.admit()
        batch = schedule(self.state)
        if batch is not None:
            self.state.sent(batch, self.clock)
            self._send(HEAD, self.stages[HEAD].start(batch))
        elif self._wire:
            self._deliver(*self._wire.popleft())
        else:
            self.clock = min(lap.deadline for lap in self.state.laps.values())

    def _send(self, sender: int, frames: Iterable[Frame]) -> None:
        for frame in frames:
            receiver = route(self.plan, sender, frame.kind)
            self._wire.extend((receiver, data) for data in self.tamper(encode(frame, SECRET)))

    def _deliver(self, receiver: int, data: bytes) -> None:
        self.hops.append(receiver)
        frame = decode(data, SECRET)
        stage = self.stages[receiver]
        if frame.kind is Kind.ACTIVATION:
            return self._send(receiver, stage.step(frame))
        if frame.kind is Kind.ERROR:
            if frame.error is not ErrorCode.CACHE_MISS:
                raise RequestFailed(frame.payload.tobytes().decode())
            for lane, sequence in self.state.returned(frame.step, frame.lanes):
                self.state.missed(lane, sequence)
            return None
        if frame.kind is Kind.TRACE:
            return self._record(frame)
        tokens = dict(stage.tokens_of(frame))
        for lane, sequence in self.state.returned(frame.step, frame.lanes):
            if (found := tokens[lane]) is None:
                raise RequestFailed(not_finite(lane))
            for token in found:
                sequence.append(token.id)
            if sequence.finish_reason:
                self.state.end(sequence)
        return None

    def _record(self, frame: Frame) -> None:
        row = 0
        for lane in frame.lanes:
            if self.traces is not None:
                self.traces.record(frame.sender, lane.position, frame.payload[row : row + lane.length])
            row += lane.length


def load(model: Model, plan: Plan, index: int, kernels: str = "auto") -> Slice:
    return Slice(
        model,
        plan.spans[index],
        embedding=index == HEAD,
        readout=index == plan.readout_stage,
        n_slots=plan.slots,
        context=plan.context,
        max_rows=plan.max_rows,
        kernels=kernels,
        weights=plan.weights,
        on_progress=lambda phase, done, total: None,
    )


def open_slice(
    model: Model,
    plan: Plan,
    kernels: str,
    changed: Mapping[int, Callable[[Slice], object]],
    span: Span,
    *,
    embedding: bool,
    readout: bool,
    n_slots: int,
    context: int,
) -> Slice:
    """Any span, as `Loader.slice` opens it."""
    opened = Slice(
        model, span, embedding=embedding, readout=readout, n_slots=n_slots, context=context, max_rows=plan.max_rows,
        kernels=kernels, weights=plan.weights, on_progress=lambda phase, done, total: None,
    )  # fmt: skip
    if span in plan.spans and len(span):
        changed.get(plan.spans.index(span), lambda slice_: None)(opened)
    return opened


def logits_of(pipeline: Pipeline, ids: Sequence[int]) -> np.ndarray:
    """Logits at every position of `ids`, float32 (len(ids), V): the hidden state goes through the stages as frames do,
    in one chunk."""
    stages, plan = pipeline.stages, pipeline.plan
    dtype = DTYPES[plan.wire]
    slots, positions = np.zeros(len(ids), np.int32), np.arange(len(ids), dtype=np.int32)
    x = stages[0].slice.embed(np.array(ids, np.int32), positions)
    for i, stage in enumerate(stages):
        x = stage.slice.forward(x, slots, positions)
        if i < plan.n_stages - 1 or plan.is_ring:
            x = x.astype(dtype).astype(np.float32)
    return stages[plan.readout_stage].slice.logits(x)
