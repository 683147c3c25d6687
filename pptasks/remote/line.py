"""The connections of one piece of work: where redirects may lead, who sees the token, how long we wait, and the end.

Redirects are followed here, so that what authorizes us at one host is never shown to another. 408, 425, 429, 5xx and
network errors are tried again, with growing waits or after `Retry-After`, until no byte has come for
`Patience.total_s`; a server that has not answered once gets less. Who waits for long is told so, once.

`Line.stop` ends it all from another thread: a thread that waits for bytes gets an error at once.
"""

import logging
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any
from weakref import WeakSet

import httpx

from pptasks.errors import ConfigError, DownloadError, NeedsToken
from pptasks.spec import is_loopback

MAX_REDIRECTS = 8
HOPELESS_S = 3.0  # for what hardly changes by waiting: a name that does not resolve, a certificate that does not hold
_RETRIED = frozenset((408, 425, 429))
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a server may keep us waiting, in seconds."""

    total_s: float = 60.0  # without one byte
    reach_s: float = 8.0  # for a connection to a host that has not answered yet
    first_s: float = 0.5  # before the second try
    most_s: float = 15.0  # between two tries
    connect_s: float = 5.0
    silence_s: float = 20.0  # in the middle of an answer


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


class Transient(Exception):
    """This try failed, the next may not. `wait_s`: what the server asks for, None if it does not say."""

    def __init__(self, message: str, wait_s: float | None = None):
        super().__init__(message)
        self.wait_s = wait_s


class Line:
    """A context manager. Threads may share it. ConfigError: the environment's proxies or certificates are none."""

    def __init__(self, patience: Patience):
        self.patience = patience
        self.stopped = threading.Event()
        self.received = False  # whether a byte of a file has come
        self._reached: set[bytes] = set()  # the hosts (and ports) that have answered
        self._warned = False
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()
        self._http = _http_client(patience)

    def __enter__(self) -> "Line":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def stop(self) -> None:
        """End all requests, also those that wait for bytes, and every later one."""
        self.stopped.set()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _hang_up(each)

    @contextmanager
    def get(self, url: httpx.URL, name: str, headers: Mapping[str, str], access: Access) -> Iterator[httpx.Response]:
        """The answer after the redirects, its body to be read by `iter_raw`. `name`: for messages.

        Transient or httpx.TransportError: to be tried again. DownloadError: it leads or looks where it may not.
        """
        for _ in range(MAX_REDIRECTS):
            request = self._http.build_request(
                "GET", url, headers={**headers, **access.headers(url)}, extensions={"trace": self._trace}
            )
            response = self._send(request, name)
            try:
                if not response.has_redirect_location:
                    _check_answer(response, name)
                    yield response
                    return
                url = redirected(url, response.headers["Location"], name)
            finally:
                response.close()
        raise DownloadError(f"{name}: more than {MAX_REDIRECTS} redirects")

    def has_reached(self, url: httpx.URL) -> bool:
        """Whether this URL's server has answered once."""
        return url.netloc in self._reached

    def warn(self, message: str) -> None:
        """Once for this piece of work."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            log.warning("%s", message)

    def _send(self, request: httpx.Request, name: str) -> httpx.Response:
        try:
            response = self._http.send(request, stream=True)
        except httpx.RemoteProtocolError as e:
            if any(isinstance(cause, httpx.InvalidURL) for cause in _causes(e)):
                raise _malformed_redirect(name) from None
            raise
        self._reached.add(request.url.netloc)
        return response

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """What httpcore tells about each step of a request: here we learn of the sockets."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            connected = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(connected)
            if self.stopped.is_set():
                _hang_up(connected)


class Tries:
    """The tries of one piece of work: `again` waits before the next, or gives up."""

    def __init__(self, line: Line, name: str):
        self._line, self._name = line, name
        self.renew()

    def renew(self) -> None:
        """Bytes came: start counting anew."""
        self._start = time.monotonic()
        self._wait = self._line.patience.first_s

    def again(self, cause: Exception) -> None:
        """Wait. DownloadError, which tells the cause: patience is exhausted, or the line was stopped meanwhile."""
        line, patience = self._line, self._line.patience
        asked = getattr(cause, "wait_s", None)
        wait = self._wait * random.uniform(0.75, 1.25) if asked is None else max(asked, patience.first_s)
        self._wait = min(2 * self._wait, patience.most_s)
        reason = str(cause) or type(cause).__name__
        host, limit = "", patience.total_s
        if isinstance(cause, _UNREACHED) and not line.has_reached(cause.request.url):
            host = cause.request.url.host
            limit = min(limit, HOPELESS_S if _is_hopeless(cause) else patience.reach_s)
        since = time.monotonic() - self._start
        if line.stopped.is_set():
            raise DownloadError(f"{self._name}: stopped") from cause
        if since + wait > limit:
            if host:
                check = "check the address and the network"
                raise DownloadError(f"{self._name}: {host} cannot be reached ({reason}); {check}") from cause
            asked_for = f"; the server asks for a pause of {wait:.0f} s" if asked else ""
            kept = ": what is here is kept" if line.received else ""
            raise DownloadError(f"{self._name}: {reason}{asked_for}; try again later{kept}") from cause
        if host or since > 2 * patience.first_s:
            what = f"cannot reach {host} ({reason})" if host else f"{self._name}: {reason}"
            line.warn(f"{what}; trying again for {limit - since:.0f} s")
        if line.stopped.wait(wait):
            raise DownloadError(f"{self._name}: stopped") from cause


def redirected(url: httpx.URL, location: str, name: str) -> httpx.URL:
    """Where an answer of `url` leads. DownloadError: where it may not, which is anything but https; but http may lead
    to the same host, and from this machine to this machine."""
    try:
        target = url.join(location)
    except httpx.InvalidURL:
        raise _malformed_redirect(name) from None
    local = is_loopback(url.host) and is_loopback(target.host)
    plain = target.scheme == url.scheme == "http" and (local or target.host == url.host)
    if not (target.scheme == "https" or plain) or not target.host or target.userinfo or (target.port or 443) > 65535:
        raise DownloadError(f"{name}: the server redirects to {target.scheme}://{target.host}, which is refused")
    return target


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait for (RFC 9110, 10.2.3), or None."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]{1,8}", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _http_client(patience: Patience) -> httpx.Client:
    timeout = httpx.Timeout(patience.silence_s, connect=patience.connect_s)
    try:
        return httpx.Client(timeout=timeout, headers={"User-Agent": "pptasks", "Accept-Encoding": "identity"})
    except ImportError:
        raise ConfigError("ALL_PROXY or HTTPS_PROXY names a SOCKS proxy: pip install socksio, or unset it") from None
    except (httpx.InvalidURL, ValueError):  # not repeated: it may hold a password
        raise ConfigError("HTTP_PROXY, HTTPS_PROXY or ALL_PROXY is no proxy's URL: give http://host:port") from None
    except OSError as e:
        reason = e.strerror or e
        raise ConfigError(f"SSL_CERT_FILE or SSL_CERT_DIR: the certificates cannot be read: {reason}") from None


def _check_answer(response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in _RETRIED or status >= 500:
        raise Transient(f"the server answers with status {status}", retry_after(response.headers))
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    if status < 300 and coding not in ("", "identity"):
        raise DownloadError(f"{name}: the server sends it as {coding[:20]!r}, which it was not asked for")


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__ or e.__context__


def _is_hopeless(e: BaseException) -> bool:
    return any(isinstance(cause, socket.gaierror | ssl.SSLCertVerificationError) for cause in _causes(e))


def _malformed_redirect(name: str) -> DownloadError:
    return DownloadError(f"{name}: the server redirects to a malformed URL")


def _hang_up(connected: socket.socket) -> None:
    """Wake the thread that waits for it. Not ssl's own method: after that, ciphertext would be read as plain bytes."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
