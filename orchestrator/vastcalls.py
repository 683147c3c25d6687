"""Single calls of the vast.ai API: paced, repeated where that is safe, bounded in size and time.

The key goes into one header of calls to the API and nowhere else: not into a URL, a message or a log. What a server
says is shown only after `Scrubber` has been over it, since a server may echo what it was sent.
"""

import json
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
from filelock import BaseFileLock, FileLock

from pptasks.errors import BadKey, ConfigError, NoAnswer, ProviderError
from pptasks.remote.webfile import retry_after
from pptasks.shown import plain
from pptasks.spec import is_loopback

MAX_ANSWER = 4 << 20  # bytes; 64 offers are about 200 kB
MAX_LOG = 64 << 20
MAX_MESSAGE = 240  # characters of a server's text in ours
PATIENCE_S = 90.0  # no new try after it
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 16.0  # between two tries, unless the server says
OTHERS_S = 30.0  # for another process to end its call
ANSWER_S = 60.0  # for one whole answer, however slowly it drips
TIMEOUT = httpx.Timeout(20.0, connect=10.0)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_GRAM = 8  # so many characters of a secret in a row are not shown
_SECRET = re.compile(r"(?=[A-Za-z_-]{0,99}[0-9])[A-Za-z0-9_-]{24,}")  # keys, digests, tickets, passwords look like this


log = logging.getLogger(__name__)


class Pacer:
    """Least time between two calls of a kind, over all threads, and over all processes with the same `folder`.

    A call begins only when the one before it of its kind has ended and `gaps_s[kind]` has passed since. So the server
    sees at least that gap too, whatever the network did to either.
    """

    def __init__(
        self,
        gaps_s: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        folder: Path | None = None,
    ):
        self.clock, self.sleep, self._folder = clock, sleep, folder
        self._gaps = dict(gaps_s)
        self._locks = {kind: threading.Lock() for kind in gaps_s}
        self._not_before: dict[str, float] = defaultdict(float)

    @contextmanager
    def turn(self, kind: str) -> Iterator[None]:
        """Wait for the turn of a call; the block is the call."""
        with self._locks[kind], self._alone(kind):
            while (wait := self._not_before[kind] - self.clock()) > 0:
                self.sleep(wait)
            try:
                yield
            finally:
                self.postpone(kind, self._gaps[kind])

    @contextmanager
    def _alone(self, kind: str) -> Iterator[None]:
        """Among processes. How long ago another's last call ended, a file's time tells."""
        lock = self._lock_of_all(kind)
        try:
            yield
        finally:
            if lock is not None:
                with suppress(OSError):
                    last = self._last(kind)
                    last.touch(mode=0o600)
                    os.utime(last, ns=(time.time_ns(),) * 2)  # as its own clock is coarse
                lock.release()

    def _lock_of_all(self, kind: str) -> BaseFileLock | None:
        """None, and we keep our own pace, where the disk fails, or another process has stopped within its call."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(self._folder / f"{kind}.lock", mode=0o600)
            lock.acquire(timeout=OTHERS_S)
        except OSError as error:  # a Timeout is one
            log.warning("the pace of %s is this process's own: %s", kind, error)
            return None
        with suppress(OSError):  # of a clock that was set, no more than the gap
            ended = self._last(kind).stat().st_mtime
            self.postpone(kind, min(self._gaps[kind], ended + self._gaps[kind] - time.time()))
        return lock

    def _last(self, kind: str) -> Path:
        """Its time is when the last call of any process ended."""
        return (self._folder or Path()) / f"{kind}.last"

    def postpone(self, kind: str, seconds: float) -> None:
        """No call of this kind for some time. To be called within a turn."""
        self._not_before[kind] = max(self._not_before[kind], self.clock() + seconds)


class Scrubber:
    """Hides what it knows to be secret, also cut short or in another case."""

    def __init__(self, key: str):
        self._grams: frozenset[str] = frozenset()
        self.add([key, quote(key, safe="")])

    def add(self, secrets: Iterable[str]) -> None:
        found = {s.lower()[i : i + _GRAM] for s in secrets for i in range(max(1, len(s) - _GRAM + 1))}
        self._grams |= found - {""}

    def add_environment(self, env: Mapping[str, str]) -> None:
        """Whatever in it looks like a secret."""
        self.add(match for value in env.values() for match in _SECRET.findall(value))

    def log(self, text: str) -> str:
        """`text` without what we know to be secret, and without what a terminal would obey."""
        lower = text.lower()
        if len(lower) != len(text):  # a letter whose lower case is longer
            text = lower
        hidden = bytearray(len(text))
        sizes = {len(gram) for gram in self._grams}
        for size in sizes:
            for i in range(len(text) - size + 1):
                if lower[i : i + size] in self._grams:
                    hidden[i : i + size] = b"\1" * size
        shown = "".join("\0" if secret else letter for letter, secret in zip(text, hidden, strict=True))
        return plain(re.sub("\0+", "***", shown))

    def message(self, text: str) -> str:
        """One short line for an error: also without what only looks like a secret."""
        shown = " ".join(_SECRET.sub("***", self.log(text[: 4 * MAX_MESSAGE])).split())
        return shown if len(shown) <= MAX_MESSAGE else shown[:MAX_MESSAGE] + "..."


@dataclass(frozen=True)
class Answer:
    """status, and the body as text and as JSON; `fields` is empty unless that is an object."""

    status: int
    text: str = field(repr=False)
    fields: Mapping[str, object] = field(repr=False)
    wait_s: float | None = None  # what Retry-After asks for

    @property
    def ok(self) -> bool:
        """The server says that it did what was asked."""
        return 200 <= self.status < 300 and self.fields.get("success", True) is not False


class Calls:
    """The API at `url`, as the owner of `key`. Raises BadKey for a key that no header can carry."""

    def __init__(self, key: str, url: str, pacer: Pacer, transport: httpx.BaseTransport | None = None):
        if not key or not all("!" <= letter <= "~" for letter in key):  # an HTTP library would repeat it in its error
            raise BadKey("the vast.ai key is empty or holds a character that no key has; copy it again (VAST_API_KEY)")
        if not is_private(url):
            raise ConfigError("the URL of the vast.ai API must be https://, or http:// to this machine")
        self._key, self._url, self.pacer = key, url.rstrip("/"), pacer
        self.scrubber = Scrubber(key)
        for name in ("httpx", "httpcore"):  # at lower levels they log the headers of answers, and signed URLs
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = httpx.Client(
            transport=transport, timeout=TIMEOUT, headers={"User-Agent": "pptasks", "Accept-Encoding": "identity"}
        )

    def __repr__(self) -> str:
        return f"Calls({self._url})"

    def close(self) -> None:
        self._client.close()

    def call(
        self,
        kind: str,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> Answer:
        """The API's answer, whatever it says but for 429 and 5xx, after which the call is repeated, as after errors of
        the network; with `once` only if the call surely had no effect. BadKey: 401 or 403. NoAnswer: patience is over.
        """
        deadline, wait = self.pacer.clock() + PATIENCE_S, FIRST_WAIT_S
        while True:
            try:
                with self.pacer.turn(kind):
                    answer = self._send(method, path, body, params)
                    pause = wait if answer.wait_s is None else answer.wait_s
                    if answer.status == 429:
                        self.pacer.postpone(kind, min(pause, PATIENCE_S))
                if answer.fields.get("new_contract") or "no_such_ask" in answer.text:  # final, whatever the status
                    return answer
                if answer.status in (401, 403):
                    raise BadKey(
                        f"vast.ai refuses the key for {kind} ({answer.status}: {self.said(answer)}): check VAST_API_KEY"
                        " and what it permits"
                    )
                if answer.status != 429 and answer.status < 500:
                    return answer
                why, repeat = f"{answer.status}: {self.said(answer)}", answer.status == 429 or not once
            except httpx.TransportError as e:  # its text may hold what the server sent
                why, repeat, pause = type(e).__name__, isinstance(e, _NOT_SENT) or not once, wait
            if not repeat or self.pacer.clock() + pause > deadline:
                asked = f", and asks for a pause of {pause:.0f} s" if pause > MOST_WAIT_S else ""
                raise NoAnswer(f"vast.ai did not answer {kind} ({why}{asked}); try again later")
            self.pacer.sleep(pause)  # not in the turn: others may have theirs
            wait = min(2 * wait, MOST_WAIT_S)

    def fetch(self, url: str, keep: int) -> bytes | None:
        """The last `keep` bytes at a URL that the API named, without our key; None while it is not there.

        ProviderError: a URL that is not https:// to somewhere, or http:// to this machine, or that holds a secret.
        """
        if not is_private(url) or self.scrubber.log(url) != url:
            raise ProviderError("vast.ai names a place for the logs that is not https://, or shows our key; refused")
        tail = b""
        try:
            with self._client.stream("GET", url) as response:
                for piece in self._pieces(response, MAX_LOG):
                    tail = (tail + piece)[-keep:]
                return tail if response.status_code == 200 else None
        except httpx.TransportError:
            return None

    def said(self, answer: Answer) -> str:
        """What an answer tells, fit to be shown."""
        told = [str(answer.fields[name]) for name in ("error", "msg", "detail") if answer.fields.get(name)]
        return self.scrubber.message(", ".join(told) or answer.text) or "no reason given"

    def _send(self, method: str, path: str, body: object, params: Mapping[str, str] | None) -> Answer:
        request = self._client.build_request(
            method, self._url + path, json=body, params=params, headers={"Authorization": f"Bearer {self._key}"}
        )
        response = self._client.send(request, stream=True)
        try:
            data = b"".join(self._pieces(response, MAX_ANSWER))
            return Answer(response.status_code, *_read(data), retry_after(response.headers))
        finally:
            response.close()

    def _pieces(self, response: httpx.Response, limit: int) -> Iterator[bytes]:
        """The body. NoAnswer if it is longer than `limit`; a TransportError if it does not end."""
        deadline, size = self.pacer.clock() + ANSWER_S, 0
        for piece in response.iter_raw():
            size += len(piece)
            if size > limit:
                raise NoAnswer(f"vast.ai sends more than {limit} bytes, which is refused; try again later")
            if self.pacer.clock() > deadline:
                raise httpx.ReadTimeout("")
            yield piece


def is_private(url: str) -> bool:
    """Whether nobody on the way can read what goes to `url`."""
    try:
        parsed = httpx.URL(url)
        return (
            bool(parsed.host)
            and not parsed.userinfo
            and (parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host)))
        )
    except (httpx.InvalidURL, TypeError):
        return False


def _read(data: bytes) -> tuple[str, Mapping[str, object]]:
    text = data.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return text, value if isinstance(value, dict) else {}
