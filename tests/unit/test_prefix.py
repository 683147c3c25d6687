"""Which positions of a new sequence are there already."""

from workers.prefix import MIN_SHARED, common, longest

SYSTEM = list(range(100, 150))  # a prompt that many begin with


def test_common_counts_equal_ids_from_the_start() -> None:
    assert common([1, 2, 3], [1, 2, 4], 3) == 2
    assert common([1, 2, 3], [1, 2, 3, 4], 9) == 3
    assert common([1, 2, 3], [1, 2, 3], 2) == 2
    assert common([1, 2, 3], [2, 2, 3], 3) == 0
    assert common([], [1], 1) == common([1], [], 1) == common([1], [1], 0) == 0


def test_the_longest_start_is_shared() -> None:
    held = [(0, [*SYSTEM, 1, 2], 52), (1, [*SYSTEM, 7, 8, 9], 53), (2, SYSTEM[1:], 49)]
    assert longest([*SYSTEM, 7, 8, 1], held) == (1, 52)


def test_of_equals_the_first_slot_is_taken() -> None:
    held = [(slot, SYSTEM, 50) for slot in (3, 1, 2)]
    assert longest([*SYSTEM, 1], held) == (1, 50)


def test_only_what_is_held_is_shared() -> None:
    """A sequence whose prompt is still on its way."""
    assert longest([*SYSTEM, 1], [(0, SYSTEM, 30)]) == (0, 30)
    assert longest([*SYSTEM, 1], [(0, SYSTEM, 0)]) is None


def test_the_last_id_is_computed_in_any_case() -> None:
    """Nobody has kept what follows it."""
    assert longest(SYSTEM, [(0, SYSTEM, 50)]) == (0, 49)
    assert longest(SYSTEM, [(0, [*SYSTEM, 1, 2, 3], 53)]) == (0, 49)
    assert longest([5], [(0, [5], 1)]) is None


def test_a_few_positions_are_not_worth_a_copy() -> None:
    start = SYSTEM[:MIN_SHARED]
    assert longest([*start, 1], [(0, [*start, 2], MIN_SHARED + 1)]) == (0, MIN_SHARED)
    assert longest([*start[1:], 1], [(0, [*start[1:], 2], MIN_SHARED)]) is None
    assert longest(SYSTEM, []) is None
