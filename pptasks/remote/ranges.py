"""A file of which only some ranges are downloaded, at its final place and with its full size.

Holes read as zeros and take no space, so every reader of a whole file works on it, as long as it keeps to what it asked
for. The file is cut into units on a grid that its header alone decides: the header, then each tensor up to where the
next begins, in pieces of at most 2 MiB. The grid is the same for every span of blocks, so stages of one machine share
what they have in common, and whether a tensor is here has one answer. `journal.py` remembers the units and keeps two
fetchers from one unit.

A unit that an earlier process left here is hashed once before it is used. When the last unit has come and the server
told the digest of the whole, that is verified too.
"""

import errno
import hashlib
import logging
import os
import shutil
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from pptasks.errors import DownloadError
from pptasks.remote.jobs import Job, Meter, at_once
from pptasks.remote.journal import WHOLE, Identity, Journal, Span, locked
from pptasks.remote.line import Line
from pptasks.remote.webfile import WebFile

UNIT = 2 << 20  # bytes at most: what a thread that is interrupted loses; one that is killed may lose two
REQUEST = 32 << 20  # bytes of adjacent units that one request asks for, at most
CHUNK = 1 << 20

OnProgress = Callable[[str, int, int], None]  # "download" or "check", done, total; bytes
Buffer = bytes | memoryview


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


log = logging.getLogger(__name__)


def grid(header: int, starts: Iterable[int], size: int) -> tuple[Span, ...]:
    """The units of a file of `size` bytes: the header up to `header`, then the tensors, which begin at `starts`."""
    tensors = pairwise(sorted({header, size, *starts}))
    return ((0, header), *((at, min(at + UNIT, end)) for begin, end in tensors for at in range(begin, end, UNIT)))


def coalesce(units: Sequence[Span], limit: int = REQUEST) -> list[list[Span]]:
    """`units`, which ascend, as runs of adjacent ones of at most `limit` bytes (or of one)."""
    runs: list[list[Span]] = []
    for unit in units:
        if runs and runs[-1][-1][1] == unit[0] and unit[1] - runs[-1][0][0] <= limit:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


@dataclass(frozen=True)
class Layout:
    """How files of one format lie; both functions raise ModelError for a file that is none."""

    header_end: Callable[[Path, int], int]  # see gguf.py and stfile.py
    starts: Callable[[Path], Iterable[int]]  # where the tensors begin, once the header is there


class SparseFile:
    """One file of the server, of which some units are at `path`. Threads and processes may share it."""

    def __init__(self, path: Path, web: WebFile, digest: str):
        self.path, self.web = path, web
        self.identity = Identity(web.name, web.size, web.strong_etag, digest)
        self.units: tuple[Span, ...] = ()
        self._journal = Journal(path)
        self.checked: set[Span] = set()  # units whose bytes this process has seen to be right

    def open(self, line: Line, layout: Layout, meter: Meter) -> None:
        """Have the file with its full size, its header in it, and the grid.

        Raises what `layout` raises, what `WebFile.read` raises, and DownloadError when it cannot be stored.
        """
        with storing(self.path):
            header = self._header_here()
            if header is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with locked(self.path, (WHOLE, WHOLE + 1), meter.stopped):
                    header = self._header_here() or self._fetch_header(line, layout, meter)
        self.checked.add(header)
        self.units = grid(header[1], layout.starts(self.path), self.web.size)

    def needed(self, ranges: Iterable[Span]) -> list[Span]:
        """The units that hold these ranges and that this process has not checked yet, ascending."""
        begins, found = [begin for begin, _ in self.units], set[Span]()
        for begin, end in ranges:
            first = bisect_right(begins, begin) - 1
            found.update(self.units[first : bisect_left(begins, end)])
        return sorted(found - self.checked)

    def recorded(self) -> dict[Span, str]:
        """The units that somebody has fetched, with their sha256. DownloadError: the file is no longer ours."""
        records = self._journal.read(self.identity)
        if records is None:
            raise DownloadError(f"{self.path}: was removed while it was downloaded; start again")
        return records

    def check(self, unit: Span, sha256: str, meter: Meter) -> None:
        """Hash a unit that is here; it stays unchecked, and is told, if it was damaged since it was fetched."""
        if self._is_right(unit, sha256, meter):
            self.checked.add(unit)
        else:
            log.warning("%s: bytes %d to %d were damaged on this disk; fetching them again", self.path, *unit)

    def download(self, run: Sequence[Span], line: Line, meter: Meter) -> None:
        """Fetch these adjacent units, but for those that another process has brought while we waited for the lock."""
        with locked(self.path, (run[0][0], run[-1][1]), meter.stopped):
            records = self.recorded()
            missing = [u for u in run if u not in records or not self._is_right(u, records[u], Meter())]
            meter.add(nbytes(run) - nbytes(missing))
            for part in coalesce(missing):
                self._store(part, line, meter)
        self.checked.update(run)

    def is_unverified(self) -> bool:
        """Whether all units are here, the digest of the whole is known, and nobody has verified it."""
        if not self.identity.digest or self._journal.is_verified():
            return False
        records = self.recorded()
        return all(unit in records for unit in self.units)

    def verify(self, meter: Meter) -> None:
        """Compare the whole with the digest that the server told. DownloadError: it differs, and is removed."""
        with locked(self.path, (WHOLE, WHOLE + 1), meter.stopped):
            digest, told = start_digest(self.identity.digest, self.web.size)
            if self._hash((0, self.web.size), digest, meter) != told:
                self._journal.remove()
                self.path.unlink(missing_ok=True)
                raise DownloadError(f"{self.web.name}: is not what the server's digest says; start again")
            self._journal.append({"verified": True})

    def _header_here(self) -> Span | None:
        """The header's unit, if it is here. Only reads: a cache that is complete need not be writable."""
        records = self._journal.read(self.identity) if self._has_full_size() else None
        header = next((unit for unit in records or () if unit[0] == 0), None)
        return header if records and header and self._is_right(header, records[header], Meter()) else None

    def _has_full_size(self) -> bool:
        try:
            return self.path.stat().st_size == self.web.size
        except FileNotFoundError:
            return False

    def _create(self) -> None:
        self._journal.remove()
        self.path.unlink(missing_ok=True)
        with self.path.open("xb") as f:
            f.truncate(self.web.size)
        self._journal.create(self.identity)

    def _fetch_header(self, line: Line, layout: Layout, meter: Meter) -> Span:
        if not self._has_full_size() or self._journal.read(self.identity) is None:
            self._create()
        have = 0
        with self.path.open("r+b", buffering=0) as f:
            while (need := layout.header_end(self.path, have)) > have:
                for piece in self.web.read(line, have, need):
                    have += _write(f.fileno(), piece, have)
                    meter.add(len(piece))
            header = (0, need)
            self._record(f.fileno(), [(header, self._hash(header, hashlib.sha256(), Meter()))])
        return header

    def _store(self, units: Sequence[Span], line: Line, meter: Meter) -> None:
        """Fetch adjacent units with one request. Those that are complete are recorded, also when the rest fails."""
        at, left, digest = units[0][0], deque(units), hashlib.sha256()
        complete: list[tuple[Span, str]] = []
        with self.path.open("r+b", buffering=0) as f:
            try:
                for piece in self.web.read(line, at, units[-1][1]):
                    view = memoryview(piece)
                    while view:
                        part = view[: left[0][1] - at]
                        at += _write(f.fileno(), part, at)
                        digest.update(part)
                        view = view[len(part) :]
                        if at == left[0][1]:
                            complete.append((left.popleft(), digest.hexdigest()))
                            digest = hashlib.sha256()
                    if complete and complete[-1][0][1] - complete[0][0][0] >= UNIT:
                        self._record(f.fileno(), complete)
                        complete = []
                    meter.add(len(piece))
            finally:
                self._record(f.fileno(), complete)

    def _record(self, fd: int, units: Sequence[tuple[Span, str]]) -> None:
        """Have the units on the disk, then in the journal."""
        if units:
            os.fdatasync(fd)
            if os.fstat(fd).st_ino != self.path.stat().st_ino:
                raise DownloadError(f"{self.path}: was removed while it was downloaded; start again")
            self._journal.append(*({"begin": b, "end": e, "sha256": sha256} for (b, e), sha256 in units))

    def _is_right(self, unit: Span, sha256: str, meter: Meter) -> bool:
        return self._hash(unit, hashlib.sha256(), meter) == sha256

    def _hash(self, span: Span, digest: Digest, meter: Meter) -> str:
        with self.path.open("rb", buffering=0) as f:
            for at in range(*span, CHUNK):
                data = os.pread(f.fileno(), min(CHUNK, span[1] - at), at)
                digest.update(data)
                meter.add(len(data))
        return digest.hexdigest()


def fetch(wanted: Mapping[SparseFile, Iterable[Span]], line: Line, on_progress: OnProgress) -> None:
    """Have these ranges of these files, which lie in one folder, on the disk, each unit checked once by this process.

    Raises what `WebFile.read` raises, and DownloadError: no space, or a whole that is not what the server told.
    """
    todo = {file: units for file, ranges in wanted.items() if (units := file.needed(ranges))}
    if not todo:
        return
    with storing(next(iter(todo)).path):
        _check(todo, on_progress)
        missing = {file: [unit for unit in units if unit not in file.checked] for file, units in todo.items()}
        _download(missing, line, on_progress)
        whole = [file for file in todo if file.is_unverified()]
        _run("check", [file.verify for file in whole], sum(file.web.size for file in whole), on_progress)


def _check(todo: Mapping[SparseFile, Sequence[Span]], on_progress: OnProgress) -> None:
    jobs: list[Job] = []
    total = 0
    for file, units in todo.items():
        records = file.recorded()
        here = [unit for unit in units if unit in records]
        jobs += [partial(file.check, unit, records[unit]) for unit in here]
        total += nbytes(here)
    _run("check", jobs, total, on_progress)


def _download(missing: Mapping[SparseFile, Sequence[Span]], line: Line, on_progress: OnProgress) -> None:
    need = sum(map(nbytes, missing.values()))
    if need:
        with storing(next(iter(missing)).path, need):
            jobs = [partial(file.download, run, line) for file, units in missing.items() for run in coalesce(units)]
            at_once(jobs, lambda done: on_progress("download", done, need), line.stop)


def _run(phase: str, jobs: Sequence[Job], total: int, on_progress: OnProgress) -> None:
    if jobs:
        at_once(jobs, lambda done: on_progress(phase, done, total))


def start_digest(told: str, size: int) -> tuple[Digest, str]:
    """A digest to feed a file of `size` bytes to, and the hex that it must come to. `told`: see `Identity.digest`."""
    kind, _, value = told.partition(":")
    return (hashlib.sha1(b"blob %d\0" % size) if kind == "git-sha1" else hashlib.sha256()), value


def nbytes(units: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in units)


def _write(fd: int, data: Buffer, at: int) -> int:
    """Write all of `data` at `at`; its length."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
    return done


@contextmanager
def storing(path: Path, need: int = 0) -> Iterator[None]:
    """While bytes come to `path`'s folder, `need` of them: what the disk says becomes a DownloadError."""
    try:
        if need > (free := shutil.disk_usage(path.parent).free if need else 0):
            raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free")
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed = f", and {-(-need >> 20)} MiB were needed" if need else ""
            reason += f"{needed}; free some space or choose another cache folder (PP_CACHE)"
        elif e.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise DownloadError(f"{path.parent} cannot be written: {reason}; set PP_CACHE to another folder") from e
        raise DownloadError(f"{path.name} cannot be stored in {path.parent}: {reason}") from e
