"""Shared starts against comparing id by id."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.prefix import MIN_SHARED, common, longest

ids = st.lists(st.integers(0, 1), max_size=40)
# Sequences that go on from a common start, as chats with one system prompt do.
families = st.tuples(st.lists(st.integers(0, 3), max_size=60), st.lists(ids, max_size=6))


def plainly(a: list[int], b: list[int], most: int) -> int:
    return min(most, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(ids, ids, st.integers(0, 50))
@settings(max_examples=300, deadline=None)
def test_common_is_what_comparing_one_by_one_gives(a: list[int], b: list[int], most: int) -> None:
    assert common(a, b, most) == common(b, a, most) == plainly(a, b, most)


@given(st.lists(st.integers(0, 3), max_size=80), ids, ids, st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_common_of_what_begins_alike(start: list[int], a: list[int], b: list[int], most: int) -> None:
    assert common(start + a, start + b, most) == plainly(start + a, start + b, most)


@given(families, ids.filter(len), st.data())
@settings(max_examples=300, deadline=None)
def test_longest_is_the_best_of_all(family: tuple[list[int], list[list[int]]], rest: list[int], data: st.DataObject):
    start, ends = family
    new, held = start + rest, []
    for slot, end in enumerate(ends):
        n = data.draw(st.integers(0, len(start) + len(end)))
        held.append((slot, start + end, n))
    shared = [(min(plainly(other, new, n), len(new) - 1), -slot) for slot, other, n in held]
    best = max(shared, default=(0, 0))
    expected = (-best[1], best[0]) if best[0] >= MIN_SHARED else None
    assert longest(new, held) == longest(new, held[::-1]) == expected
