"""A toy pipeline under faults: the scheduler and the slot tables together yield each token once, and the right one.

Stages are real slot tables over toy caches: what a stage computes for a position is a digest of all values that its
cache holds up to there, so a position that is missing, stale or another sequence's changes every token after it. Frames
between stages are lost, doubled or held back by their number, stages forget everything, requests are cancelled.
Prompts begin alike, so that positions are shared, and several laps are in flight.
"""

from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.wire import Kind, Lane, Sampling, short_id
from workers.kv import Place, SlotTable
from workers.scheduler import LAPS_AHEAD, Sequence, State, schedule

CONTEXT = 64
VOCAB = 11
STOP = frozenset({0})
MAX_EVENTS = 5000

Value = int  # what a stage hands on for one position: the toy's hidden state


@dataclass(frozen=True)
class Toy:
    """A frame of the toy pipeline. `rows` has one value a row, of an error none."""

    kind: Kind
    step: int
    lanes: tuple[Lane, ...]
    rows: tuple[Value, ...]


def block(stage: int, prefix: list[Value]) -> Value:
    """What `stage` computes for the last position of `prefix`: it attends to all of them."""
    return hash((stage, tuple(prefix)))


def generate(prompt: list[int], max_tokens: int, n_stages: int) -> list[int]:
    """The tokens of one process that holds all stages, and meets no fault."""
    ids = list(prompt)
    while True:
        values: list[Value] = ids
        for stage in range(n_stages):
            values = [block(stage, values[: i + 1]) for i in range(len(values))]
        ids.append(values[-1] % VOCAB)
        if ids[-1] in STOP or len(ids) - len(prompt) >= max_tokens:
            return ids[len(prompt) :]


class ToyStage:
    """One stage: a real slot table, and a cache of the values that came in, by slot and position."""

    def __init__(self, index: int, n_stages: int, n_slots: int):
        self.index, self.is_last = index, index == n_stages - 1
        self.n_slots = n_slots
        self.restart()

    def restart(self) -> None:
        self.table = SlotTable(self.n_slots, CONTEXT)
        self.cache: list[dict[int, Value]] = [{} for _ in range(self.n_slots)]

    def step(self, frame: Toy) -> list[Toy]:
        missed, ran, out = [], [], []
        rows = iter(frame.rows)
        for lane in frame.lanes:
            values = [next(rows) for _ in range(lane.length)]
            match self.table.place(lane, frame.step):
                case Place.MISS:
                    missed.append(lane)
                case Place.RUN:
                    ran.append(lane)
                    computed = self.run(lane, values)
                    out += computed[lane.length - lane.readout :] if self.is_last else computed
        kind = Kind.TOKENS if self.is_last else Kind.ACTIVATION
        frames = [Toy(Kind.ERROR, frame.step, tuple(missed), ())] if missed else []
        return frames + ([Toy(kind, frame.step, tuple(ran), tuple(out))] if ran else [])

    def run(self, lane: Lane, values: list[Value]) -> list[Value]:
        if lane.shared is not None:
            source = self.cache[lane.shared.slot]
            self.cache[lane.slot] = {p: source[p] for p in range(lane.shared.length)}
        cache = self.cache[lane.slot]
        cache.update(enumerate(values, lane.position))
        positions = range(lane.position, lane.position + lane.length)
        return [block(self.index, [cache[q] for q in range(p + 1)]) for p in positions]


@dataclass(frozen=True)
class Job:
    """A request: when it comes and when it is cancelled, in frames delivered so far."""

    prompt: tuple[int, ...]
    max_tokens: int
    comes: int
    cancelled: int | None


Fault = tuple[str, int]  # what happens to a frame, and for how long it is held back


@dataclass(frozen=True)
class Script:
    """One run: its size, its requests, the fault of each frame that has one, and which stage comes to work when."""

    n_stages: int
    n_slots: int
    max_rows: int
    max_lanes: int
    in_flight: int
    jobs: tuple[Job, ...]
    faults: dict[int, Fault]
    turns: tuple[int, ...]


@dataclass
class Pipeline:
    """Head and stages with a queue each; plays a script to its end and checks the state after every event."""

    script: Script
    now: float = 0.0
    n_delivered: int = 0
    held: list[tuple[int, int, Toy]] = field(default_factory=list)  # until, stage, frame
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    passed_over: Counter[int] = field(default_factory=Counter)  # by slot: laps since it could decode
    n_shared: int = 0

    def __post_init__(self) -> None:
        s = self.script
        self.stages = [ToyStage(i, s.n_stages, s.n_slots) for i in range(s.n_stages)]
        self.queues: list[deque[Toy]] = [deque() for _ in range(s.n_stages)]
        self.state = State(
            s.n_slots, s.max_rows, lap_deadline_s=1.0, next_step=1, max_lanes=s.max_lanes, in_flight=s.in_flight
        )
        self.coming = deque(sorted(enumerate(s.jobs), key=lambda job: job[1].comes))
        self.order: list[str] = []
        self.sequences: dict[str, Sequence] = {}

    def play(self) -> None:
        for _ in range(MAX_EVENTS):
            self.submit_and_cancel()
            self.pump()
            self.check()
            if not self.deliver_one() and not self.on_idle():
                return
        raise AssertionError("the pipeline does not come to an end")

    def submit_and_cancel(self) -> None:
        while self.coming and self.coming[0][1].comes <= self.n_delivered:
            self.submit(*self.coming.popleft())
        for name, sequence in list(self.sequences.items()):
            due = self.script.jobs[int(name)].cancelled
            if due is not None and due <= self.n_delivered and name not in self.ended:
                self.cancelled.add(name)
                self.end(sequence)

    def submit(self, number: int, job: Job) -> None:
        name, ids = str(number), list(job.prompt)
        sequence = Sequence(name, short_id(name), ids, len(ids), job.max_tokens, STOP, Sampling())
        self.sequences[name] = sequence
        self.order.append(name)
        self.state.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        self.tokens[sequence.request_id] = sequence.generated
        self.ended.append(sequence.request_id)
        self.state.end(sequence)

    def pump(self) -> None:
        """The head's turn: admit, and send laps until there is nothing to send or something to read."""
        self.admitted += [sequence.request_id for sequence in self.state.admit()]
        while not self.queues[0]:
            before = deepcopy(self.state)
            batch = schedule(self.state)
            assert self.state == before, "schedule changed the state"
            if batch is None:
                behind = [s for s in self.state.live.values() if s.sent < len(s.ids)]
                assert self.state.laps or not behind, "work was left, and nothing is under way"
                return
            decoding = any(s.n_generated for s in self.state.live.values())
            assert len(self.state.laps) < (
                self.script.in_flight if decoding else max(LAPS_AHEAD, self.script.in_flight)
            )
            self.check_fairness(batch.lanes)
            self.check_batch(batch.lanes, batch.ids)
            self.state.sent(batch, self.now)
            self.send(0, self.stages[0].step(Toy(Kind.ACTIVATION, batch.step, batch.lanes, batch.ids)))

    def check_batch(self, lanes: tuple[Lane, ...], ids: tuple[int, ...]) -> None:
        assert 0 < len(ids) <= self.script.max_rows
        assert len(lanes) <= self.script.max_lanes
        assert len({lane.slot for lane in lanes}) == len({lane.request for lane in lanes}) == len(lanes)
        row = 0
        for lane in lanes:
            owner = self.state.live[lane.slot]
            end = lane.position + lane.length
            assert (lane.request, lane.attempt) == (owner.short_id, owner.attempt)
            out = [lap.open[lane.slot] for lap in self.state.laps.values() if lane.slot in lap.open]
            assert all(other.position + other.length <= lane.position for other in out), "twice in flight"
            if lane.shared is None:
                assert lane.position == owner.sent
            else:
                source = self.state.held[lane.shared.slot]
                assert owner.sent in (0, lane.position)
                assert lane.position == lane.shared.length < owner.n_prompt
                assert (
                    source.short_id != lane.shared.request or source.ids[: lane.position] == owner.ids[: lane.position]
                )
                self.n_shared += 1
            assert lane.length > 0
            assert list(ids[row : row + lane.length]) == owner.ids[lane.position : end]
            assert lane.readout == (end == len(owner.ids))
            row += lane.length
        assert row == len(ids)

    def check_fairness(self, lanes: tuple[Lane, ...]) -> None:
        """Nobody who has one token to send is passed over for long."""
        for slot, sequence in self.state.live.items():
            is_ready = len(sequence.ids) - sequence.sent == 1 and not self.state.laps_of(slot)
            on_board = any(lane.slot == slot for lane in lanes)
            self.passed_over[slot] = self.passed_over[slot] + 1 if is_ready and not on_board else 0
            assert self.passed_over[slot] <= 2 * self.script.n_slots, "a lane starves"

    def send(self, stage: int, frames: list[Toy]) -> None:
        for frame in frames:
            self.queues[stage + 1 if frame.kind is Kind.ACTIVATION else 0].append(frame)

    def deliver_one(self) -> bool:
        """One frame reaches its stage, or meets its fault. False if none is under way."""
        for until, stage, frame in [h for h in self.held if h[0] <= self.n_delivered]:
            self.held.remove((until, stage, frame))
            self.queues[stage].append(frame)
        busy = [stage for stage, queue in enumerate(self.queues) if queue]
        if not busy:
            return False
        stage = busy[self.script.turns[self.n_delivered % len(self.script.turns)] % len(busy)]
        frame = self.queues[stage].popleft()
        fault, number = self.script.faults.get(self.n_delivered, ("", 0))
        self.n_delivered += 1
        match fault:
            case "drop":
                return True
            case "hold":
                self.held.append((self.n_delivered + number, stage, frame))
                return True
            case "double":
                self.queues[stage].append(frame)
            case "restart" if stage > 0:
                self.stages[stage].restart()
        if stage > 0:
            self.send(stage, self.stages[stage].step(frame))
        else:
            self.receive(frame)
        return True

    def receive(self, frame: Toy) -> None:
        """What the head does with a frame: append, or send again from the start."""
        values = iter(frame.rows)
        read = {lane: [next(values) for _ in range(lane.readout)] for lane in frame.lanes if frame.kind is Kind.TOKENS}
        for lane, sequence in self.state.returned(frame.step, frame.lanes):
            if frame.kind is Kind.ERROR:
                self.state.missed(lane, sequence)
                continue
            sequence.lost = 0
            for value in read[lane]:
                sequence.append(value % VOCAB)
            if sequence.finish_reason is not None:
                self.end(sequence)

    def on_idle(self) -> bool:
        """Nothing is under way: a deadline passes, a request comes, or a held frame does. False at the end."""
        if self.state.laps:
            self.now = min(lap.deadline for lap in self.state.laps.values())
            overdue = self.state.overdue(self.now)
            assert overdue
            for sequence, position in overdue:
                self.state.rewind(sequence, position)
        elif self.coming:
            self.submit(*self.coming.popleft())
        elif self.held:
            self.held = [(0, stage, frame) for _, stage, frame in self.held]
        else:
            return False
        return True

    def check(self) -> None:
        live = self.state.live
        assert all(slot == sequence.slot and 0 <= slot < self.script.n_slots for slot, sequence in live.items())
        assert len({sequence.request_id for sequence in live.values()}) == len(live)
        for slot, sequence in live.items():
            n_laps = self.state.laps_of(slot)
            assert n_laps <= LAPS_AHEAD
            assert n_laps > 0 or sequence.sent < len(sequence.ids), "a sequence is neither under way nor to be sent"
        assert all(slot in live for lap in self.state.laps.values() for slot in lap.open)
        assert all(lap.open for lap in self.state.laps.values())
        submitted = [name for name in self.order if name in self.admitted]
        assert self.admitted == submitted, "requests were admitted out of order"


ids = st.integers(0, VOCAB - 1)
BEGINNING = tuple(i * i % VOCAB for i in range(30))  # a system prompt, say
jobs = st.builds(
    Job,
    prompt=st.builds(
        lambda n, tail: BEGINNING[:n] + tuple(tail), st.integers(0, 30), st.lists(ids, min_size=1, max_size=12)
    ),
    max_tokens=st.integers(1, 8),
    comes=st.integers(0, 60),
    cancelled=st.none() | st.none() | st.integers(0, 80),
)
faults = st.tuples(st.sampled_from(["drop", "double", "hold", "restart"]), st.integers(0, 40))
scripts = st.builds(
    Script,
    n_stages=st.integers(1, 4),
    n_slots=st.integers(1, 3),
    max_rows=st.integers(1, 20),
    max_lanes=st.integers(1, 4),
    in_flight=st.integers(1, 4),
    jobs=st.lists(jobs, min_size=1, max_size=5).map(tuple),
    faults=st.dictionaries(st.integers(0, 150), faults, max_size=25),
    turns=st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple),
)


@given(scripts)
@settings(max_examples=250, deadline=None)
def test_each_token_comes_once_and_is_the_right_one_whatever_is_lost(script: Script) -> None:
    pipeline = Pipeline(script)
    pipeline.play()
    assert list(pipeline.state.sequences()) == []
    assert pipeline.state.laps == {}
    assert sorted(pipeline.ended) == sorted(map(str, range(len(script.jobs))))
    for number, job in enumerate(script.jobs):
        expected = generate(list(job.prompt), job.max_tokens, script.n_stages)
        got = pipeline.tokens[str(number)]
        assert got == expected[: len(got)]
        assert len(got) == len(expected) or str(number) in pipeline.cancelled


@given(scripts)
@settings(max_examples=60, deadline=None)
def test_without_a_fault_no_position_is_sent_twice(script: Script) -> None:
    calm = replace(script, faults={}, jobs=tuple(replace(job, cancelled=None) for job in script.jobs))
    pipeline = Pipeline(calm)
    pipeline.play()
    assert all(sequence.attempt == 0 for sequence in pipeline.sequences.values())
    assert pipeline.now == 0.0
