"""What of a foreign text reaches a terminal: all that can be read, and nothing that is obeyed."""

import io
import os
import pty

import pytest
from rich.console import Console

from orchestrator import cli, tables
from orchestrator.board import Board, Row
from orchestrator.listing import CLUSTERS, table
from orchestrator.terminal import print_text
from pptasks.errors import StageFailed
from pptasks.shown import line, plain

HOSTILE = "a\x1b]0;owned\x07b\x1b[2J\x9b31m\r\x08\u202ec\u2066\ud800d"
HARMLESS = "a]0;ownedb[2J31mcd"


def test_commands_go_and_text_stays() -> None:
    assert plain(HOSTILE) == HARMLESS
    ordinary = "tabs\tand lines\n, é, 你好, שלום, 👩\u200d🔬, [/bold]"
    assert plain(ordinary) == ordinary
    plain(HOSTILE).encode()


def test_a_line_is_one_and_not_long() -> None:
    assert line("a\r\nerror: fake\tline") == "a error: fake line"
    assert line("x" * 5000) == "x" * 2000
    assert line("\x1b" * 9 + "abc", 2) == "ab"


def test_an_error_and_its_log_are_shown_without_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), cli._errors():
        raise StageFailed(f"stage 1 failed: {HOSTILE}", (HOSTILE, "x\nerror: fake"))
    assert capsys.readouterr().err.splitlines() == [
        f"error: stage 1 failed: {HARMLESS}", f"  | {HARMLESS}", "  | x error: fake",
    ]  # fmt: skip


def test_an_answer_is_harmless_on_a_terminal_and_whole_elsewhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "a\x1b[2Jb\tc\x07 "
    print_text(answer)
    assert capfd.readouterr().out == answer
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", terminal)
        print_text(answer)
        terminal.flush()
        assert os.read(ours, 100) == b"a[2Jb\tc "
    os.close(ours)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_board_shows_no_commands(is_terminal: bool) -> None:
    out = io.StringIO()
    with Board(Console(file=out, force_terminal=is_terminal, color_system=None, width=200)) as board:
        board.show([Row(0, HOSTILE, 0.1, "creating", note=f"[/x]{HOSTILE}")], 0.0, None)
        board.say(HOSTILE)
    assert HARMLESS in out.getvalue()
    assert not set("\x07\x08\x9b\u202e\ud800") & set(out.getvalue())
    assert not any(command in out.getvalue() for command in ("\x1b]", "\x1b[2J"))


def shown(what: object, **given: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(what, **given)
    return out.getvalue()


def test_foreign_texts_in_tables_are_no_markup() -> None:
    foreign = "[/x] [bold]\x1b[2J"
    offer = {
        "stage": 0, "offer": foreign, "gpu": foreign, "vram_gb": 1.0, "needs_gb": 1.0, "place": foreign,
        "down_mbps": 1.0, "reliability": 1.0, "usd_hour": 0.1,
    }  # fmt: skip
    assert shown(tables.offers_table([offer], 0.1)).count("[/x] [bold][2J") == 3
    plan = {"stage": 0, "span": [0, 2], "also": "", "bytes": 1, "memory_bytes": 1, "kv_bytes": 1}
    assert "[/x] [bold][2J: 2 blocks" in shown(tables.plan_table([plan], f"{foreign}: 2 blocks"))
    assert "[0, 2)" in shown(tables.plan_table([plan], "title"))
    stage = {"stage": 0, "span": [], "device": foreign, "kernels": "c", "weights_bytes": 1}
    check = {"stage": 0, "first_position": None, "max_abs_diff": None, "values_differ": 0}
    report = {"stages": [stage], "verification": {"stages": [check, check | {"stage": 1}]}}
    text = shown(tables.verification_table(report))
    assert "[/x] [bold][2J (c)" in text
    assert "gone" in text  # stage 1, whose record was away when the answer came


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, 10**400, -(10**400)])
def test_a_figure_beyond_any_calendar_is_listed(value: float) -> None:
    entry = dict.fromkeys(CLUSTERS.values()) | {"since": value, "cost_usd": 10**400, "name": "a\x1b[2J"}
    text = shown(table("clusters", CLUSTERS, [entry]))
    assert text.count("?") == 2
    assert "a[2J" in text
