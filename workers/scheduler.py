"""Which rows go on the next lap. The head only; knows token ids and positions, nothing of text, tensors or Redis.

The state is a value with few mutations, each named after what happened in the world; `schedule` decides and changes
nothing. A sequence is the ids known so far; what has not been sent yet is its work: a prompt in chunks, then one token
a lap, and after a lost lap the same again from an earlier position. So prefill, decode and recovery are one rule.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pptasks.wire import Lane, Sampling

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

    def computed(self, lane: Lane) -> None:
        """A lap with this lane came back from all stages."""
        if lane.position + lane.length > self.furthest:
            self.furthest, self.lost = lane.position + lane.length, 0

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

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

    n_slots: int
    max_rows: int
    lap_deadline_s: float
    next_step: int
    waiting: deque[Sequence] = field(default_factory=deque)
    live: dict[int, Sequence] = field(default_factory=dict)  # by slot, in order of admission
    laps: dict[int, Lap] = field(default_factory=dict)  # by step

    def admit(self) -> list[Sequence]:
        """Give free slots to those who wait longest; the sequences that were admitted."""
        admitted = []
        free = (slot for slot in range(self.n_slots) if slot not in self.live)
        while self.waiting and (slot := next(free, None)) is not None:
            sequence = self.waiting.popleft()
            sequence.slot = slot
            admitted.append(sequence)
        self.live.update({sequence.slot: sequence for sequence in admitted})
        return admitted

    def sent(self, batch: Batch, now: float) -> None:
        """`batch` goes out; after a lost lap the next gets twice the time."""
        patience = 2 ** max(self.live[lane.slot].lost for lane in batch.lanes) * self.lap_deadline_s
        self.laps[batch.step] = Lap({lane.slot: lane for lane in batch.lanes}, now, now + patience)
        self.next_step = batch.step + 1
        for lane in batch.lanes:
            sequence = self.live[lane.slot]
            sequence.sent, sequence.last_step = lane.position + lane.length, batch.step

    def returned(self, step: int, lanes: tuple[Lane, ...]) -> list[tuple[Lane, Sequence]]:
        """Lanes of lap `step` are back; those of them that are still waited for, so none that is late or doubled."""
        waited_for = self.laps[step].open if step in self.laps else {}
        back = [(lane, self.live[lane.slot]) for lane in lanes if waited_for.get(lane.slot) == lane]
        for lane, _ in back:
            self._forget_laps(lane.slot, before=lane.position + 1)
        return back

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Send `sequence` again from `position` as a new attempt; what is under way of it no longer counts."""
        sequence.attempt += 1
        sequence.lost += 1
        sequence.sent = min(sequence.sent, position)
        self._forget_laps(sequence.slot)

    def end(self, sequence: Sequence) -> None:
        """Free its slot, or its place in the queue."""
        if self.live.get(sequence.slot) is sequence:
            del self.live[sequence.slot]
            self._forget_laps(sequence.slot)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

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
    """The next lap, or None when nobody has work. Pure.

    First every sequence that is one token behind (decode), then prompts in order of admission, as many rows as the
    frame has left. When not everyone has room, those who waited longest go first. A lane is read out where it reaches
    the end of what is known.
    """
    lanes: list[Lane] = []
    ids: list[int] = []
    traced = False
    room = state.max_rows
    ready = [s for s in state.live.values() if s.sent < len(s.ids) and state.laps_of(s.slot) < LAPS_AHEAD]
    crowded = len(ready) > state.max_rows
    for sequence in sorted(ready, key=lambda s: s.last_step if crowded else len(s.ids) - s.sent > 1):
        length = min(room, len(sequence.ids) - sequence.sent)
        if length == 0:
            break
        end = sequence.sent + length
        readout = int(end == len(sequence.ids))
        lanes.append(
            Lane(
                sequence.short_id,
                sequence.attempt,
                sequence.slot,
                sequence.sent,
                length,
                readout,
                sequence.sampling,
            )
        )
        ids.extend(sequence.ids[sequence.sent : end])
        room -= length
        traced |= sequence.traced
    return Batch(state.next_step, tuple(lanes), tuple(ids), traced) if lanes else None
