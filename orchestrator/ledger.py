"""Every machine that was asked for, on disk before anybody waits for it.

One SQLite file in the user's state folder, which only they may read, and no secret in it. The order of events is the
point: `intend` before the call that rents, so that a machine whose id never reached us can be found by its label;
`created` as soon as the id is known; `destroyed` when its end is confirmed. Each is on the disk when it returns, and
any number of processes and threads may tell them at once.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from pptasks.errors import StorageError

BUSY_S = 15.0
KEEP_S = 90 * 24 * 3600.0  # rows of machines that are gone
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rentals (
    label TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stage INTEGER NOT NULL,
    provider TEXT NOT NULL,
    offer_id TEXT NOT NULL,
    deadline REAL NOT NULL,
    intended_at REAL NOT NULL,
    instance_id TEXT,
    destroyed_at REAL
)
"""
_COLUMNS = "label, run, stage, provider, offer_id, deadline, intended_at, instance_id, destroyed_at"
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Rental:
    """One machine that was asked for. Times are Unix times."""

    label: str  # of this machine alone
    run: str
    stage: int
    provider: str
    offer_id: str
    deadline: float  # when it is to be gone whatever happens
    intended_at: float
    instance_id: str | None  # None: it is not known whether there is one
    destroyed_at: float | None


class Ledger:
    """The ledger in the file `path`, made if it is not there. Every method raises StorageError if the disk fails.

    A file that is corrupt is moved aside and told of in a StorageError, once; the next ledger begins empty.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self.path, self._clock = path, clock
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            path.chmod(0o600)  # SQLite gives its journal the same rights
        with self._transaction() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found > _VERSION:
                raise StorageError(f"{path} was written by a newer version of pptasks: update this one")
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise self._put_aside()
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version = {_VERSION}")

    @classmethod
    def of_user(cls) -> "Ledger":
        return cls(platformdirs.user_state_path("pptasks", appauthor=False) / "rentals.sqlite")

    def intend(self, label: str, *, run: str, stage: int, provider: str, offer_id: str, deadline: float) -> None:
        """A machine is about to be asked for. StorageError for a label that was used before."""
        now = self._clock()
        with self._transaction() as db:
            db.execute("DELETE FROM rentals WHERE destroyed_at < ?", (now - KEEP_S,))
            try:
                row = (label, run, stage, provider, offer_id, deadline, now)
                db.execute("INSERT INTO rentals VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)", row)
            except sqlite3.IntegrityError:
                raise StorageError(f"the label {label} is in the ledger already: a label is for one machine") from None

    def created(self, label: str, instance_id: str) -> None:
        """The machine exists. StorageError for a label that was not intended, or that another machine has."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE rentals SET instance_id = ?, destroyed_at = NULL"
                " WHERE label = ? AND coalesce(instance_id, ?) = ?",
                (instance_id, label, instance_id, instance_id),
            ).rowcount
            if changed != 1:
                raise StorageError(f"instance {instance_id}: its label {label} is unknown, or another machine's")

    def refused(self, label: str) -> None:
        """There is no machine of this label, and none will come up."""
        with self._transaction() as db:
            now = self._clock()
            db.execute(
                "UPDATE rentals SET destroyed_at = ? WHERE label = ? AND instance_id IS NULL AND destroyed_at IS NULL",
                (now, label),
            )

    def destroyed(self, instance_id: str) -> None:
        """It is confirmed to be gone. Nothing happens for one that is not in the ledger."""
        with self._transaction() as db:
            now = self._clock()
            db.execute(
                "UPDATE rentals SET destroyed_at = ? WHERE instance_id = ? AND destroyed_at IS NULL", (now, instance_id)
            )

    def open_rows(self, run: str | None = None) -> list[Rental]:
        """What is not confirmed to be gone, of one run or of all, oldest first."""
        query = (
            f"SELECT {_COLUMNS} FROM rentals WHERE destroyed_at IS NULL AND coalesce(?, run) = run"
            " ORDER BY intended_at, label"
        )
        with self._transaction() as db:
            return [Rental(*row) for row in db.execute(query, (run,))]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own: none is shared by threads, or survives a fork. On disk at the end, or not at all."""
        with self._told(), closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = EXTRA")  # FULL, and the end of the journal too
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise StorageError(
                f"cannot use the ledger {self.path}: {e.strerror}; set XDG_STATE_HOME to a folder of yours"
            ) from None
        except sqlite3.Error as e:
            if getattr(e, "sqlite_errorcode", 0) & 0xFF in _CORRUPT:
                raise self._put_aside() from None
            raise StorageError(f"cannot use the ledger {self.path}: {e}") from None

    def _put_aside(self) -> StorageError:
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
        with suppress(FileNotFoundError):  # another process was faster
            self.path.rename(aside)
        return StorageError(
            f"the ledger {self.path} is corrupt; it is now {aside.name}, and a new one begins: look for machines that"
            " still run with pp ps, or at the provider's console"
        )
