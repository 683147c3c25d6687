"""The fake's HTTP: routes, the key, limits, faults, the log."""

import json
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from tests.fake_vast.faults import Fault, Refused

if TYPE_CHECKING:
    from tests.fake_vast.fake import FakeVast

_ROUTES = [
    ("search", "POST", r"/api/v0/bundles/"),
    ("create", "PUT", r"/api/v0/asks/(\d+)/"),
    ("show", "GET", r"/api/v0/instances/(\d+)/"),
    ("destroy", "DELETE", r"/api/v0/instances/(\d+)/"),
    ("logs", "PUT", r"/api/v0/instances/request_logs/(\d+)/"),
    ("list", "GET", r"/api/v1/instances/"),
    ("old list", "GET", r"/api/v0/instances/"),
    ("result", "GET", r"/results/([\w-]+)"),
]


@dataclass
class Request:
    """Logged when it comes; status 0: not answered."""

    kind: str
    method: str
    path: str
    host: str  # the Host header, without port
    authorization: str
    body: object
    at: float  # monotonic
    status: int = 0


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fake: "FakeVast", port: int):
        super().__init__(("127.0.0.1", port), _Handler)
        self.fake, self.stopped = fake, threading.Event()
        self._connections: list[socket.socket] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def run(self) -> None:
        self.serve_forever(0.05)

    def stop(self) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()
        for connection in self._connections:  # those that clients keep open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:  # a client that went away
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        fake, path = self.server.fake, urlsplit(self.path).path
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(data) if data else None
        except ValueError:
            body = None
        kind, argument = self.route(path)
        self.logged = Request(
            kind,
            self.command,
            self.path,
            self.headers.get("Host", "").rsplit(":", 1)[0],
            self.headers.get("Authorization", ""),
            body,
            time.monotonic(),
        )
        with fake.lock:
            fake.log.append(self.logged)
            too_fast = fake.limits.is_too_fast(kind, self.logged.at)
        if too_fast:
            return self.answer(429, "API requests too frequent")
        fault = fake.fault(kind, self.path)
        if fault is None or fault.takes_effect or (fault.status is None and not fault.drop):
            status, answer = self.outcome(fake, kind, argument, body)
        else:
            status, answer = 200, {}
        if fault is None:
            return self.answer(status, answer)
        return self.fail(fault, status, answer)

    do_POST = do_PUT = do_DELETE = do_GET

    def route(self, path: str) -> tuple[str, str]:
        for kind, method, pattern in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                return kind, match[1] if match.groups() else ""
        return "", ""

    def outcome(self, fake: "FakeVast", kind: str, argument: str, body: object) -> tuple[int, object]:
        if kind == "result":
            text = fake.result(argument)
            return (404, "not yet") if text is None else (200, text)
        if self.logged.authorization != f"Bearer {fake.key}":
            return 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        try:
            if kind == "search":
                return 200, fake.search(body)
            if kind == "create":
                return 200, fake.create(argument, body)
            if kind == "show":
                return 200, fake.show(argument)
            if kind == "list":
                return 200, fake.list(query.get("limit", "25"), query.get("after_token", ""))
            if kind == "destroy":
                return 200, fake.destroy(argument)
            if kind == "logs":
                return 200, fake.request_logs(argument, body)
        except Refused as refused:
            return refused.status, refused.body
        if kind == "old list":
            return 410, {"success": False, "error": "deprecated_endpoint", "msg": "use /api/v1/instances/"}
        return 404, "<html>404 Not Found</html>"

    def fail(self, fault: Fault, status: int, answer: object) -> None:
        self.server.stopped.wait(fault.seconds)
        if fault.drop:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        body = answer if fault.body is None else fault.body
        return self.answer(fault.status or status, body, **fault.headers)

    def answer(self, status: int, body: object, **headers: str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.logged.status = status
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
