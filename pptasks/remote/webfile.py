"""One file on a web server, read by byte ranges, with patience and without trust.

A range is asked for with a plain GET. Where redirects lead (a link of a content network, signed, good for an hour) is
kept in memory for the next range. What a server says is checked before a byte of it is used: status, range, size,
coding, validators. An answer that breaks off is continued from there.

Messages name the file, never a URL that may hold a signature.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from pptasks.errors import DownloadError, ModelNotFound, NeedsToken
from pptasks.remote.line import Access, Line, Transient, Tries
from pptasks.remote.line import retry_after as retry_after

MAX_FILE = 1 << 42  # bytes; no model file comes near
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_STRONG = re.compile(r'"[!#-~]*"')  # an ETag that holds for bytes (RFC 9110, 8.8.3), and that we can send back
_EXPIRED = frozenset((401, 403, 404, 410))  # from a kept link: it may only be too old


@dataclass
class WebFile:
    """A file of a known size behind a URL."""

    url: str
    name: str  # for messages
    size: int  # bytes
    access: Access
    remedy: str  # what to do when access is refused; "" where no token helps
    etag: str = ""  # what every answer must carry; "" if there is none, or the content is checked otherwise
    modified: str = ""  # Last-Modified, the same
    _location: httpx.URL | None = None  # where the redirects led

    @property
    def strong_etag(self) -> str:
        return self.etag if _STRONG.fullmatch(self.etag) else ""

    def read(self, line: Line, begin: int, end: int) -> Iterator[bytes]:
        """The bytes [begin, end), in pieces as they come; exactly these or an error, whatever happens on the way.

        ModelNotFound: it is gone. NeedsToken: access is refused. DownloadError: it changed, the server cannot serve
        ranges, patience is exhausted, or `line` was stopped.
        """
        tries = Tries(line, self.name)
        while begin < end:
            try:
                for piece in self._get(line, begin, end):
                    begin += len(piece)
                    line.received = True
                    tries.renew()
                    yield piece
                if begin < end:
                    raise Transient("the answer ended early")
            except (Transient, httpx.TransportError) as e:
                self._location = None  # another try may be led to another host
                tries.again(e)

    def probe(self, line: Line) -> tuple[int, str, str]:
        """(size, ETag, Last-Modified) as the server says, "" for a text that it does not give. Errors as of `read`.

        One byte is asked for, not the head of an answer: a signed URL may be good for GET alone.
        """
        tries = Tries(line, self.name)
        while True:
            try:
                with self._open(line, {"Range": "bytes=0-0"}) as response:
                    if response.status_code not in (200, 206):
                        self._refused(response)
                    self._check_is_file(response)
                    if response.status_code == 200:
                        raise self._no_ranges()
                    size = self._content_range(response)[2]
                    if size > MAX_FILE:
                        raise DownloadError(f"{self.name}: claims {size} bytes; the limit is {MAX_FILE}")
                    return size, response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
            except (Transient, httpx.TransportError) as e:
                tries.again(e)

    def _get(self, line: Line, begin: int, end: int) -> Iterator[bytes]:
        """One try: a beginning of [begin, end), nothing beyond it."""
        headers = {"Range": f"bytes={begin}-{end - 1}"} | ({"If-Range": self.strong_etag} if self.strong_etag else {})
        with self._open(line, headers) as response:
            self._check(response, begin, end)
            ends_there = _content_length(response) == end - begin  # then the connection is free for the next request
            for piece in response.iter_raw():
                yield piece[: end - begin]
                begin += len(piece)
                if begin > end or (begin == end and not ends_there):  # longer than was asked for
                    return

    @contextmanager
    def _open(self, line: Line, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer after the redirects, from the kept link if there is one."""
        kept, url = self._location, httpx.URL(self.url)
        with line.get(kept or url, self.name, headers, self.access) as response:
            if kept is not None and response.status_code in _EXPIRED:
                self._location = None
                raise Transient(f"status {response.status_code}", wait_s=0)
            self._location = None if response.url == url else response.url
            yield response

    def _check(self, response: httpx.Response, begin: int, end: int) -> None:
        """That `response` is the range [begin, end), or a beginning of it, of the file that we know."""
        if response.status_code not in (200, 206):
            self._refused(response)
        whole = response.status_code == 200
        first, last, size = (0, self.size - 1, _content_length(response)) if whole else self._content_range(response)
        if size not in (self.size, None) or not self._is_same(response.headers):
            raise DownloadError(f"{self.name}: changed on the server since it was opened; start again")
        if whole and (begin, end) != (0, self.size):
            raise self._no_ranges()
        if first != begin or not first <= last < self.size:
            raise DownloadError(f"{self.name}: the server sends another range than was asked for")

    def _is_same(self, headers: Mapping[str, str]) -> bool:
        """Whether the validators are those that we know; the date counts where no ETag says that bytes are equal."""
        etag = not self.etag or headers.get("ETag") == self.etag
        date = not self.modified or bool(self.strong_etag) or headers.get("Last-Modified") == self.modified
        return etag and date

    def _check_is_file(self, response: httpx.Response) -> None:
        if response.headers.get("Content-Type", "").startswith("text/html"):
            web = "; use hf:owner/name/x.gguf, or /resolve/ instead of /blob/" if "/blob/" in self.url else ""
            raise DownloadError(f"{self.name}: is a web page and no model file{web}")

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
        if status == 416:
            raise DownloadError(f"{self.name}: changed on the server, it is shorter now; start again")
        if status in (404, 410):
            raise ModelNotFound(f"{self.name}: the server has no such file")
        if status in (401, 403) and self.remedy and self.access.knows(response.url):
            raise NeedsToken(f"{self.name}: access is refused ({status}); {self.remedy}")
        raise DownloadError(f"{self.name}: the server answers with status {status}")


def _content_length(response: httpx.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if re.fullmatch("[0-9]{1,19}", value) else None
