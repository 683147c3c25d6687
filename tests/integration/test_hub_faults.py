"""Models from a Hub on this machine, when the server, the network, the disk or a process of ours fails."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pptasks.config import Hub
from pptasks.errors import DownloadError, ModelError
from pptasks.remote import journal, ranges
from pptasks.remote.hub import open_remote
from pptasks.spec import HubFile
from tests.fake_hub import FakeHub, Fault
from tests.remote import QUICK, TIED, assert_here, nbytes, open_it, quiet, spec_of, tensors_of, write_gguf

# --- A server that fails ----------------------------------------------------------------------------------------------

PASSING = {
    "short": Fault("short", "x.gguf", times=3, after=70_000),
    "nothing": Fault("short", "x.gguf", times=2, after=0),
    "reset": Fault("reset", "x.gguf", times=3, after=70_000),
    "503": Fault("status", "x.gguf", times=3, status=503),
    "429": Fault("status", "x.gguf", times=2, status=429, headers={"Retry-After": "0"}),
    "stall": Fault("stall", "x.gguf", times=1, after=70_000),
    "too long": Fault("long", "x.gguf", times=1),
    "expired link": Fault("status", "/lfs/", times=1, status=403),
}


@pytest.mark.parametrize("case", PASSING)
def test_what_passes_is_tried_again(server: FakeHub, cache: Path, case: str) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    fault = Fault(**vars(PASSING[case]))
    server.faults.append(fault)
    remote.fetch(tensors_of(remote), quiet)
    assert fault.times == 0
    assert_here(server, tensors_of(remote))
    assert (
        hashlib.sha256(remote.path.read_bytes()).digest()
        == hashlib.sha256(server.repos["o/q"].files["x.gguf"]).digest()
    )


@pytest.mark.parametrize("status", [429, 500, 503])
def test_the_list_is_tried_again(server: FakeHub, cache: Path, status: int) -> None:
    server.faults.append(Fault("status", "/api/", times=2, status=status, headers={"Retry-After": "0"}))
    open_it(server, TIED, cache)


LASTING: dict[str, tuple[Fault, str]] = {
    "503": (Fault("status", "x.gguf", status=503), "status 503.*try again later"),
    "429": (Fault("status", "x.gguf", status=429, headers={"Retry-After": "3600"}), "asks for a pause of 3600 s"),
    "short": (Fault("short", "x.gguf", after=0), "x.gguf: .*try again later"),
    "no ranges": (Fault("ignore-range", "x.gguf"), "cannot serve ranges"),
    "416": (Fault("status", "x.gguf", status=416), "changed on the server"),
    "404": (Fault("status", "x.gguf", status=404), "no such file"),
    "418": (Fault("status", "x.gguf", status=418), "status 418"),
    "size": (Fault("size", "x.gguf"), "changed on the server"),
    "another range": (Fault("shifted", "x.gguf"), "another range"),
    "a loop": (Fault("redirect", "x.gguf", status=302, headers={"Location": "/plain/o/q/x.gguf"}), "redirects"),
    "compressed": (Fault("gzip", "x.gguf"), "as 'gzip', which it was not asked for"),
    "a malformed redirect": (
        Fault("redirect", "x.gguf", status=302, headers={"Location": "http://[::1"}),
        "redirects to a malformed URL",
    ),
    "no http": (Fault("redirect", "x.gguf", status=302, headers={"Location": "ftp://h/x.gguf"}), "refused"),
}


@pytest.mark.parametrize("spec", ["hf:o/q/x.gguf", "url"])
@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_is_told_and_leaves_the_cache_good(server: FakeHub, cache: Path, spec: str, case: str) -> None:
    remote = open_it(server, spec_of(server, spec), cache)
    refs = tensors_of(remote)
    remote.fetch(refs[:1], quiet)
    fault, said = LASTING[case]
    server.faults.append(Fault(**vars(fault) | {"times": 1000}))
    with pytest.raises(ModelError, match=said) as caught:
        remote.fetch(refs, quiet)
    assert "Signature" not in str(caught.value)
    server.faults.clear()
    n = len(server.log)
    remote.fetch(refs, quiet)
    assert server.sent("x.gguf", since=n) <= nbytes(refs[1:])
    assert_here(server, refs)


@pytest.mark.parametrize("validator", ["strong", "weak", "date"])
def test_a_url_whose_file_changes(server: FakeHub, cache: Path, validator: str) -> None:
    server.validator = validator
    url = server.plain("o/q", "x.gguf")
    remote = open_it(server, url, cache)
    server.repos["o/q"].files["x.gguf"] = server.repos["o/q"].files["x.gguf"][:-1] + b"x"
    with pytest.raises(DownloadError, match=r"changed on the server.*start again"):
        remote.fetch(tensors_of(remote), quiet)
    again = open_it(server, url, cache)
    assert again.path != remote.path
    again.fetch(tensors_of(again), quiet)
    assert again.path.read_bytes() == server.repos["o/q"].files["x.gguf"]


def test_a_url_without_validators_whose_size_changes(server: FakeHub, cache: Path) -> None:
    server.validator = "none"
    remote = open_it(server, server.plain("o/q", "x.gguf"), cache)
    server.repos["o/q"].files["x.gguf"] += b"x"
    with pytest.raises(DownloadError, match=r"changed on the server.*start again"):
        remote.fetch(tensors_of(remote), quiet)


def test_a_server_that_asks_for_no_pause_gets_one(server: FakeHub, cache: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    server.faults.append(Fault("status", "x.gguf", times=10_000, status=429, headers={"Retry-After": "0"}))
    n = len(server.log)
    with pytest.raises(DownloadError, match="status 429"):
        remote.fetch(tensors_of(remote), quiet)
    assert len(server.log) - n <= 4 * QUICK.total_s / QUICK.first_s  # of each of the threads


def test_a_web_page_in_place_of_a_file(server: FakeHub, cache: Path) -> None:
    server.faults.append(Fault("page", "x.gguf", times=10))
    with pytest.raises(DownloadError, match=r"is a web page and no model file$"):
        open_it(server, server.plain("o/q", "x.gguf"), cache)
    server.repos["o/q"].files["blob/main/x.gguf"] = server.repos["o/q"].files["x.gguf"]
    with pytest.raises(DownloadError, match="or /resolve/ instead of /blob/"):
        open_it(server, server.plain("o/q", "blob/main/x.gguf"), cache)


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"sha": "a", "siblings": [7]}', b"null", b" " * 33_000_000])
def test_a_list_that_is_none(server: FakeHub, cache: Path, body: bytes) -> None:
    server.list_body = body
    with pytest.raises(DownloadError, match="is no list of a repository"):
        open_it(server, TIED, cache)


def test_a_whole_that_is_not_what_the_hub_said(server: FakeHub, cache: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    server.faults.append(Fault("corrupt", "x.gguf"))
    with pytest.raises(DownloadError, match="digest"):
        remote.fetch(tensors_of(remote), quiet)
    assert not remote.path.exists()
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    remote.fetch(tensors_of(remote), quiet)
    assert_here(server, tensors_of(remote))


def test_a_small_file_that_is_not_what_the_hub_said(server: FakeHub, cache: Path) -> None:
    server.faults.append(Fault("corrupt", "config.json"))
    with pytest.raises(DownloadError, match=r"config\.json.*digest"):
        open_it(server, TIED, cache)
    open_it(server, TIED, cache)


def test_without_the_hub_what_is_here_still_opens(goldens: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeHub({TIED: goldens / "llama-tied"}) as server:
        remote = open_it(server, TIED, cache)
        remote.fetch(tensors_of(remote)[:2], quiet)
    again = open_it(server, TIED, cache)
    assert "as it was last time" in caplog.text
    again.fetch(tensors_of(again)[:2], quiet)
    assert_here(server, tensors_of(again)[:2])
    with pytest.raises(DownloadError, match=r"model\.safetensors"):
        again.fetch(tensors_of(again), quiet)
    with pytest.raises(DownloadError, match="cannot be reached"):
        open_it(server, "o/other", cache)


# --- Deaths, doubles, disks -------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from pptasks import gguf
from pptasks.config import Hub
from pptasks.remote.hub import open_remote
from pptasks.modelinfo import TensorRef
from pptasks.spec import parse
endpoint, cache, first, last = sys.argv[1:]
quiet = lambda *progress: None
remote = open_remote(parse("hf:o/big/x.gguf"), Path(cache), Hub(endpoint, "", Path(cache) / "home"), quiet)
tensors = gguf.read_header(remote.path).tensors[int(first):int(last)]
remote.fetch([TensorRef(t.name, remote.path, t.offset, t.nbytes, t.dtype, t.shape) for t in tensors], quiet)
"""


def child(endpoint: str, cache: Path, first: int = 0, last: int = 100) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, endpoint, str(cache), str(first), str(last)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a GGUF file of 48 tensors of 1 MiB."""
    folder = tmp_path_factory.mktemp("big")
    random_numbers = np.random.default_rng(2)
    write_gguf(folder / "x.gguf", {f"{i}": random_numbers.random((512, 512), np.float32) for i in range(48)})
    return folder


def test_a_killed_download_goes_on(big: Path, cache: Path, wait_until: Callable[..., None]) -> None:
    data = (big / "x.gguf").read_bytes()
    with FakeHub({"o/big": big}) as server:
        place = cache / "models" / "hub" / "o--big" / server.repos["o/big"].commit / "x.gguf"
        there = journal.Journal(place)
        for at_least in (8, 16, 24):
            server.faults[:] = [Fault("slow", "x.gguf", times=1000, seconds=0.002)]
            process = child(server.url, cache)
            wait_until(lambda n=at_least: there.path.exists() and len(there._lines()) > n, 30, "some records")
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        with there.path.open("ab") as f:
            f.write(b'\n{"begin": 0, "end": 9999')  # a record that was torn
        kept = sum(end - begin for begin, end in there.read(json_identity(there)) or {})
        server.faults.clear()
        n = len(server.log)
        process = child(server.url, cache)
        assert process.wait(60) == 0, process.communicate()[1]
        process.communicate()
        assert server.sent("x.gguf", since=n) == len(data) - kept
        assert place.read_bytes() == data


def json_identity(there: journal.Journal) -> journal.Identity:
    return journal.Identity(**json.loads(there.path.read_text().splitlines()[0]))


def test_two_processes_fetch_each_part_once(big: Path, cache: Path) -> None:
    data = (big / "x.gguf").read_bytes()
    with FakeHub({"o/big": big}) as server:
        server.faults.append(Fault("slow", "x.gguf", times=1000, seconds=0.0005))
        spans = [(0, 32), (16, 48), (0, 48)]
        processes = [child(server.url_of(str(i)), cache, *span) for i, span in enumerate(spans)]
        for process in processes:
            error = process.communicate(timeout=60)[1]
            assert process.returncode == 0, error
        place = cache / "models" / "hub" / "o--big" / server.repos["o/big"].commit / "x.gguf"
        assert place.read_bytes() == data
        assert server.sent("x.gguf") <= 1.003 * len(data)  # what comes with the header may be 1/400 too much


def test_a_damaged_unit_is_fetched_again(server: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    refs = tensors_of(remote)[:3]
    remote.fetch(refs, quiet)
    with refs[1].file.open("r+b") as f:
        f.seek(refs[1].offset + 5)
        f.write(b"?!")
    n = len(server.log)
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    remote.fetch(refs, quiet)
    assert_here(server, refs)
    assert server.sent("x.gguf", since=n) == refs[1].nbytes
    assert f"bytes {refs[1].offset} to" in caplog.text


def test_a_damaged_header_is_fetched_again(server: FakeHub, cache: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    with remote.path.open("r+b") as f:
        f.write(b"?")
    assert tensors_of(open_it(server, "hf:o/q/x.gguf", cache))


def test_a_cache_that_is_removed_meanwhile(server: FakeHub, cache: Path, wait_until: Callable[..., None]) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    refs = tensors_of(remote)

    def remove(phase: str, done: int, total: int) -> None:
        shutil.rmtree(cache, ignore_errors=True)

    server.faults.append(Fault("slow", "x.gguf", times=1000, seconds=0.002))
    with pytest.raises(DownloadError, match=r"was removed|No such file"):
        remote.fetch(refs, remove)
    server.faults.clear()
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    remote.fetch(refs, quiet)
    assert_here(server, refs)


class Stop(Exception):
    pass


@pytest.mark.parametrize("phase", ["header", "weights"])
def test_who_stops_does_not_wait_for_a_silent_server_and_keeps_what_came(
    big: Path, cache: Path, phase: str, wait_until: Callable[..., None]
) -> None:
    patience = replace(QUICK, silence_s=60, total_s=60)
    with FakeHub({"o/big": big}) as server:
        spec, hub = HubFile("o/big", "main", "x.gguf"), Hub(server.url, "", cache.parent / "home")
        began: list[float] = []

        def stop(phase: str, done: int, total: int) -> None:
            if server.stalled.is_set():
                began.append(time.monotonic())
                raise Stop

        if phase == "header":
            server.faults.append(Fault("stall", "/lfs/", after=10))
            with pytest.raises(Stop):
                open_remote(spec, cache, hub, stop, patience)
            assert time.monotonic() - began[0] < 3
            return
        remote = open_remote(spec, cache, hub, quiet, patience)
        server.faults.append(Fault("stall", "/lfs/", times=100, after=5 << 20))
        with pytest.raises(Stop):
            remote.fetch(tensors_of(remote), lambda *progress: stop(*progress) if progress[1] > (9 << 20) else None)
        assert time.monotonic() - began[0] < 3
        kept = journal.Journal(remote.path)
        units = kept.read(json_identity(kept)) or {}
        assert sum(end - begin for begin, end in units if begin) >= (9 << 20) - 4 * ranges.UNIT


def unwritable(cache: Path) -> None:
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


OPEN = """
import sys
from pathlib import Path
from tests.remote import QUICK, TIED, assert_here, open_it, quiet, tensors_of
from tests.fake_hub import FakeHub
import os
goldens, folder, cache = map(Path, sys.argv[1:])
with FakeHub({TIED: goldens / "llama-tied", "o/q": folder}) as server:
    open_it(server, TIED, cache.with_name("other")).fetch_text(quiet)  # all is imported now
    if os.geteuid() == 0:  # who may write everywhere
        os.setuid(65534)
    n = len(server.log)
    for spec in (TIED, "hf:o/q/x.gguf"):
        remote = open_it(server, spec, cache)
        remote.fetch_text(quiet)
        remote.fetch(tensors_of(remote), quiet)
        assert_here(server, tensors_of(remote))
    assert not server.sent(".gguf", since=n) + server.sent(".safetensors", since=n)
    open_it(server, "hf:o/q/parts/x-00001-of-00003.gguf", cache)
"""


def test_a_cache_that_cannot_be_written(goldens: Path, gguf_repo: Path, server: FakeHub) -> None:
    with tempfile.TemporaryDirectory() as folder:  # which another user may enter, as not pytest's own
        cache = Path(folder) / "cache"
        for spec in (TIED, "hf:o/q/x.gguf"):
            remote = open_it(server, spec, cache)
            remote.fetch_text(quiet)
            remote.fetch(tensors_of(remote), quiet)
        served = Path(folder) / "served"
        shutil.copytree(gguf_repo, served)
        Path(folder).chmod(0o755)
        unwritable(cache)
        command = [sys.executable, "-c", OPEN, str(goldens), str(served), str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for path in cache.rglob("*"):
            path.chmod(0o755)
    last = done.stderr.splitlines()[-1]
    assert re.search(r"DownloadError: .*parts cannot be written: Permission denied; set PP_CACHE", last), done.stderr


LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); {CHILD}"


def test_a_file_that_the_disk_does_not_take(big: Path, cache: Path) -> None:
    with FakeHub({"o/big": big}) as server:
        command = [sys.executable, "-c", LIMITED, server.url, str(cache), "0", "9"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "DownloadError" in last
    assert str(cache) in last
    assert "choose another cache folder" in last


def test_too_little_space_is_told_before_anything_is_fetched(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    usage = shutil.disk_usage(cache)
    monkeypatch.setattr(ranges.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    before = server.sent("x.gguf")
    with pytest.raises(
        DownloadError, match=r"1 MiB are free, and 4 MiB were needed; .*choose another cache folder"
    ) as caught:
        remote.fetch(tensors_of(remote), quiet)
    assert str(remote.path.parent) in str(caught.value)
    assert server.sent("x.gguf") == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_on_the_way(server: FakeHub, small_disk: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", small_disk / "cache")
    refs = tensors_of(remote)[:3]
    server.faults.append(Fault("stall", "x.gguf", after=1 << 18))

    def fill(phase: str, done: int, total: int) -> None:
        if server.stalled.is_set() and not server.release.is_set():
            (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
            server.release.set()

    with pytest.raises(DownloadError, match=r"No space left.*choose another cache folder"):
        remote.fetch(refs, fill)
    (small_disk / "other").unlink()
    remote = open_it(server, "hf:o/q/x.gguf", small_disk / "cache")
    remote.fetch(refs, quiet)
    assert_here(server, refs)
