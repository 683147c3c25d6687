"""Which rows go on a lap, and what each event in the world changes: one case each."""

from copy import deepcopy

import pytest

from pptasks.wire import Lane, Sampling, Shared, short_id
from workers.scheduler import LAPS_AHEAD, MAX_LOST, Batch, Sequence, State, schedule

DEADLINE_S = 10.0


def sequence(name: str, n_prompt: int = 1, **changes: object) -> Sequence:
    ids = changes.pop("prompt", list(range(100, 100 + n_prompt)))
    fields: dict[str, object] = {
        "request_id": name,
        "short_id": short_id(name),
        "ids": ids,
        "n_prompt": len(ids),  # type: ignore[arg-type]
        "max_tokens": 100,
        "stop_ids": frozenset({0}),
        "sampling": Sampling(seed=n_prompt),
    }
    return Sequence(**(fields | changes))  # type: ignore[arg-type]


def state(*sequences: Sequence, n_slots: int = 4, max_rows: int = 8, **limits: int) -> State:
    """A head with these sequences in its slots, in this order."""
    head = State(n_slots, max_rows, DEADLINE_S, next_step=1000, **limits)
    head.waiting.extend(sequences)
    head.admit()
    return head


def submit(head: State, *sequences: Sequence) -> None:
    head.waiting.extend(sequences)


def send(head: State, now: float = 0.0) -> Batch:
    """The next lap, on record as sent; checks that deciding about it changed nothing."""
    before = deepcopy(head)
    batch = schedule(head)
    assert head == before
    assert batch is not None
    head.sent(batch, now)
    return batch


def rows(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(slot, position, length, readout) of each lane."""
    return [(lane.slot, lane.position, lane.length, lane.readout) for lane in batch.lanes]


def next_deadline(head: State) -> float:
    return min(lap.deadline for lap in head.laps.values())


def answer(head: State, batch: Batch, token: int = 7) -> list[str]:
    """`batch` comes back whole, with `token` for each read-out; the requests that took it. What head.py does then."""
    back = head.returned(batch.step, batch.lanes)
    for lane, owner in back:
        owner.lost = 0
        owner.ids += [token] * lane.readout
    return [owner.request_id for _, owner in back]


def test_nobody_has_work() -> None:
    assert schedule(state()) is None
    head = state(sequence("a"))
    send(head)
    assert schedule(head) is None


def test_a_prompt_goes_in_chunks_back_to_back_and_is_read_out_at_its_end() -> None:
    head = state(sequence("a", 11), max_rows=4)
    batches = [send(head) for _ in range(3)]
    assert [rows(batch) for batch in batches] == [[(0, 0, 4, 0)], [(0, 4, 4, 0)], [(0, 8, 3, 1)]]
    assert [i for batch in batches for i in batch.ids] == list(range(100, 111))
    assert [batch.step for batch in batches] == [1000, 1001, 1002]
    assert schedule(head) is None


def test_a_long_prompt_has_a_bounded_number_of_laps_under_way() -> None:
    head = state(sequence("a", 100), max_rows=4)
    batches = [send(head) for _ in range(LAPS_AHEAD)]
    assert schedule(head) is None
    answer(head, batches[0])
    assert rows(send(head)) == [(0, 4 * LAPS_AHEAD, 4, 0)]


def test_decode_goes_before_prompts_and_shares_their_lap() -> None:
    head = state(sequence("long", 20), sequence("short", 1), max_rows=8)
    assert rows(send(head)) == [(1, 0, 1, 1), (0, 0, 7, 0)]


def test_prompts_go_in_order_of_admission() -> None:
    head = state(sequence("a", 6), sequence("b", 6), sequence("c", 6), max_rows=8)
    assert rows(send(head)) == [(0, 0, 6, 1), (1, 0, 2, 0)]
    assert rows(send(head)) == [(1, 2, 4, 1), (2, 0, 4, 0)]


def test_a_lane_says_whose_it_is_and_how_to_sample() -> None:
    one = sequence("a", 2, attempt=3, sampling=Sampling(0.5, 4, 0.9, 77))
    assert send(state(one)).lanes == (Lane(short_id("a"), 3, 0, 0, 2, 1, one.sampling),)


def test_a_token_that_came_back_is_the_next_lap() -> None:
    head = state(sequence("a", 3))
    assert answer(head, send(head)) == ["a"]
    batch = send(head)
    assert (rows(batch), batch.ids) == ([(0, 3, 1, 1)], (7,))


def test_slots_are_given_to_those_who_wait_longest() -> None:
    a, b, c, d = (sequence(name) for name in "abcd")
    head = state(n_slots=2)
    head.waiting.extend((a, b, c, d))
    assert head.admit() == [a, b]
    assert head.admit() == []
    head.end(a)
    assert head.admit() == [c]
    assert [(s.request_id, s.slot) for s in head.live.values()] == [("b", 1), ("c", 0)]
    assert [s.request_id for s in head.sequences()] == ["b", "c", "d"]


def test_a_lap_that_comes_twice_counts_once() -> None:
    head = state(sequence("a", 2), sequence("b", 3))
    batch = send(head)
    assert answer(head, batch) == ["a", "b"]
    assert answer(head, batch) == []
    assert head.laps == {}


def test_a_lap_may_come_back_in_parts() -> None:
    head = state(sequence("a", 2), sequence("b", 3))
    batch = send(head)
    first, second = batch.lanes
    assert [s.request_id for _, s in head.returned(batch.step, (second,))] == ["b"]
    assert [s.request_id for _, s in head.returned(batch.step, (second, first))] == ["a"]


def test_what_was_never_sent_is_not_taken() -> None:
    head = state(sequence("a", 2))
    batch = send(head)
    forged = tuple(Lane(lane.request, lane.attempt, lane.slot, lane.position + 1, 1, 1) for lane in batch.lanes)
    assert head.returned(batch.step, forged) == []
    assert head.returned(batch.step + 1, batch.lanes) == []
    assert answer(head, batch) == ["a"]


def test_a_rewind_is_a_new_attempt_and_what_was_under_way_no_longer_counts() -> None:
    one = sequence("a", 10)
    head = state(one, max_rows=4)
    lost = [send(head) for _ in range(3)]
    head.rewind(one, 4)
    assert [answer(head, batch) for batch in lost] == [[], [], []]
    again = send(head)
    assert (rows(again), again.lanes[0].attempt, again.step) == ([(0, 4, 4, 0)], 1, 1003)
    assert answer(head, again) == ["a"]


def test_a_rewind_never_goes_forward() -> None:
    one = sequence("a", 10)
    head = state(one, max_rows=4)
    send(head)
    head.rewind(one, 9)
    assert rows(send(head)) == [(0, 4, 4, 0)]


def test_a_rewind_of_one_leaves_the_others_of_the_lap() -> None:
    a, b = sequence("a", 2), sequence("b", 2)
    head = state(a, b)
    batch = send(head)
    head.rewind(a, 0)
    assert answer(head, batch) == ["b"]


def test_after_a_rewind_to_the_start_all_known_ids_are_one_prompt() -> None:
    one = sequence("a", 3)
    head = state(one)
    answer(head, send(head))
    answer(head, send(head))
    send(head)
    head.rewind(one, 0)
    batch = send(head)
    assert (rows(batch), batch.ids) == ([(0, 0, 5, 1)], (100, 101, 102, 7, 7))


def test_a_lap_past_its_deadline_is_told_with_its_earliest_position() -> None:
    a, b = sequence("a", 8), sequence("b", 1)
    head = state(a, b, max_rows=4)
    first = send(head, now=0.0)  # b, and a's rows 0 to 2
    send(head, now=3.0)
    assert next_deadline(head) == DEADLINE_S
    assert head.overdue(DEADLINE_S - 0.01) == []
    assert head.overdue(DEADLINE_S) == [(a, 0), (b, 0)]
    head.returned(first.step, first.lanes)
    assert head.overdue(DEADLINE_S) == []
    assert head.overdue(DEADLINE_S + 3) == [(a, 3)]


def test_after_a_lost_lap_the_next_has_twice_the_time_until_one_comes_back() -> None:
    one = sequence("a", 2)
    head = state(one)
    patience = []
    for _ in range(MAX_LOST + 1):
        last = send(head, now=100.0)
        patience.append((next_deadline(head) - 100.0) / DEADLINE_S)
        head.rewind(one, 0)
    assert patience == [2**n for n in range(MAX_LOST + 1)]
    assert answer(head, last) == []  # it is late: the rewind has given it up
    assert answer(head, send(head)) == ["a"]
    send(head, now=200.0)
    assert next_deadline(head) == 200.0 + DEADLINE_S


def test_the_most_patient_lane_decides_for_its_lap() -> None:
    a, b = sequence("a", 2), sequence("b", 2)
    head = state(a, b)
    send(head)
    head.rewind(a, 0)
    head.rewind(a, 0)
    head.rewind(b, 0)
    send(head, now=100.0)
    assert next_deadline(head) == 100.0 + 4 * DEADLINE_S


def test_an_end_frees_the_slot_and_drops_what_is_late() -> None:
    a, b = sequence("a", 2), sequence("b", 2)
    head = state(a, n_slots=1)
    head.waiting.append(b)
    late = send(head)
    head.end(a)
    assert head.admit() == [b]
    assert answer(head, late) == []
    assert answer(head, send(head)) == ["b"]
    assert (b.ids[2:], a.ids[2:]) == ([7], [])


def test_an_end_before_admission_frees_the_place_in_the_queue() -> None:
    a, b, c = sequence("a"), sequence("b"), sequence("c")
    head = state(a, n_slots=1)
    head.waiting.extend((b, c))
    head.end(b)
    head.end(b)  # a second time changes nothing
    assert (list(head.sequences()), head.live) == ([a, c], {0: a})


def test_an_end_after_another_took_the_slot_leaves_that_one() -> None:
    a, b = sequence("a"), sequence("b")
    head = state(a, n_slots=1)
    head.end(a)
    head.waiting.append(b)
    head.admit()
    send(head)
    head.end(a)
    assert head.live == {0: b}
    assert head.laps_of(0) == 1


@pytest.mark.parametrize(
    ("ids", "max_tokens", "reason"),
    [
        ([], 2, None),
        ([5], 2, None),
        ([5, 5], 2, "length"),
        ([0], 2, "stop"),
        ([5, 0], 2, "stop"),
        ([0, 5], 3, None),  # only the last token ends
    ],
)
def test_why_a_sequence_ends(ids: list[int], max_tokens: int, reason: str | None) -> None:
    one = sequence("a", max_tokens=max_tokens, ids=[3, 0, *ids], n_prompt=2)  # a stop id in the prompt ends nothing
    assert one.generated == ids
    assert one.finish_reason == reason


@pytest.mark.parametrize("n_prompt", [1, 5])
def test_nobody_starves_when_a_frame_has_fewer_rows_than_sequences(n_prompt: int) -> None:
    head = state(sequence("a"), sequence("b"), sequence("c", n_prompt), max_rows=2)
    served = {name for _ in range(10) for name in answer(head, send(head))}
    assert served == {"a", "b", "c"}


def test_what_the_head_spent_elsewhere_makes_no_lap_late() -> None:
    a = sequence("a")
    head = state(a)
    send(head)
    head.postpone(5.0)
    assert head.overdue(DEADLINE_S + 4.9) == []
    assert head.overdue(DEADLINE_S + 5.0) == [(a, 0)]


def test_one_traced_sequence_makes_the_lap_a_traced_one() -> None:
    assert send(state(sequence("a"), sequence("b", traced=True))).traced
    assert not send(state(sequence("a"), sequence("b"))).traced


class TestManyAtOnce:
    def serve(self, head: State, n: int = 1) -> list[Batch]:
        """Laps that go out and come back at once, each with a token where one is read out."""
        laps = []
        for _ in range(n):
            head.admit()
            batch = schedule(head)
            assert batch is not None
            head.sent(batch, now=0.0)
            for lane, one in head.returned(batch.step, batch.lanes):
                one.computed(lane)
                for _ in range(lane.readout):
                    one.append(7)
            laps.append(batch)
        return laps

    def test_those_who_decode_are_dealt_out_evenly_among_the_laps(self) -> None:
        head = state(n_slots=8, max_rows=64, in_flight=2)
        submit(head, *(sequence(f"{i}", 3 + i) for i in range(7)))
        self.serve(head)
        laps = []
        while (batch := schedule(head)) is not None:
            head.sent(batch, now=0.0)
            laps.append(len(batch.lanes))
        assert laps == [4, 3]

    def test_no_lap_carries_more_than_max_lanes(self) -> None:
        head = state(n_slots=8, max_rows=64, max_lanes=3)
        submit(head, *(sequence(f"{i}", 3) for i in range(8)))
        assert [len(lap.lanes) for lap in self.serve(head, 3)] == [3, 3, 3]

    def test_a_prompt_gets_a_row_while_everybody_else_decodes(self) -> None:
        head = state(n_slots=8, max_rows=4, max_lanes=4)
        submit(head, *(sequence(f"{i}", 1) for i in range(6)))
        self.serve(head, 2)
        submit(head, sequence("prompt", 9))
        [lap] = self.serve(head)
        assert [lane.length for lane in lap.lanes] == [1, 1, 1, 1]
        assert lap.lanes[-1].request == short_id("prompt")

    def test_a_prompt_that_begins_like_one_that_is_being_computed_waits_and_shares(self) -> None:
        ids = list(range(40))
        head = state(n_slots=2, max_rows=24, in_flight=2)
        submit(head, sequence("a", prompt=ids), sequence("b", prompt=[*ids[:30], 99]))
        first, second, third = self.serve(head, 3)
        assert [lane.request for lane in first.lanes] == [short_id("a")]
        assert [(lane.position, lane.length) for lane in second.lanes] == [(24, 16)]
        assert [(lane.position, lane.length) for lane in third.lanes] == [(40, 1), (30, 1)]
        assert third.lanes[1].shared == Shared(short_id("a"), 0, 30)
        assert [s.n_cached for s in head.live.values()] == [0, 30]

    def test_a_chat_goes_on_in_the_slot_of_its_history(self) -> None:
        head = state(n_slots=3, max_rows=64)
        for name in ("other", "chat", "another"):
            submit(head, sequence(name, prompt=[ord(name[0]) + i for i in range(20)], max_tokens=2))
            self.serve(head, 2)
            head.end(head.live[next(iter(head.live))])
        submit(head, sequence("chat again", prompt=[*head.held[1].ids[:21], 5, 6]))
        [lap] = self.serve(head)
        assert (lap.lanes[0].slot, lap.lanes[0].shared) == (1, Shared(short_id("chat"), 1, 21))

    def test_the_slot_that_was_not_used_for_longest_is_given_away(self) -> None:
        head = state(n_slots=2, max_rows=64)
        for name in ("a", "b"):
            submit(head, sequence(name, prompt=[ord(name)] * 20))
            self.serve(head)
            head.end(next(iter(head.live.values())))
        submit(head, sequence("c", prompt=[1] * 20))
        head.admit()
        assert list(head.live) == [0]

    def test_after_a_miss_nothing_is_shared_and_the_source_is_forgotten(self) -> None:
        head = state(n_slots=2, max_rows=64)
        submit(head, sequence("a", prompt=list(range(20))))
        self.serve(head)
        head.end(head.live[0])
        one = sequence("b", prompt=[*range(19), 77, 78])
        submit(head, one)
        head.admit()
        batch = schedule(head)
        assert batch is not None
        assert batch.lanes[0].shared is not None
        head.sent(batch, now=0.0)
        head.missed(batch.lanes[0], one)
        again = schedule(head)
        assert again is not None
        assert (again.lanes[0].position, again.lanes[0].shared, one.n_cached) == (0, None, 0)

    def test_a_first_lap_that_was_lost_goes_again_whole(self) -> None:
        """Another may have taken over the slot that it shared from, before or after some stages had copied."""
        head = state(n_slots=2, max_rows=64)
        submit(head, sequence("a", prompt=list(range(60))))
        self.serve(head)
        head.end(head.live[0])
        one = sequence("b", prompt=[*range(20), 77, 78])
        submit(head, one)
        head.admit()
        assert send(head).lanes[0].shared == Shared(short_id("a"), 0, 20)
        [(late, position)] = head.overdue(2 * DEADLINE_S)
        assert (late, position) == (one, 20)
        head.rewind(one, position)
        assert rows(send(head)) == [(1, 0, 22, 1)]
        assert (one.shared, one.n_cached) == (None, 0)

    def test_a_later_lap_that_was_lost_goes_again_from_where_it_was(self) -> None:
        head = state(n_slots=2, max_rows=64)
        submit(head, sequence("a", prompt=list(range(60))))
        self.serve(head)
        head.end(head.live[0])
        one = sequence("b", prompt=[*range(20), 77, 78])
        submit(head, one)
        self.serve(head)
        assert rows(send(head)) == [(1, 22, 1, 1)]
        head.rewind(one, 22)
        again = send(head)
        assert rows(again) == [(1, 22, 1, 1)]
        assert (again.lanes[0].shared, one.n_cached) == (None, 20)

    def test_nobody_shares_from_a_slot_that_the_same_lap_takes_over(self) -> None:
        """ "new" gets the slot of "old", which "b" begins like."""
        head = state(n_slots=2, max_rows=128)
        for name in ("old", "other"):
            submit(head, sequence(name, prompt=[ord(name[1])] * 40))
            self.serve(head)
            head.end(next(iter(head.live.values())))
        submit(head, sequence("new", prompt=[1] * 30), sequence("b", prompt=[ord("l")] * 30))
        head.admit()
        lap = send(head)
        assert rows(lap) == [(0, 0, 30, 1), (1, 0, 30, 1)]
        assert [lane.shared for lane in lap.lanes] == [None, None]

    def test_a_lane_may_share_from_a_slot_that_a_later_one_takes_over(self) -> None:
        """A stage copies before it computes."""
        head = state(n_slots=2, max_rows=128)
        for name in ("old", "other"):
            submit(head, sequence(name, prompt=[ord(name[1])] * 70))
            self.serve(head)
            head.end(next(iter(head.live.values())))
        submit(head, sequence("b", prompt=[ord("t")] * 30), sequence("new", prompt=[1] * 30))
        head.admit()
        lap = send(head)
        assert rows(lap) == [(0, 29, 1, 1), (1, 0, 30, 1)]
        assert lap.lanes[0].shared == Shared(short_id("other"), 1, 29)

    def test_a_traced_sequence_is_computed_from_its_first_position(self) -> None:
        head = state(n_slots=2, max_rows=64)
        submit(head, sequence("a", prompt=list(range(20))))
        self.serve(head)
        submit(head, sequence("b", prompt=[*range(20), 9], traced=True))
        head.admit()
        batch = schedule(head)
        assert batch is not None
        assert all(lane.shared is None for lane in batch.lanes)

    def test_with_fewer_slots_those_that_lost_theirs_wait_first(self) -> None:
        head = state(n_slots=3, max_rows=64)
        submit(head, *(sequence(name, 4) for name in "abcd"))
        self.serve(head)
        head.resize(1)
        assert [s.request_id for s in head.live.values()] == ["a"]
        assert [(s.request_id, s.sent, s.slot) for s in head.waiting] == [("b", 0, -1), ("c", 0, -1), ("d", 0, -1)]
        assert all(slot == 0 for lap in head.laps.values() for slot in lap.open)
        assert set(head.held) <= {0}

    @pytest.mark.parametrize("limit", ["max_lanes", "max_rows"])
    def test_one_that_waits_for_another_does_not_hold_it_up(self, limit: str) -> None:
        """ "a" has one id left, and "b" begins like it: with one row a lap, it was the turn of "b", for ever."""
        head = state(n_slots=2, **{"max_rows": 64, limit: 1})
        ids = list(range(40))
        submit(head, sequence("a", prompt=ids), sequence("b", prompt=[*ids, 1, 2, 3]))
        while len(head.live) < 2 or head.live[0].sent < 39:
            self.serve(head)
        self.serve(head, 8)
        assert head.live[1].sent > 40

    def test_what_a_failed_sequence_left_is_no_source(self) -> None:
        head = state(n_slots=2, max_rows=64)
        submit(head, sequence("a", prompt=list(range(40))))
        self.serve(head)
        head.fail(head.live[0])
        submit(head, sequence("b", prompt=list(range(40))))
        [lap] = self.serve(head)
        assert lap.lanes[0].shared is None
