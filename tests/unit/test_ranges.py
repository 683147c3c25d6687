"""The parts of a file: the grid, the journal and the locks."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pptasks.errors import DownloadError
from pptasks.remote.journal import Identity, Journal, locked
from pptasks.remote.ranges import UNIT, coalesce, grid

IDENTITY = Identity("o/x@1/x.gguf", 100, "", "sha256:" + "0" * 64)


def test_the_grid_is_the_header_and_pieces_of_tensors() -> None:
    tensor = 2 * UNIT + 5
    assert grid(100, [100, 132, 132 + tensor], 200 + tensor) == (
        (0, 100),
        (100, 132),  # padding belongs to the tensor before it
        (132, 132 + UNIT),
        (132 + UNIT, 132 + 2 * UNIT),
        (132 + 2 * UNIT, 132 + tensor),
        (132 + tensor, 200 + tensor),
    )


def test_a_long_header_is_one_unit() -> None:
    assert grid(3 * UNIT, [3 * UNIT], 3 * UNIT + 1) == ((0, 3 * UNIT), (3 * UNIT, 3 * UNIT + 1))


def test_a_file_that_is_all_header() -> None:
    assert grid(100, [], 100) == ((0, 100),)


def test_adjacent_units_make_one_request_up_to_the_limit() -> None:
    units = [(0, 10), (10, 20), (20, 30), (31, 40), (40, 90)]
    assert coalesce(units, 25) == [[(0, 10), (10, 20)], [(20, 30)], [(31, 40)], [(40, 90)]]
    assert coalesce([]) == []


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "x.gguf")
    journal.create(IDENTITY)
    return journal


def record(begin: int, end: int, sha256: str = "aa") -> dict[str, object]:
    return {"begin": begin, "end": end, "sha256": sha256}


def test_records(journal: Journal) -> None:
    assert journal.read(IDENTITY) == {}
    journal.append(record(0, 5), record(5, 9))
    journal.append(record(0, 5, "bb"))
    assert journal.read(IDENTITY) == {(0, 5): "bb", (5, 9): "aa"}
    assert not journal.is_verified()
    journal.append({"verified": True})
    assert journal.is_verified()
    assert json.loads(journal.path.read_text().splitlines()[0])["size"] == 100


@pytest.mark.parametrize(
    "torn", [b'\n{"begin": 5, "end": 9, "sha2', b"\n", b"\n\xff\xfe", b"\n[1]", b"\n" + b"[" * 9999, bytes(9)]
)
def test_a_torn_record_is_not_read_and_harms_no_other(journal: Journal, torn: bytes) -> None:
    journal.append(record(0, 5))
    with journal.path.open("ab") as f:
        f.write(torn)
    journal.append(record(9, 12))
    assert journal.read(IDENTITY) == {(0, 5): "aa", (9, 12): "aa"}


@pytest.mark.parametrize(
    "line",
    [
        '{"begin": 0, "end": 2305843009213693952, "sha256": "aa"}',
        '{"begin": -1, "end": 9, "sha256": "aa"}',
        '{"begin": 9, "end": 9, "sha256": "aa"}',
        '{"begin": true, "end": 9, "sha256": "aa"}',
        '{"begin": 1, "end": "9", "sha256": "aa"}',
        '{"begin": 1, "end": 9}',
    ],
)
def test_a_record_that_is_none(journal: Journal, line: str) -> None:
    with journal.path.open("a") as f:
        f.write("\n" + line)
    assert journal.read(IDENTITY) == {}


def test_another_version_of_the_file(journal: Journal, tmp_path: Path) -> None:
    journal.append(record(0, 5))
    for other in (Identity("o/y", 100, "", IDENTITY.digest), Identity(IDENTITY.name, 99, "", IDENTITY.digest)):
        assert journal.read(other) is None
    assert Journal(tmp_path / "y.gguf").read(IDENTITY) is None
    journal.path.write_bytes(b"")
    assert journal.read(IDENTITY) is None


def test_no_record_is_made_in_a_journal_that_is_gone(journal: Journal) -> None:
    journal.remove()
    with pytest.raises(FileNotFoundError):
        journal.append(record(0, 5))


def takes(file: Path, span: tuple[int, int]) -> bool:
    """Whether the lock on `span` is free now."""
    stopped = threading.Event()
    stopped.set()  # do not wait
    try:
        with locked(file, span, stopped):
            return True
    except DownloadError:
        return False


def test_a_lock_excludes_what_overlaps_also_in_the_same_process(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    with locked(file, (10, 20), threading.Event()):
        assert not takes(file, (10, 20))
        assert not takes(file, (19, 30))
        assert takes(file, (0, 10))
        assert takes(file, (20, 30))
    assert takes(file, (10, 20))


HOLDER = """
import sys, threading
from pathlib import Path
from pptasks.remote.journal import locked
with locked(Path(sys.argv[1]), (0, 10), threading.Event()):
    print("held", flush=True)
    threading.Event().wait()
"""


def test_a_killed_holder_lets_go(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    file = tmp_path / "x.gguf"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not takes(file, (5, 6))
        holder.send_signal(signal.SIGKILL)
    wait_until(lambda: takes(file, (5, 6)), what="the free lock")
