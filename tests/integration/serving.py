"""`pp serve` as a child process, and what a test asks of it over HTTP."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import redis

from pptasks.keys import Keys
from pptasks.members import Member, read_member
from tests.integration.run import LONG_S, Command, Ended, bound

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": [36, 37],
    "max_tokens": 3900,
}  # takes the golden model seconds, and meets no stop token
KEY, PAGE = "sk-of-the-tests", "https://chat.example.org"  # of the server that asks for a key
IDLE = {"live": 0, "waiting": 0, "in_flight": 0}


class Served(Command):
    """A `pp serve` that is ready, on a free port. A context manager, as Command."""

    def __init__(self, folder: Path, *argv: str, **environ: str):
        super().__init__(folder, "serve", "--port", "0", "--json", *argv, **environ)
        self.timeout = httpx.Timeout(LONG_S)
        said = self._announced()
        self.url, self.model = said["url"], said["model"]
        self.http = httpx.Client(base_url=self.url, timeout=self.timeout)

    def _announced(self) -> dict[str, str]:
        line = self.process.stdout.readline() if self.process.stdout else b""
        if not line:
            super().__exit__()
            pytest.fail(f"it ended before it served: {self.stderr}")
        return json.loads(line)

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        super().__exit__(*exc)

    def stop(self) -> Ended:
        """Ctrl-C. Asserts that nothing is left that listens."""
        ports = self.ports()
        self.signal(signal.SIGINT)
        ended = self.wait()
        assert bound(ports) == set()
        return ended

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.model} | fields, headers=headers)

    def text(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion, greedy unless `fields` say otherwise."""
        return answered(self.post("/v1/completions", prompt=prompt, **{"temperature": 0} | fields))

    def chat(self, content: Any, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return answered(self.post("/v1/chat/completions", messages=messages, **{"temperature": 0} | fields))

    @contextmanager
    def stream(self, path: str, **fields: Any) -> Iterator[Iterator[Any]]:
        """The events of a stream: JSON, and "[DONE]"."""
        body = {"model": self.model, "stream": True, "temperature": 0} | fields
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            yield events(response)

    @contextmanager
    def broker(self) -> Iterator[tuple[redis.Redis, Keys]]:
        """Of the pipeline behind it."""
        environ = self.wait_for_worker()
        with redis.Redis.from_url(environ["PP_BROKER"]) as client:
            yield client, Keys(environ["PP_RUN"])

    def head(self) -> Member:
        """What stage 0 says of itself; renewed every second."""
        with self.broker() as (client, keys):
            member = read_member(client, keys, 0)
            assert member is not None
            return member

    def head_after(self, moment: Callable[[Member], bool], what: str) -> Member:
        """What it says as soon as that holds."""
        found: list[Member] = []

        def holds() -> bool:
            found.append(self.head())
            return moment(found[-1])

        self.wait_for(holds, what)
        return found[-1]

    def wait_until_idle(self) -> Member:
        """Until the head holds no request, in what it said after now."""
        before = self.head().at_us
        return self.head_after(lambda m: m.at_us > before and {n: getattr(m, n) for n in IDLE} == IDLE, "it is idle")


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def told(response: httpx.Response) -> dict[str, Any]:
    """The error that a response is."""
    assert response.status_code >= 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class Timed:
    """A context manager: how long the block took."""

    def __enter__(self) -> "Timed":
        self._began, self.seconds = time.monotonic(), 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._began
