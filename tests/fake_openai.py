"""A server that speaks as much of OpenAI's API as a load test uses, over real HTTP, with scripted faults.

    with FakeOpenAI(tokens=8, first_s=0.05, each_s=0.01) as server:
        ... server.url, server.asked ...

Every word of a prompt is a token, and the template has OVERHEAD more. `lanes`: answers at once; more get a 429. `fault`
is what is wrong with each answer after the first `whole` ones: cut, garbage, endless, error, silent.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

OVERHEAD = 5
MODEL = "fake-1b"


class FakeOpenAI:
    def __init__(
        self, *, tokens: int = 8, first_s: float = 0.05, each_s: float = 0.01, lanes: int = 1000, key: str = "",
        fault: str = "", whole: int = 0, model: str = MODEL,
    ):  # fmt: skip
        self.tokens, self.first_s, self.each_s = tokens, first_s, each_s
        self.key, self.fault, self.whole, self.model = key, fault, whole, model
        self.lanes = threading.Semaphore(lanes)
        self.asked: list[dict[str, Any]] = []
        self.came_at: list[float] = []  # time.monotonic() of each
        self.ending = threading.Event()
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "FakeOpenAI":
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # whoever asked may go at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeOpenAI
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": self.server_of.model, "object": "model"}]}
        self._whole(200 if self.path == "/v1/models" else 404, models)

    def do_POST(self) -> None:
        fake, body = self.server_of, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.asked.append(body)
        fake.came_at.append(time.monotonic())
        if fake.key and self.headers["Authorization"] != f"Bearer {fake.key}":
            self._whole(401, {"error": {"message": "no such key."}})
        elif not fake.lanes.acquire(blocking=False):
            self._whole(429, {"error": {"message": "busy"}})
        else:
            with suppress(OSError):  # whoever asked has gone
                self._stream(body)
            fake.lanes.release()

    def _whole(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        fake = self.server_of
        fault = fake.fault if len(fake.asked) > fake.whole else ""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant"}}]})
        n = min(fake.tokens, body["max_tokens"])
        for i in range(n):
            fake.ending.wait(fake.each_s if i else fake.first_s)
            self._event({"choices": [{"delta": {"content": f" {i}"}}], "usage": None})
            if fault and self._went_wrong(fault):
                return
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        prompt = len(body["messages"][0]["content"].split()) + OVERHEAD
        self._event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": n}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _went_wrong(self, fault: str) -> bool:
        if fault == "garbage":
            self.wfile.write(b'data: {"choices": 7}\n\n')
        elif fault == "error":
            self._event({"error": {"message": "a stage was lost", "type": "server_error"}})
        elif fault == "silent":
            self.server_of.ending.wait(30)
        elif fault == "endless":
            self.wfile.write(b"data: ")
            while not self.server_of.ending.is_set():
                self.wfile.write(b"x" * 65536)
        return True
