"""Stop texts against the plain way: however an answer is cut into pieces, it ends where it would in one."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pptasks.stops import StopFilter

letters = st.text("ab\né", max_size=24)  # few, so that stop texts come, overlap and nearly come
stop_texts = st.lists(st.text("ab\né", min_size=1, max_size=5), max_size=4)


def end_of(text: str, stops: list[str]) -> int | None:
    """Where the first stop text begins that is complete, character by character; None where there is none."""
    for n in range(1, len(text) + 1):
        ended = [n - len(stop) for stop in stops if text[:n].endswith(stop)]
        if ended:
            return min(ended)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[lo:hi] for lo, hi in pairwise(edges)]


@given(letters, stop_texts, st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=500, deadline=None)
@example("abab", ["abab", "ba"], [3])
@example("aab", ["ab"], [1, 2])
def test_an_answer_ends_where_its_first_stop_text_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    filter_, shown, end = StopFilter(stops), "", end_of(text, stops)
    for piece in pieces_of(text, cuts):
        shown += filter_.push(piece)
        assert text.startswith(shown)  # in order, nothing twice, nothing left out
        assert end is None or len(shown) <= end  # nothing of it, nor of what comes after
    assert filter_.is_hit == (end is not None)
    assert shown + filter_.finish() == text[:end]
    assert filter_.push("a") == "" or not filter_.is_hit


@given(letters, stop_texts, st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=300, deadline=None)
def test_what_is_held_back_may_yet_become_a_stop_text(text: str, stops: list[str], cuts: list[int]) -> None:
    """And all of it: a reader waits for no more than that."""
    filter_, shown, heard = StopFilter(stops), "", ""
    for piece in pieces_of(text, cuts):
        shown, heard = shown + filter_.push(piece), heard + piece
        if filter_.is_hit:
            return
        held = heard[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(letters, st.text("ab\né", min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_one_stop_text_is_what_find_finds(text: str, stop: str) -> None:
    filter_, at = StopFilter([stop]), text.find(stop)
    shown = "".join(map(filter_.push, text)) + filter_.finish()
    assert shown == (text if at < 0 else text[:at])
