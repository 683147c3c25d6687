"""Who owns a slot: doubled, late and lost frames, one case each."""

import pytest

from pptasks.wire import Lane
from workers.kv import Place, SlotTable

CONTEXT = 16
A, B = b"A" * 16, b"B" * 16


def lane(request: bytes, position: int, length: int, *, attempt: int = 0, slot: int = 0) -> Lane:
    return Lane(request, attempt, slot, position, length, readout=1)


@pytest.fixture
def table() -> SlotTable:
    """Slot 0 holds A's positions 0 to 5, written by laps 10 (four rows), 11 and 12."""
    table = SlotTable(2, CONTEXT)
    assert table.place(lane(A, 0, 4), 10) is Place.RUN
    assert table.place(lane(A, 4, 1), 11) is Place.RUN
    assert table.place(lane(A, 5, 1), 12) is Place.RUN
    return table


def holds(table: SlotTable, request: bytes, next_position: int, step: int, *, attempt: int = 0) -> bool:
    """True if slot 0 takes `request` at `next_position` and not one position later. Asks the later one first."""
    beyond = table.place(lane(request, next_position + 1, 1, attempt=attempt), step)
    return beyond is Place.MISS and table.place(lane(request, next_position, 1, attempt=attempt), step) is Place.RUN


def test_a_sequence_goes_on_where_it_is(table: SlotTable) -> None:
    assert holds(table, A, 6, 13)


def test_a_doubled_frame_is_dropped(table: SlotTable) -> None:
    assert table.place(lane(A, 5, 1), 12) is Place.DROP
    assert table.place(lane(A, 0, 4), 10) is Place.DROP
    assert holds(table, A, 6, 13)


def test_a_lane_twice_in_one_frame_runs_once() -> None:
    table = SlotTable(1, CONTEXT)
    assert [table.place(lane(A, 0, 2), 1) for _ in range(2)] == [Place.RUN, Place.DROP]


def test_a_later_position_is_a_miss_and_changes_nothing(table: SlotTable) -> None:
    assert table.place(lane(A, 7, 1), 13) is Place.MISS
    assert table.place(lane(A, 7, 1, attempt=1), 14) is Place.MISS
    assert holds(table, A, 6, 13)


def test_the_first_frame_of_a_slot_starts_at_its_beginning() -> None:
    table = SlotTable(1, CONTEXT)
    assert table.place(lane(A, 1, 1), 1) is Place.MISS
    assert table.place(lane(A, 0, 1), 2) is Place.RUN


def test_an_earlier_position_of_a_newer_attempt_runs_and_what_followed_is_gone(table: SlotTable) -> None:
    assert table.place(lane(A, 2, 1, attempt=1), 13) is Place.RUN
    assert holds(table, A, 3, 14, attempt=1)


def test_an_older_attempt_is_dropped(table: SlotTable) -> None:
    late = lane(A, 6, 1)  # lap 13 stays behind while the head tries again
    assert table.place(lane(A, 0, 6, attempt=1), 14) is Place.RUN
    assert table.place(late, 13) is Place.DROP
    assert holds(table, A, 6, 15, attempt=1)


def test_another_request_takes_the_slot_over_at_position_0(table: SlotTable) -> None:
    assert table.place(lane(B, 6, 1), 13) is Place.MISS
    assert table.place(lane(B, 1, 1), 13) is Place.MISS
    assert holds(table, A, 6, 13)  # it was still A's
    assert table.place(lane(B, 0, 3), 14) is Place.RUN
    assert holds(table, B, 3, 15)


def test_a_late_frame_of_an_ended_request_does_not_take_its_slot_back(table: SlotTable) -> None:
    assert table.place(lane(B, 0, 3), 20) is Place.RUN
    for late in (lane(A, 0, 4), lane(A, 6, 1), lane(A, 0, 4, attempt=3)):
        assert table.place(late, 13) is Place.DROP
    assert holds(table, B, 3, 21)


def test_slots_are_independent(table: SlotTable) -> None:
    assert table.place(lane(B, 0, 3, slot=1), 5) is Place.RUN
    assert table.place(lane(A, 6, 1, slot=1), 13) is Place.MISS
    assert holds(table, A, 6, 13)


@pytest.mark.parametrize(
    "outside",
    [
        lane(B, 0, 1, slot=2),
        lane(B, 0, 1, slot=(1 << 32) - 1),
        lane(B, 0, CONTEXT + 1),
        lane(B, 0, (1 << 32) - 1),
        lane(B, CONTEXT, 1),
        lane(B, (1 << 32) - 1, 1),
    ],
)
def test_what_the_cache_does_not_have_is_a_miss(table: SlotTable, outside: Lane) -> None:
    assert table.place(outside, 13) is Place.MISS
    assert holds(table, A, 6, 13)


def test_the_last_position_of_a_slot_is_used() -> None:
    assert SlotTable(1, CONTEXT).place(lane(A, 0, CONTEXT), 1) is Place.RUN


def test_a_slot_that_was_forgotten_starts_again(table: SlotTable) -> None:
    table.forget(0)
    assert table.place(lane(A, 6, 1), 13) is Place.MISS
    assert table.place(lane(A, 0, 6, attempt=1), 14) is Place.RUN


def test_a_request_that_comes_again_under_its_id_starts_at_once(table: SlotTable) -> None:
    """A head that was restarted, or a producer that retries, numbers its attempts from 0 again, on a newer lap."""
    assert table.place(lane(A, 0, 6, attempt=2), 13) is Place.RUN
    assert table.place(lane(A, 0, 6, attempt=0), 1000) is Place.RUN
