"""Whatever is lost, doubled or late, a lane runs only on top of its own sequence's earlier positions."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.wire import Lane
from workers.kv import Place, SlotTable

N_SLOTS, CONTEXT = 2, 24

lengths = st.integers(1, 5)
slots = st.integers(0, N_SLOTS - 1)
events = st.one_of(
    st.tuples(st.just("send"), slots, lengths),
    st.tuples(st.just("lose"), slots, lengths),
    st.tuples(st.just("rewind"), slots, st.integers(0, CONTEXT)),
    st.tuples(st.just("replace"), slots, st.just(0)),
    st.tuples(st.just("again"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("forget"), slots, st.just(0)),
)


@dataclass
class Writer:
    """The head's record of one slot."""

    request: bytes
    attempt: int = 0
    sent: int = 0


@dataclass
class World:
    """A head that sends, a slot table that receives, and a dictionary of what the cache really holds."""

    table: SlotTable = field(default_factory=lambda: SlotTable(N_SLOTS, CONTEXT))
    cells: dict[int, list[bytes]] = field(default_factory=lambda: {slot: [] for slot in range(N_SLOTS)})
    newest: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(N_SLOTS), 0))  # lap that ran last
    writers: list[Writer] = field(default_factory=lambda: [Writer(bytes([slot]) * 16) for slot in range(N_SLOTS)])
    sent: list[tuple[Lane, int]] = field(default_factory=list)
    n_requests: int = N_SLOTS

    def next_lane(self, slot: int, length: int) -> tuple[Lane, int]:
        writer = self.writers[slot]
        length = min(length, CONTEXT - writer.sent)
        lane = Lane(writer.request, writer.attempt, slot, writer.sent, length, readout=0)
        writer.sent += length
        self.sent.append((lane, len(self.sent) + 1))
        return self.sent[-1]

    def deliver(self, lane: Lane, step: int) -> Place:
        place = self.table.place(lane, step)
        held = self.cells[lane.slot]
        n_own = len(held) if held and held[0] == lane.request else 0
        if place is Place.RUN:
            assert step > self.newest[lane.slot], "a late lap wrote to the cache"
            assert lane.position <= n_own, "a lane ran on top of positions that are not its own"
            self.cells[lane.slot] = held[: lane.position] + [lane.request] * lane.length
            self.newest[lane.slot] = step
        elif place is Place.MISS:
            assert lane.position > n_own, "positions were missed that the cache holds"
        else:
            assert step <= self.newest[lane.slot], "a new lap was dropped"
        return place

    def replace(self, slot: int) -> None:
        self.writers[slot] = Writer(bytes([self.n_requests % 256]) * 16)
        self.n_requests += 1

    def rewind(self, slot: int, position: int) -> None:
        writer = self.writers[slot]
        writer.attempt, writer.sent = writer.attempt + 1, min(writer.sent, position)

    def apply(self, what: str, which: int, number: int) -> None:
        match what:
            case "send" if self.writers[which].sent < CONTEXT:
                self.deliver(*self.next_lane(which, number))
            case "lose" if self.writers[which].sent < CONTEXT:
                self.next_lane(which, number)
            case "again" if self.sent:
                self.deliver(*self.sent[which % len(self.sent)])  # doubled, or late when it was lost before
            case "rewind":
                self.rewind(which, number)
            case "replace":
                self.replace(which)
            case "forget":
                self.table.forget(which)
                self.cells[which], self.newest[which] = [], 0


@given(st.lists(events, max_size=60))
@settings(max_examples=300, deadline=None)
def test_a_lane_runs_only_on_its_own_earlier_positions(script: list[tuple[str, int, int]]) -> None:
    world = World()
    for event in script:
        world.apply(*event)
    for slot in range(N_SLOTS):  # whatever happened: sent again from the start, a sequence runs to its end
        world.rewind(slot, 0)
        while world.writers[slot].sent < CONTEXT:
            assert world.deliver(*world.next_lane(slot, 5)) is Place.RUN
        assert world.cells[slot] == [world.writers[slot].request] * CONTEXT
