"""The clusters that `pp up` holds, by name, for the commands that use or end them.

One file each in the user's state folder. A file holds how to reach the run, its secret too: only its owner may read it.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orchestrator.folders import state_folder
from pptasks.errors import NoSuchCluster, StorageError, UsageError

MAX_BYTES = 64 << 10
WHERE = ("local", "ssh", "vast", "join")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_SUFFIX = ".json"


@dataclass(frozen=True)
class Record:
    """One named cluster. Times are Unix times."""

    name: str
    run: str
    pid: int  # of who holds it
    where: str  # one of WHERE
    model: str
    started_at: float
    deadline: float  # 0: none
    price_usd_hour: float
    ready_s: float | None  # None while it starts
    settings: Mapping[str, str] = field(repr=False)  # Settings.to_env() of a client: broker URL and secret in it


class Clusters:
    """The records in `folder`. Every method raises StorageError if the disk fails or a record's file is damaged."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def of_user(cls) -> "Clusters":
        return cls(state_folder() / "clusters")

    def write(self, record: Record) -> None:
        """Whole or not at all, in place of what was there under its name. UsageError for a name that cannot be one."""
        path = self._path(record.name)
        with self._told():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            new = path.with_name(f"{record.name}.{secrets.token_hex(4)}.new")
            try:
                with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                    json.dump(asdict(record), file)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)

    def read(self, name: str) -> Record:
        """NoSuchCluster, naming those that exist, if there is none of this name."""
        path = self._path(name)
        try:
            with self._told(), suppress(FileNotFoundError):
                return _read(path)
        except _Damaged:
            raise StorageError(f"{path} is damaged: remove it; pp sweep ends what its run has rented") from None
        raise NoSuchCluster(f"no cluster is named {name}; {self._existing()}")

    def all(self) -> list[Record]:
        """By name."""
        found = []
        for name in self._names():
            with suppress(NoSuchCluster):  # it went meanwhile
                found.append(self.read(name))
        return found

    def pick(self, name: str | None) -> Record:
        """The one of this name, or the only one. NoSuchCluster, naming those that exist."""
        if name is not None:
            return self.read(name)
        found = self.all()
        if len(found) != 1:
            raise NoSuchCluster(f"say which cluster; {self._existing()}" if found else self._existing())
        return found[0]

    def remove(self, name: str, run: str) -> None:
        """Nothing happens if there is none of this name, or if it is another run's."""
        with suppress(NoSuchCluster):
            if self.read(name).run == run:
                with self._told():
                    for file in (self._path(name), *(self.folder / f"{name}.{end}" for end in ("out", "err"))):
                        file.unlink(missing_ok=True)  # the latter are of a holder in the background

    def _names(self) -> list[str]:
        with self._told():
            paths = list(self.folder.iterdir()) if self.folder.exists() else []
        return sorted(path.stem for path in paths if path.suffix == _SUFFIX and _NAME.fullmatch(path.stem))

    def _existing(self) -> str:
        names = self._names()
        return f"there is {', '.join(names)}" if names else "no cluster is up: start one with pp up"

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a cluster: use up to 64 letters, digits, '_' or '-'")
        return self.folder / f"{name}{_SUFFIX}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise StorageError(
                f"cannot use the folder {self.folder}: {e.strerror}; set XDG_STATE_HOME to a folder of yours"
            ) from None


class _Damaged(Exception):
    pass


def _text(value: object) -> bool:
    return isinstance(value, str)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _variables(value: object) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


_HOLDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "run", "model"), _text),
    "pid": _whole,
    "where": lambda value: value in WHERE,
    **dict.fromkeys(("started_at", "deadline", "price_usd_hour"), _number),
    "ready_s": lambda value: value is None or _number(value),
    "settings": _variables,
}


def _read(path: Path) -> Record:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        raw = json.loads(data[:MAX_BYTES])
    except (ValueError, RecursionError):
        raise _Damaged from None
    if not isinstance(raw, dict) or raw.keys() != _HOLDS.keys() or raw["name"] != path.stem:
        raise _Damaged
    if not all(holds(raw[name]) for name, holds in _HOLDS.items()):
        raise _Damaged
    return Record(**raw)
