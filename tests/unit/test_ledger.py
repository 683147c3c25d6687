"""The ledger of rented machines: on disk at each step, whoever is killed, and never anyone else's to read."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.ledger import KEEP_S, Ledger, Rental
from pptasks.errors import StorageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "rentals.sqlite"


def intend(ledger: Ledger, label: str, run: str = "run", deadline: float = 1000.0) -> None:
    ledger.intend(label, run=run, stage=1, provider="vast", offer_id="5", deadline=deadline)


def test_the_life_of_a_machine(path: Path) -> None:
    ledger = Ledger(path, clock=lambda: 50.0)
    intend(ledger, "l1")
    row = Rental("l1", "run", 1, "vast", "5", 1000.0, 50.0, None, None)
    assert Ledger(path).open_rows() == [row]
    ledger.created("l1", "31")
    assert [r.instance_id for r in Ledger(path).open_rows("run")] == ["31"]
    ledger.destroyed("31")
    assert Ledger(path).open_rows() == []


def test_what_is_open(path: Path) -> None:
    now = 10.0
    ledger = Ledger(path, clock=lambda: now)
    intend(ledger, "b", run="x", deadline=100.0)
    now = 9.0
    intend(ledger, "a", run="y", deadline=200.0)
    assert [r.label for r in ledger.open_rows()] == ["a", "b"]
    assert [r.label for r in ledger.open_rows("x")] == ["b"]
    assert ledger.open_rows("z") == []
    ledger.created("b", "7")
    ledger.destroyed("7")
    assert [r.label for r in ledger.open_rows()] == ["a"]


def test_a_refused_label_is_closed_but_no_machine_is(path: Path) -> None:
    ledger = Ledger(path)
    intend(ledger, "gone")
    intend(ledger, "there")
    ledger.created("there", "7")
    ledger.refused("gone")
    ledger.refused("there")
    assert [r.label for r in ledger.open_rows()] == ["there"]


def test_a_machine_that_comes_up_after_all_is_open_again(path: Path) -> None:
    ledger = Ledger(path)
    intend(ledger, "late")
    ledger.refused("late")
    ledger.created("late", "7")
    assert [r.instance_id for r in ledger.open_rows()] == ["7"]


def test_an_id_is_never_overwritten_or_made_up(path: Path) -> None:
    ledger = Ledger(path)
    intend(ledger, "l1")
    ledger.created("l1", "7")
    ledger.created("l1", "7")
    for label, instance in [("l1", "8"), ("unknown", "9")]:
        with pytest.raises(StorageError, match=f"instance {instance}: its label {label}"):
            ledger.created(label, instance)
    with pytest.raises(StorageError, match="label l1 is in the ledger already"):
        intend(ledger, "l1")
    ledger.destroyed("no such id")
    assert [r.instance_id for r in ledger.open_rows()] == ["7"]


def test_old_rows_go_and_open_ones_never(path: Path) -> None:
    now = 0.0
    ledger = Ledger(path, clock=lambda: now)
    for label in ("ended", "open"):
        intend(ledger, label)
        ledger.created(label, label)
    ledger.destroyed("ended")
    now = KEEP_S + 1
    intend(ledger, "ended")  # the label is free again: its row is gone
    assert [r.label for r in ledger.open_rows()] == ["open", "ended"]


def test_only_its_owner_may_read_it(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.touch(0o644)
    path.chmod(0o644)
    ledger = Ledger(path)
    modes = set()
    with ledger._transaction() as db:  # the journal is there while something is written
        db.execute("INSERT INTO rentals VALUES ('l', 'r', 0, 'p', 'o', 0, 0, NULL, NULL)")
        modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        assert len(list(path.parent.iterdir())) == 2
    assert modes == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_link_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="cannot use the ledger"):
        Ledger(path)
    assert not (tmp_path / "elsewhere").exists()


def test_of_user_is_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Ledger.of_user().path == tmp_path / "pptasks" / "rentals.sqlite"
    assert (tmp_path / "pptasks" / "rentals.sqlite").is_file()


@pytest.mark.parametrize("damage", ["not a database", "a page", "cut short"])
def test_a_corrupt_file_is_kept_aside_and_told_of_once(path: Path, damage: str) -> None:
    ledger = Ledger(path)
    for i in range(60):
        intend(ledger, f"label-{i}")
    data = path.read_bytes()
    damaged = {
        "not a database": b"x" * len(data),
        "a page": data[:4096] + b"\xff" * 4096 + data[8192:],
        "cut short": data[: len(data) - 4096],
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match=r"is corrupt; it is now rentals.sqlite.corrupt-.*pp ps"):
        Ledger(path)
    aside = sorted(path.parent.glob("*.corrupt-*"))
    assert aside[0].read_bytes() == damaged
    assert Ledger(path).open_rows() == []


def test_a_newer_ledger_is_left_alone(path: Path) -> None:
    Ledger(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="newer version of pptasks"):
        Ledger(path)
    assert not list(path.parent.glob("*.corrupt-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        Ledger(tmp_path / "state" / "x.sqlite")


def test_a_file_where_its_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        Ledger(tmp_path / "state" / "x.sqlite")


def child(code: str, path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process with `ledger` on `path`, and `arguments` in sys.argv[2:]."""
    head = "import sys, time\nfrom pathlib import Path\nfrom orchestrator.ledger import Ledger\n"
    return subprocess.Popen(
        [sys.executable, "-c", f"{head}ledger = Ledger(Path(sys.argv[1]))\n{code}", str(path), *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


LIFE = """
for i in range(10 ** 6):
    for step, event in enumerate([
        lambda: ledger.intend(f"l{i}", run="r", stage=0, provider="p", offer_id="o", deadline=0.0),
        lambda: ledger.created(f"l{i}", str(i)),
        lambda: ledger.destroyed(str(i)),
    ]):
        event()
        print(i, step, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 8, 30])
def test_what_was_told_is_there_after_sigkill(path: Path, lines: int) -> None:
    """Killed after so many events; the one after the last that returned may be there or not."""
    process = child(LIFE, path)
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0].splitlines()
    told = lines + len([line for line in rest if len(line.split()) == 2])
    rows = Ledger(path).open_rows()
    state = {0: [], 1: [None], 2: ["id"], 3: []}
    possible = [state[told % 3], state[(told + 1) % 3]]
    assert [row.instance_id and "id" for row in rows] in possible
    if rows:
        assert rows[0].label in (f"l{told // 3}", f"l{(told - 1) // 3}")


def test_two_processes_and_threads_at_once(path: Path) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
def life(i):
    label = f"{sys.argv[2]}-{i}"
    ledger.intend(label, run=sys.argv[2], stage=i, provider="p", offer_id="o", deadline=0.0)
    ledger.created(label, f"{label}-id")
    if i % 2: ledger.destroyed(f"{label}-id")
with ThreadPoolExecutor(4) as pool: list(pool.map(life, range(20)))
"""
    processes = [child(code, path, name) for name in ("a", "b", "c")]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    for name, process in zip("abc", processes, strict=True):
        assert process.stdout is not None
        process.stdout.close()
        rows = Ledger(path).open_rows(name)
        assert sorted(row.stage for row in rows) == list(range(0, 20, 2))
        assert all(row.instance_id == f"{row.label}-id" for row in rows)


def test_an_event_waits_for_another_process(path: Path) -> None:
    ledger = Ledger(path)
    code = """
with ledger._transaction():
    print("locked", flush=True)
    time.sleep(0.5)
"""
    process = child(code, path)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    intend(ledger, "l")
    assert time.monotonic() - began > 0.2
    process.communicate()
