"""Where an answer ends, and what of it may be shown before that is known."""

import pytest

from pptasks.stops import StopFilter


def shown(stops: list[str], *pieces: str) -> list[str]:
    """What each piece lets through, and what comes at the end."""
    filter_ = StopFilter(stops)
    return [*map(filter_.push, pieces), filter_.finish()]


def test_without_stop_texts_all_goes_through_at_once() -> None:
    assert shown([], "a", "", "b\n") == ["a", "", "b\n", ""]


def test_a_stop_text_ends_the_answer_before_it() -> None:
    stops = StopFilter(["END"])
    assert stops.push("one END two") == "one "
    assert stops.is_hit
    assert (stops.push("three"), stops.finish()) == ("", "")


def test_what_may_become_a_stop_text_is_held_back_and_no_more() -> None:
    assert shown(["\n\nUser:"], "Yes.", "\n", "\nUs", "er:", " No.") == ["Yes.", "", "", "", "", ""]
    assert shown(["\n\nUser:"], "Yes.", "\n", "\nUs", "ed", "!") == ["Yes.", "", "", "\n\nUsed", "!", ""]
    assert shown(["\n\nUser:"], "a\n\n", "\n", "b") == ["a", "\n", "\n\nb", ""]


def test_an_answer_that_ends_otherwise_keeps_the_beginning_of_a_stop_text() -> None:
    assert shown(["END"], "The E", "N") == ["The ", "", "EN"]


def test_nothing_is_held_back_where_nothing_can_come_of_it() -> None:
    assert shown(["ab"], "ba", "ca", "x") == ["b", "ac", "ax", ""]
    assert shown(["aab"], "aaa", "aab") == ["a", "aa", ""]


@pytest.mark.parametrize("piece", ["😀", "é", "\ufffd"])
def test_a_stop_text_is_of_characters(piece: str) -> None:
    assert shown([piece], "a", piece, "b") == ["a", "", "", ""]
    assert shown([piece * 2], piece, "b", piece, piece) == ["", piece + "b", "", "", ""]


def test_the_one_that_is_complete_first_ends_the_answer() -> None:
    """Whatever came with its last character. "abcd" begins sooner, and "bc" need not wait for whether it comes."""
    for pieces in (["abcd"], ["abc", "d"], ["ab", "cd"], ["a", "b", "c", "d"]):
        for stops in (["abcd", "bc"], ["bc", "abcd"]):
            assert "".join(shown(stops, "x", *pieces)) == "xa"


def test_of_two_that_end_at_one_place_neither_is_shown() -> None:
    for stops in (["bc", "abc"], ["abc", "bc"]):
        for pieces in (["xabc"], ["x", "ab", "c"]):
            assert "".join(shown(stops, *pieces)) == "x"


def test_a_stop_text_may_come_with_the_first_piece() -> None:
    stops = StopFilter(["<|im_end|>", "Yes"])
    assert stops.push("Yes, I do") == ""
    assert stops.is_hit
