"""What is here of a file that is downloaded in parts: a journal beside it, and locks on parts of it.

`<file>.ranges` holds one JSON object a line. The first says which file on the server this is a copy of; each other one
names a range whose bytes are in the file, with their sha256, or says that the whole was verified. A record is appended
in one write after its bytes are on the disk, so whenever a process is killed, what is recorded is there. Each record
begins and ends with a line end: one that a killed process left torn stays alone on its line, and is not read.

`<file>.lock` is empty and stays. A process that fetches a range holds an open file description lock on these bytes of
it (fcntl(2), F_OFD_SETLK): it excludes threads and processes alike, other ranges stay free, and it ends with its
holder. A thread holds one at a time, so nobody waits in a circle.
"""

import errno
import fcntl
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pptasks.errors import DownloadError

MAX_JOURNAL = 1 << 27  # bytes
POLL_S = 0.05
WHOLE = 1 << 62  # the byte whose lock says: the file is created, or verified as a whole

Span = tuple[int, int]  # [begin, end) in bytes from the start of the file


@dataclass(frozen=True)
class Identity:
    """Which version of which file on the server. What differs in any part is another file."""

    name: str  # of the repository, commit and file, or the URL without its query
    size: int
    etag: str  # "" when the server gave none that is strong
    digest: str  # "sha256:<hex>" or "git-sha1:<hex>" of the whole, "" when unknown


class Journal:
    """The records of one file. Threads and processes append; each reads what the others have appended."""

    def __init__(self, file: Path):
        self.path = file.with_name(file.name + ".ranges")

    def create(self, identity: Identity) -> None:
        """Start a new one, without records."""
        with replacing(self.path) as new:
            new.write_text(json.dumps(asdict(identity)))

    def read(self, identity: Identity) -> dict[Span, str] | None:
        """The sha256 of each recorded range, the last record counts; None: there is no journal, or another file's.

        Ranges that no file of this size has are left out.
        """
        lines = self._lines()
        if not lines or lines[0] != asdict(identity):
            return None
        return {
            (line["begin"], line["end"]): line["sha256"]
            for line in lines[1:]
            if {type(line.get(key)) for key in ("begin", "end")} == {int} and isinstance(line.get("sha256"), str)
            if 0 <= line["begin"] < line["end"] <= identity.size
        }

    def is_verified(self) -> bool:
        return any(line.get("verified") is True for line in self._lines())

    def append(self, *records: Mapping[str, Any]) -> None:
        """OSError: the disk is full, or somebody removed the journal."""
        data = b"".join(b"\n" + json.dumps(record).encode() + b"\n" for record in records)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            if self.path.stat().st_size > MAX_JOURNAL:
                return []
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return [value for line in data.split(b"\n") if isinstance(value := _parse(line), dict)]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; not if an exception is raised."""
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(file: Path, span: Span, stopped: threading.Event) -> Iterator[None]:
    """Hold the lock on [begin, end) of `file`'s lock file. DownloadError: `stopped` was set while another held it."""
    fd = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, span[0], span[1] - span[0], 0)  # struct flock
        while True:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
                break
            except BlockingIOError:
                if stopped.wait(POLL_S):
                    raise DownloadError(f"{file}: stopped while another process fetched a part of it") from None
        yield
    finally:
        os.close(fd)
