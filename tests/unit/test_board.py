"""The board on a terminal, and without one."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.board import PAUSE_S, Board, Row

ROW = Row(0, "RTX 4090, Sweden", 0.35, "creating")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, color_system=None, _environ={"TERM": "xterm"}), out


def plain(*rows: Row, budget: float | None = None) -> list[str]:
    shown, out = console(False)
    with Board(shown, clock=Clock()) as board:
        for row in rows:
            board.show([row], 0.0123, budget)
    return out.getvalue().splitlines()


def test_a_line_for_each_state_and_no_more() -> None:
    assert plain(ROW, ROW, replace(ROW, note="x"), replace(ROW, state="loading", note="[pull] 3 layers"), ROW) == [
        "stage 0: creating (RTX 4090, Sweden); $0.0123 so far",
        "stage 0: loading (RTX 4090, Sweden, [pull] 3 layers); $0.0123 so far",
        "stage 0: creating (RTX 4090, Sweden); $0.0123 so far",
    ]


def test_another_machine_in_the_same_state_is_told() -> None:
    assert len(plain(ROW, replace(ROW, offer="RTX 3090, Norway"))) == 2


def test_bytes_are_told_now_and_then() -> None:
    shown, out = console(False)
    clock, row = Clock(), replace(ROW, state="download", total=200_000_000)
    with Board(shown, clock=clock) as board:
        for second in range(int(2 * PAUSE_S) + 1):
            clock.now = 1000.0 + second
            board.show([replace(row, done=second * 10**7), replace(ROW, stage=1, state="probe", done=second)], 1.5, 2)
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "stage 0" in line] == [
        f"stage 0: download (RTX 4090, Sweden, {mb}/200 MB ({mb // 2} %)); $1.50 so far" for mb in (0, 100, 200)
    ]
    assert len([line for line in lines if "stage 1" in line]) == 1


def test_a_long_line_is_not_broken_and_a_bracket_is_a_bracket() -> None:
    shown, out = console(False)
    with Board(shown) as board:
        board.say("[bold]" + "x" * 300)
    assert out.getvalue() == "[bold]" + "x" * 300 + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal: bool) -> None:
    shown, out = console(terminal)
    with Board(shown, quiet=True) as board:
        board.show([ROW], 0.0, None)
        board.say("line")
    assert out.getvalue() == ""


def test_on_a_terminal_one_table_is_left_behind() -> None:
    shown, out = console(True)
    clock = Clock()
    with Board(shown, deadline=1300.0, clock=clock) as board:
        board.show([ROW], 0.0, 2.0)
        clock.now = 1065.0
        board.say("stage 0 is replaced")
        board.show(
            [replace(ROW, state="ready", rtt_ms=31.26), replace(ROW, stage=1, state="lost", note="[gone]")], 0.5, 2.0
        )
        during = out.getvalue()
    erased, _, left = out.getvalue()[len(during) :].rpartition("\x1b[2K")
    assert "stage 0 is replaced" in during
    assert left.count("ready") == 1
    for text in ("RTX 4090, Sweden", "0.350", "31.3 ms", "lost", "[gone]",
                 "$0.5000 so far of $2.00, $0.7000 per hour, 1:05, ends in 3:55"):  # fmt: skip
        assert text in left
    assert "\x1b[?25h" in erased  # the cursor is there again


def test_nothing_is_left_behind_when_it_failed() -> None:
    shown, out = console(True)

    def fail() -> None:
        with Board(shown) as board:
            board.show([ROW], 0.0, None)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    _, erased, left = out.getvalue().rpartition("\x1b[2K")
    assert erased
    assert left == ""


def test_settled_it_leaves_the_table_once_and_tells_changes_in_lines() -> None:
    shown, out = console(True)
    ready = replace(ROW, state="ready")
    with Board(shown, clock=Clock()) as board:
        board.show([ready], 0.1, None)
        board.settle()
        settled = out.getvalue()
        board.show([ready], 0.2, None)
        assert out.getvalue() == settled
        board.show([replace(ROW, state="lost")], 0.2, None)
    assert out.getvalue().removeprefix(settled) == "stage 0: lost (RTX 4090, Sweden); $0.2000 so far\n"


def test_what_costs_nothing_is_shown_without_money() -> None:
    assert plain(replace(ROW, price_usd_hour=0.0)) == ["stage 0: creating (RTX 4090, Sweden); $0.0123 so far"]
    shown, out = console(False)
    with Board(shown, clock=Clock()) as board:
        board.show([replace(ROW, price_usd_hour=0.0)], 0.0, None)
    assert out.getvalue() == "stage 0: creating (RTX 4090, Sweden)\n"
