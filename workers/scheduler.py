"""Which rows go on the next lap. The head only; knows token ids and positions, nothing of text, tensors or Redis.

The state is a value with few mutations, each named after what happened in the world; `schedule` decides and changes
nothing. A sequence is the ids known so far; what has not been sent yet is its work: a prompt in chunks, then one token
a lap, and after a lost lap the same again from an earlier position. So prefill, decode and recovery are one rule.

Continuous batching: sequences join and leave at every lap. Several laps are in flight, so that each stage has one to
work on, and who decodes is dealt out evenly among them.
"""

from collections import Counter, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from pptasks.wire import MAX_COUNTS, Lane, Sampling, Shared
from workers import prefix

MAX_LOST = 2  # laps of a sequence in a row; the third attempt is the last
LAPS_AHEAD = 4  # laps of one prompt under way at once, so that a long one cannot fill the broker


@dataclass
class Sequence:
    """A request that is being served. `ids` are the prompt and all tokens since; positions below `sent` are on their
    way or done."""

    request_id: str
    short_id: bytes  # its 16 bytes in a lane
    ids: list[int]
    n_prompt: int
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    traced: bool = False  # its laps are: the stages tell the head what they computed
    slot: int = -1
    sent: int = 0
    attempt: int = 0
    furthest: int = 0  # positions below have come back computed at least once
    lost: int = 0  # attempts since `furthest` moved
    last_step: int = -1  # the lap that it was last on
    shared: Shared | None = None  # what was there of it when it began
    counts: Counter[int] = field(default_factory=Counter)  # of generated ids, where the sampling asks for penalties

    def append(self, token: int) -> None:
        """A token that was generated."""
        self.ids.append(token)
        if self.sampling.is_penalised:
            self.counts[token] += 1

    def computed(self, lane: Lane) -> None:
        """A lap with this lane came back from all stages."""
        if lane.position + lane.length > self.furthest:
            self.furthest, self.lost = lane.position + lane.length, 0

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

    @property
    def n_generated(self) -> int:
        return len(self.ids) - self.n_prompt

    @property
    def n_cached(self) -> int:
        """Positions of the prompt that were not computed for it."""
        return self.shared.length if self.shared is not None else 0

    @property
    def finish_reason(self) -> str | None:
        """ "stop" after an end token, "length" at the limit, None while it goes on."""
        if len(self.ids) > self.n_prompt and self.ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) - self.n_prompt >= self.max_tokens else None


@dataclass(frozen=True)
class Batch:
    """What goes on one lap: `lanes` and, row by row, the token ids they start from."""

    step: int
    lanes: tuple[Lane, ...]
    ids: tuple[int, ...]
    traced: bool = False


@dataclass
class Lap:
    """A batch under way. `open` holds the lanes that have not come back."""

    open: dict[int, Lane]  # by slot
    sent_at: float  # the head's monotonic clock, seconds
    deadline: float


@dataclass
class State:
    """All that the head knows of its requests. Not shared between threads."""

    n_slots: int  # that every stage holds
    max_rows: int
    lap_deadline_s: float
    next_step: int
    max_lanes: int = 1024
    in_flight: int = 1  # laps
    waiting: deque[Sequence] = field(default_factory=deque)
    live: dict[int, Sequence] = field(default_factory=dict)  # by slot, in order of admission
    laps: dict[int, Lap] = field(default_factory=dict)  # by step
    held: dict[int, Sequence] = field(default_factory=dict)  # by slot: whose positions below `sent` are in the cache

    def admit(self) -> list[Sequence]:
        """Give free slots to those who wait longest; the sequences that were admitted."""
        admitted = []
        while self.waiting and (slot := self._free_slot(self.waiting[0])) is not None:
            sequence = self.waiting.popleft()
            sequence.slot = slot
            self.live[slot] = sequence
            admitted.append(sequence)
        return admitted

    def resize(self, n_slots: int) -> None:
        """So many slots are there now. Whoever is in one that is gone waits again, before all others."""
        self.n_slots = n_slots
        for slot in sorted((s for s in self.live if s >= n_slots), reverse=True):
            sequence = self.live[slot]
            self.end(sequence)
            sequence.slot, sequence.sent, sequence.shared = -1, 0, None
            sequence.attempt += 1
            self.waiting.appendleft(sequence)
        self.held = {slot: sequence for slot, sequence in self.held.items() if slot < n_slots}

    def sent(self, batch: Batch, now: float) -> None:
        """`batch` goes out; after a lost lap the next gets twice the time."""
        patience = 2 ** max(self.live[lane.slot].lost for lane in batch.lanes) * self.lap_deadline_s
        self.laps[batch.step] = Lap({lane.slot: lane for lane in batch.lanes}, now, now + patience)
        self.next_step = batch.step + 1
        for lane in batch.lanes:
            sequence = self.live[lane.slot]
            sequence.sent, sequence.last_step = lane.position + lane.length, batch.step
            sequence.shared = lane.shared or sequence.shared
            self.held[lane.slot] = sequence

    def returned(self, step: int, lanes: tuple[Lane, ...]) -> list[tuple[Lane, Sequence]]:
        """Lanes of lap `step` are back; those of them that are still waited for, so none that is late or doubled."""
        waited_for = self.laps[step].open if step in self.laps else {}
        back = [(lane, self.live[lane.slot]) for lane in lanes if waited_for.get(lane.slot) == lane]
        for lane, _ in back:
            self._forget_laps(lane.slot, before=lane.position + 1)
        return back

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Send `sequence` again from `position` as a new attempt; what is under way of it no longer counts.

        If that is its first lane, and it shared, then all of it: who owns the slot that it shared from may have changed
        meanwhile, on some of the stages.
        """
        sequence.attempt += 1
        sequence.lost += 1
        if position <= sequence.n_cached:
            position, sequence.shared = 0, None
        sequence.sent = min(sequence.sent, position)
        self._forget_laps(sequence.slot)

    def rewind_all(self) -> None:
        """A stage has lost its cache: nothing is held any more."""
        for sequence in self.live.values():
            self.rewind(sequence, 0)
            sequence.lost = 0
        self.held.clear()

    def missed(self, lane: Lane, sequence: Sequence) -> None:
        """A stage lacks positions before those of `lane`: all of them go again, and what was shared is no source."""
        if lane.shared is not None and lane.shared.slot not in self.live:
            self.held.pop(lane.shared.slot, None)
        self.rewind(sequence, 0)

    def end(self, sequence: Sequence) -> None:
        """Free its slot, or its place in the queue."""
        if self.live.get(sequence.slot) is sequence:
            del self.live[sequence.slot]
            self._forget_laps(sequence.slot)
        else:
            self.waiting = deque(other for other in self.waiting if other is not sequence)

    def fail(self, sequence: Sequence) -> None:
        """As `end`; and what it left in its slot may be what made it fail."""
        self.end(sequence)
        if self.held.get(sequence.slot) is sequence:
            del self.held[sequence.slot]

    def overdue(self, now: float) -> list[tuple[Sequence, int]]:
        """Sequences with a lap past its deadline, each with the earliest position that is still out."""
        late = {slot for lap in self.laps.values() if lap.deadline <= now for slot in lap.open}
        return [
            (self.live[s], min(lap.open[s].position for lap in self.laps.values() if s in lap.open))
            for s in sorted(late)
        ]

    def postpone(self, seconds: float) -> None:
        """The head did something else for so long: laps had to wait for it, and are not late."""
        for lap in self.laps.values():
            lap.deadline += seconds

    def laps_of(self, slot: int) -> int:
        return sum(slot in lap.open for lap in self.laps.values())

    def sequences(self) -> Iterator[Sequence]:
        yield from self.live.values()
        yield from self.waiting

    def _free_slot(self, sequence: Sequence) -> int | None:
        """The slot whose history the sequence goes on with, if there is one; else what was not used for longest."""
        free = [slot for slot in range(self.n_slots) if slot not in self.live]
        if not free:
            return None
        found = prefix.longest(sequence.ids, ((s, h.ids, h.sent) for s in free if (h := self.held.get(s)) is not None))
        if found is not None and 2 * found[1] >= self.held[found[0]].sent:
            return found[0]
        return min(free, key=lambda slot: self.held[slot].last_step if slot in self.held else -1)

    def _forget_laps(self, slot: int, before: int | None = None) -> None:
        """Wait no more for what is under way of a slot; with `before`, only for lanes that begin before that position.

        A lane that is back proves all earlier positions, also when the lap that brought them was lost on its way back.
        """
        for step, lap in list(self.laps.items()):
            lane = lap.open.get(slot)
            if lane is not None and (before is None or lane.position < before):
                del lap.open[slot]
                if not lap.open:
                    del self.laps[step]


def schedule(state: State) -> Batch | None:
    """The next lap, or None when nobody has work, or enough laps are in flight. Pure.

    First sequences that are one token behind (decode), those that wait longest first, but no more than an even share of
    all; then prompts in order of admission, as many rows as the frame has left. Each of the two kinds gets at least a
    row, or they take turns. While nobody decodes, laps of one prompt may follow each other without waiting.
    """
    ready = [s for s in state.live.values() if s.sent < len(s.ids) and state.laps_of(s.slot) < LAPS_AHEAD]
    decodes = sorted((s for s in ready if len(s.ids) - s.sent == 1), key=lambda s: s.last_step)
    prompts = [s for s in ready if len(s.ids) - s.sent > 1 and not _waits(state, s)]
    only_prompts = all(s.n_generated == 0 for s in state.live.values())
    if len(state.laps) >= (max(state.in_flight, LAPS_AHEAD) if only_prompts else state.in_flight):
        return None
    most = min(state.max_lanes, state.max_rows)
    if decodes and prompts and most == 1:
        turn = min(decodes[0], prompts[0], key=lambda s: s.last_step)
        decodes, prompts = [s for s in decodes[:1] if s is turn], [s for s in prompts[:1] if s is turn]
    share = -(-len(state.live) // state.in_flight)
    return _batch(state, decodes[: min(share, most - bool(prompts and most > 1))], prompts)


def _batch(state: State, decodes: list[Sequence], prompts: list[Sequence]) -> Batch | None:
    lanes: list[Lane] = []
    ids: list[int] = []
    room, counts, traced = state.max_rows, MAX_COUNTS, False
    taken: set[int] = set()  # slots that a lane of this lap takes over, before a later lane can copy from them
    for sequence in (*decodes, *prompts):
        if room == 0 or len(lanes) == state.max_lanes or len(sequence.counts) > counts:
            break
        shared = _shared(state, sequence, taken)
        first = shared.length if shared is not None else sequence.sent
        end = min(first + room, len(sequence.ids))
        readout = int(end == len(sequence.ids))
        counted = tuple(sequence.counts.items()) if readout else ()
        lanes.append(
            Lane(
                sequence.short_id, sequence.attempt, sequence.slot, first, end - first, readout,
                sequence.sampling, counted, shared,
            )
        )  # fmt: skip
        ids.extend(sequence.ids[first:end])
        if state.held.get(sequence.slot) is not sequence:
            taken.add(sequence.slot)
        room -= end - first
        counts -= len(counted)
        traced |= sequence.traced
    return Batch(state.next_step, tuple(lanes), tuple(ids), traced) if lanes else None


def _shared(state: State, sequence: Sequence, taken: Container[int]) -> Shared | None:
    """What the next lane of a sequence shares: at its start, if that was not lost."""
    if not _may_share(sequence):
        return None
    found = _held(state, sequence, taken)
    return Shared(state.held[found[0]].short_id, *found) if found is not None else None


def _waits(state: State, sequence: Sequence) -> bool:
    """Whether one that was admitted earlier is about to compute more of its start than is there now."""
    if not _may_share(sequence):
        return False
    before = [(s.slot, s.ids, s.n_prompt) for s in takewhile(lambda s: s is not sequence, state.live.values())]
    coming = prefix.longest(sequence.ids, before)
    if coming is None:
        return False
    found = _held(state, sequence, ())
    return coming[1] > max(state.live[coming[0]].sent, found[1] if found else 0)


def _held(state: State, sequence: Sequence, taken: Container[int]) -> tuple[int, int] | None:
    others = ((slot, s.ids, s.sent) for slot, s in state.held.items() if s is not sequence and slot not in taken)
    return prefix.longest(sequence.ids, others)


def _may_share(sequence: Sequence) -> bool:
    """Of one that is traced, all is to be told; of one that was lost, what was believed to be there may not be."""
    return sequence.sent == 0 and not sequence.traced and not sequence.lost
