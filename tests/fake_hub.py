"""A Hugging Face Hub in one process: folders as repositories, over real HTTP, with scripted faults and a log.

    with FakeHub({"owner/name": folder}) as hub:
        ... Hub(endpoint=hub.url) ...
        hub.log, hub.sent("model.safetensors")

Weights are LFS files, as on the Hub: `resolve` redirects them to another origin (the name "localhost" instead of
127.0.0.1), which notes any Authorization header that follows. `hub.url_of("stage1")` is an endpoint of the same server
whose requests are logged under that name. `python -m tests.fake_hub FOLDER --port N` serves FOLDER/<owner>/<name>.
"""

import argparse
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 14
LFS = (".safetensors", ".gguf", ".bin")


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose path holds `match`."""

    # status, short, reset, stall, slow, ignore-range, shifted, etag, size, corrupt, redirect, sleep, gzip, long, page
    kind: str
    match: str = ""
    times: int = 1
    status: int = 503
    after: int = 0  # bytes sent before a short read, a reset or a stall
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # slow: per 16 KiB; sleep: before the answer


@dataclass
class Request:
    """Logged when it comes; what is sent is counted while it is."""

    client: str  # of `url_of`
    method: str
    path: str
    range: str  # the Range header, ""
    host: str  # the Host header, without port
    authorization: str  # the header, ""
    status: int = 0
    sent: int = 0  # bytes of the body


@dataclass
class Repo:
    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        self.files = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}

    @property
    def commit(self) -> str:
        return hashlib.sha1("".join(map(git_sha1, self.files.values())).encode()).hexdigest()


@cache  # a file is hashed once, not for each request
def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeHub:
    """`gated`, `private`: names of repositories that only the bearer of a token of `tokens` may read."""

    def __init__(
        self,
        repos: Mapping[str, Path],
        *,
        gated: frozenset[str] | set[str] = frozenset(),
        private: frozenset[str] | set[str] = frozenset(),
        tokens: frozenset[str] | set[str] = frozenset(),
        lfs: tuple[str, ...] = LFS,
        sizes: bool = True,  # whether the list of files tells sizes and digests
        port: int = 0,
    ):
        self.repos = {name: Repo(folder) for name, folder in repos.items()}
        self.gated, self.private, self.tokens, self.lfs, self.sizes = gated, private, tokens, lfs, sizes
        self.validator = "strong"  # of plain files: strong, weak, date, none
        self.list_body = b""  # sent in place of every list
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.stalled = threading.Event()  # set while a request stalls
        self.release = threading.Event()  # set it to let stalled requests go on
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.hub, self._server.connections = self, []
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in self._server.connections:  # those that clients keep open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, client: str) -> str:
        return f"{self.url}/as/{client}"

    def plain(self, repo: str, file: str) -> str:
        """A URL of the file on an ordinary web server: a strong ETag, no redirect, nothing of the Hub."""
        return f"{self.url}/plain/{repo}/{file}"

    def sent(self, file: str = "", client: str | None = None, since: int = 0) -> int:
        """Bytes of the bodies that were sent of a file (paths that end so; "": all), to one client or to all.

        `since`: only of the requests from `log[since]` on.
        """
        with self.lock:
            logged = self.log[since:]
        return sum(r.sent for r in logged if urlsplit(r.path).path.endswith(file) and client in (None, r.client))

    def fault(self, path: str, kinds: tuple[str, ...]) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.kind in kinds and fault.match in path:
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: FakeHub
    connections: list[socket.socket]

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:  # a client that went away
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, client = self.server.hub, ""
        path = urlsplit(self.path).path
        if match := re.match(r"/as/([^/]+)(/.*)", path):
            client, path = match.groups()
        host, asked, authorization = (self.headers.get(name, "") for name in ("Host", "Range", "Authorization"))
        host = host.rsplit(":", 1)[0]
        self.logged = Request(client, self.command, self.path, asked, host, authorization)
        with hub.lock:
            hub.log.append(self.logged)
        self.route(hub, unquote(path))

    def route(self, hub: FakeHub, path: str) -> None:
        if fault := hub.fault(path, ("sleep",)):
            time.sleep(fault.seconds)
        if fault := hub.fault(path, ("status", "redirect")):
            return self.answer(fault.status, b"", **fault.headers)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self.list(hub, match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            return self.resolve(hub, *match.groups())
        if match := re.fullmatch(r"/(lfs|plain)/([^/]+/[^/]+)/(.+)", path):
            data = hub.repos[match[2]].files.get(match[3])
            if data is None:
                return self.answer(404, b"")
            validator = hub.validator if match[1] == "plain" else "strong"
            etag = {"strong": f'"{sha256(data)[:32]}"', "weak": f'W/"{sha256(data)[:32]}"'}.get(validator, "")
            date = {"Last-Modified": sha256(data)[:8]} if validator == "date" else {}
            return self.send(hub, path, data, etag, **date)
        return self.answer(404, b"")

    def repo(self, hub: FakeHub, name: str, revision: str, closed: frozenset[str] | set[str]) -> Repo | None:
        """The repository, or None and an error is sent."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        repo = hub.repos.get(name)
        if repo is None or (name in hub.private and token not in hub.tokens):
            self.answer(404 if token in hub.tokens else 401, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif name in closed and token not in hub.tokens:
            self.answer(403 if token else 401, b"{}", **{"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", repo.commit):
            self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def list(self, hub: FakeHub, name: str, revision: str) -> None:
        repo = self.repo(hub, name, revision, frozenset())  # the list of a gated repository is public
        if repo is not None and hub.list_body:
            self.answer(200, hub.list_body)
        elif repo is not None:
            siblings = [self.sibling(hub, file, data) for file, data in repo.files.items()]
            body = {"id": name, "sha": repo.commit, "siblings": siblings}
            self.answer(200, json.dumps(body).encode(), **{"Content-Type": "application/json"})

    def sibling(self, hub: FakeHub, file: str, data: bytes) -> dict[str, object]:
        if not hub.sizes or "blobs=true" not in self.path.lower():
            return {"rfilename": file}
        lfs = {"sha256": sha256(data), "size": len(data), "pointerSize": 134} if file.endswith(hub.lfs) else None
        blob = git_sha1(b"pointer" if lfs else data)
        return {"rfilename": file, "size": len(data), "blobId": blob} | ({"lfs": lfs} if lfs else {})

    def resolve(self, hub: FakeHub, name: str, revision: str, file: str) -> None:
        repo = self.repo(hub, name, revision, hub.gated)
        if repo is None:
            return None
        data = repo.files.get(file)
        if data is None:
            return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        commit = {"X-Repo-Commit": repo.commit}
        if not file.endswith(hub.lfs):
            return self.send(hub, self.path, data, f'"{git_sha1(data)}"', **commit)
        prefix = f"/as/{self.logged.client}" if self.logged.client else ""
        location = f"http://localhost:{hub.port}{prefix}/lfs/{name}/{file}?Signature=secret"
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"'}
        return self.answer(302, b"", Location=location, **linked, **commit)

    def send(self, hub: FakeHub, path: str, data: bytes, etag: str, **headers: str) -> None:
        """A file, or the range of it that was asked for."""
        if hub.fault(path, ("etag",)):
            etag = '"another"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if hub.fault(path, ("ignore-range",)) or self.headers.get("If-Range", etag) != etag:
            asked = None
        headers |= {"Accept-Ranges": "bytes"} | ({"ETag": etag} if etag else {})
        if hub.fault(path, ("gzip",)):
            headers["Content-Encoding"] = "gzip"
        if hub.fault(path, ("page",)):
            headers["Content-Type"] = "text/html; charset=utf-8"
        if asked is None:
            return self.body(hub, path, 200, data, headers)
        begin, end = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if begin >= len(data):
            return self.answer(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
        size = len(data) + (hub.fault(path, ("size",)) is not None)
        shift = hub.fault(path, ("shifted",)) is not None
        headers["Content-Range"] = f"bytes {begin + shift}-{end - 1 + shift}/{size}"
        return self.body(hub, path, 206, data[begin:end], headers)

    def body(self, hub: FakeHub, path: str, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        if hub.fault(path, ("corrupt",)):
            data = data[:-1] + bytes([data[-1] ^ 1])
        if hub.fault(path, ("long",)):
            data += bytes(len(data) + CHUNK)
        fault = hub.fault(path, ("short", "reset", "stall", "slow"))
        self.start(status, len(data), headers)
        if fault is None:
            self.write(data)
        elif fault.kind == "slow":
            for at in range(0, len(data), CHUNK):
                self.write(data[at : at + CHUNK])
                time.sleep(fault.seconds)
        else:
            self.write(data[: fault.after])
            self.interrupt(hub, fault, data)

    def interrupt(self, hub: FakeHub, fault: Fault, data: bytes) -> None:
        if fault.kind == "stall":
            hub.stalled.set()
            hub.release.wait(60)
            return self.write(data[fault.after :])
        self.close_connection = True
        if fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.start(status, len(data), headers)
        self.write(data)

    def start(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.logged.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def write(self, data: bytes) -> None:
        if self.command == "GET":
            for at in range(0, len(data), CHUNK):
                self.logged.sent += len(data[at : at + CHUNK])  # before: the client may look as soon as it has them
                self.wfile.write(data[at : at + CHUNK])


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve FOLDER/<owner>/<name> as repositories of a Hub on 127.0.0.1.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    repos = {f"{p.parent.name}/{p.name}": p for p in sorted(options.folder.glob("*/*")) if p.is_dir()}
    with FakeHub(repos, port=options.port) as hub:
        print(f"HF_ENDPOINT={hub.url}  ({', '.join(repos) or 'no repositories'})", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
