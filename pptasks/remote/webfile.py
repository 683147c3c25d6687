"""One file on a web server, read by byte ranges, with patience and without trust.

A range is asked for with a plain GET; redirects are followed here, so that what authorizes us at one host is never
shown to another. Where they lead (a link of a content network, signed, good for an hour) is kept in memory for the next
range. What a server says is checked before a byte of it is used: status, range, size, validator. An answer that breaks
off is continued from there; 408, 425, 429, 5xx and network errors are tried again, with growing waits or after
`Retry-After`, until no byte has come for `Patience.total_s`.

Messages name the file, never a URL that may hold a signature.
"""

import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import httpx

from pptasks.errors import ConfigError, DownloadError, ModelNotFound, NeedsToken
from pptasks.spec import is_loopback

MAX_REDIRECTS = 8
MAX_FILE = 1 << 42  # bytes; no model file comes near
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_RETRIED = frozenset((408, 425, 429))
_EXPIRED = frozenset((401, 403, 404, 410))  # from a kept link: it may only be too old


@dataclass(frozen=True)
class Patience:
    """How long a server may keep us waiting, in seconds."""

    total_s: float = 60.0  # without one byte
    first_s: float = 0.5  # before the second try
    most_s: float = 15.0  # between two tries
    connect_s: float = 10.0
    silence_s: float = 20.0  # in the middle of an answer


class Transient(Exception):
    """This try failed, the next may not. `wait_s`: what the server asks for, None if it does not say."""

    def __init__(self, message: str, wait_s: float | None = None):
        super().__init__(message)
        self.wait_s = wait_s


class Tries:
    """The tries of one piece of work: `again` waits before the next, or gives up."""

    def __init__(self, name: str, patience: Patience, stopped: threading.Event):
        self._name, self._patience, self._stopped = name, patience, stopped
        self.renew()

    def renew(self) -> None:
        """Bytes came: start counting anew."""
        self._deadline = time.monotonic() + self._patience.total_s
        self._wait = self._patience.first_s

    def again(self, cause: Exception) -> None:
        """Wait. DownloadError, which tells the cause: patience is exhausted, or the work was stopped meanwhile."""
        asked = getattr(cause, "wait_s", None)
        wait = self._wait * random.uniform(0.75, 1.25) if asked is None else asked
        self._wait = min(2 * self._wait, self._patience.most_s)
        if time.monotonic() + wait > self._deadline:
            reason = str(cause) or type(cause).__name__
            asked_for = f"; the server asks for a pause of {wait:.0f} s" if asked else ""
            raise DownloadError(f"{self._name}: {reason}{asked_for}; try again later: what is here is kept") from cause
        if self._stopped.wait(wait):
            raise DownloadError(f"{self._name}: stopped") from cause


@contextmanager
def web_client(patience: Patience) -> Iterator[httpx.Client]:
    """The connections of one piece of work. Proxies are the environment's."""
    timeout = httpx.Timeout(patience.silence_s, connect=patience.connect_s)
    with httpx.Client(timeout=timeout, headers={"User-Agent": "pptasks", "Accept-Encoding": "identity"}) as client:
        yield client


@dataclass(frozen=True)
class Access:
    """Who we are to one server: nobody, or the owner of a token that this server alone sees."""

    endpoint: str  # URL without a password
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.endpoint)
        except httpx.InvalidURL:
            raise ConfigError("HF_ENDPOINT is no URL") from None
        if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
            raise ConfigError("HF_ENDPOINT is not http(s)://host[:port][/path], without a user, a password or a query")
        if not all("!" <= letter <= "~" for letter in self.token):  # an HTTP library would repeat it in its error
            raise NeedsToken("the token for the Hub (HF_TOKEN) holds a character that no token has; copy it again")

    def knows(self, url: httpx.URL) -> bool:
        """Whether `url` is on this server: scheme, host and port."""
        home = httpx.URL(self.endpoint)
        return (url.scheme, url.host, url.port) == (home.scheme, home.host, home.port)

    def headers(self, url: httpx.URL) -> dict[str, str]:
        """What authorizes us at `url`: nothing at another server, nor over a line that others can read."""
        private = url.scheme == "https" or is_loopback(url.host)
        return {"Authorization": f"Bearer {self.token}"} if self.token and private and self.knows(url) else {}


@dataclass
class WebFile:
    """A file of a known size behind a URL."""

    url: str
    name: str  # for messages
    size: int  # bytes
    access: Access
    patience: Patience
    remedy: str  # what to do when access is refused; "" where no token helps
    etag: str = ""  # a strong validator that every answer must carry; "" if the content is checked otherwise
    _location: httpx.URL | None = None  # where the redirects led

    def read(self, client: httpx.Client, begin: int, end: int, stopped: threading.Event) -> Iterator[bytes]:
        """The bytes [begin, end), in pieces as they come; exactly these or an error, whatever happens on the way.

        ModelNotFound: it is gone. NeedsToken: access is refused. DownloadError: it changed, the server cannot serve
        ranges, patience is exhausted, or `stopped` was set during a wait.
        """
        tries = Tries(self.name, self.patience, stopped)
        while begin < end:
            try:
                for piece in self._get(client, begin, end):
                    begin += len(piece)
                    tries.renew()
                    yield piece
                if begin < end:
                    raise Transient("the answer ended early")
            except (Transient, httpx.TransportError) as e:
                self._location = None  # another try may be led to another host
                tries.again(e)

    def probe(self, client: httpx.Client, stopped: threading.Event) -> tuple[int, str, str]:
        """(size, ETag, Last-Modified) as the server says, "" for a text that it does not give. Errors as of `read`.

        One byte is asked for, not the head of an answer: a signed URL may be good for GET alone.
        """
        tries = Tries(self.name, self.patience, stopped)
        while True:
            try:
                with self._open(client, {"Range": "bytes=0-0"}) as response:
                    if response.status_code == 200:
                        raise self._no_ranges()
                    if response.status_code != 206:
                        self._refused(response)
                    size = self._content_range(response)[2]
                    if size > MAX_FILE:
                        raise DownloadError(f"{self.name}: claims {size} bytes; the limit is {MAX_FILE}")
                    return size, response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
            except (Transient, httpx.TransportError) as e:
                tries.again(e)

    def _get(self, client: httpx.Client, begin: int, end: int) -> Iterator[bytes]:
        """One try: a beginning of [begin, end), nothing beyond it."""
        headers = {"Range": f"bytes={begin}-{end - 1}"} | ({"If-Range": self.etag} if self.etag else {})
        with self._open(client, headers) as response:
            self._check(response, begin, end)
            for piece in response.iter_raw():
                if len(piece) > end - begin:  # an answer that is longer than was asked for
                    yield piece[: end - begin]
                    return
                begin += len(piece)
                yield piece

    @contextmanager
    def _open(self, client: httpx.Client, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer after the redirects, whatever its status."""
        kept = self._location
        url = kept or httpx.URL(self.url)
        for _ in range(MAX_REDIRECTS):
            request = client.build_request("GET", url, headers={**headers, **self.access.headers(url)})
            response = client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    if kept is not None and response.status_code in _EXPIRED:
                        self._location = None
                        raise Transient(f"status {response.status_code}", wait_s=0)
                    self._location = None if url == httpx.URL(self.url) else url
                    yield response
                    return
                url = self._redirected(url, response.headers["Location"])
            finally:
                response.close()
        raise DownloadError(f"{self.name}: more than {MAX_REDIRECTS} redirects")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = url.join(location)
        except httpx.InvalidURL:
            raise DownloadError(f"{self.name}: the server redirects to a malformed URL") from None
        port = target.port or 443
        if target.scheme not in ("https", url.scheme) or not target.host or target.userinfo or port > 65535:
            raise DownloadError(
                f"{self.name}: the server redirects to {target.scheme}://{target.host}, which is refused"
            )
        return target

    def _check(self, response: httpx.Response, begin: int, end: int) -> None:
        """That `response` is the range [begin, end), or a beginning of it, of the file that we know."""
        if response.status_code not in (200, 206):
            self._refused(response)
        whole = response.status_code == 200
        first, last, size = (0, self.size - 1, _content_length(response)) if whole else self._content_range(response)
        if size not in (self.size, None) or (self.etag and response.headers.get("ETag") != self.etag):
            raise DownloadError(f"{self.name}: changed on the server since it was opened; start again")
        if whole and (begin, end) != (0, self.size):
            raise self._no_ranges()
        if first != begin or not first <= last < self.size:
            raise DownloadError(f"{self.name}: the server sends another range than was asked for")

    def _content_range(self, response: httpx.Response) -> tuple[int, int, int]:
        """(first byte, last byte, size of the file) that a 206 claims to be."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise DownloadError(f"{self.name}: the server sends a range without saying which")
        return int(match[1]), int(match[2]), int(match[3])

    def _no_ranges(self) -> DownloadError:
        remedy = "download it whole by other means and give its path"
        return DownloadError(f"{self.name}: the server cannot serve ranges of a file; {remedy}")

    def _refused(self, response: httpx.Response) -> None:
        """Raise what a status other than 200 and 206 means."""
        status = response.status_code
        if status in _RETRIED or status >= 500:
            raise Transient(f"the server answers with status {status}", retry_after(response.headers))
        if status == 416:
            raise DownloadError(f"{self.name}: changed on the server, it is shorter now; start again")
        if status in (404, 410):
            raise ModelNotFound(f"{self.name}: the server has no such file")
        if status in (401, 403) and self.remedy and self.access.knows(response.url):
            raise NeedsToken(f"{self.name}: access is refused ({status}); {self.remedy}")
        raise DownloadError(f"{self.name}: the server answers with status {status}")


def _content_length(response: httpx.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if value.isdigit() else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait for (RFC 9110, 10.2.3), or None."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit() and len(value) < 9:
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
