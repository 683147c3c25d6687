"""How we speak to servers: who sees the token, where redirects may lead, how long we wait."""

import email.utils
import threading
import time
from dataclasses import replace

import httpx
import pytest

from pptasks.errors import ConfigError, DownloadError, NeedsToken
from pptasks.remote.webfile import Access, Patience, Transient, Tries, WebFile, retry_after

ACCESS = Access("https://hub.example", "hf_secret")


@pytest.mark.parametrize(
    ("endpoint", "url", "sent"),
    [
        ("https://hub.example", "https://hub.example/o/n/resolve/main/x", True),
        ("https://hub.example", "https://hub.example:443/x", True),
        ("https://hub.example/mirror", "https://hub.example/mirror/x", True),
        ("http://127.0.0.1:80", "http://127.0.0.1/x", True),
        ("http://localhost:8080", "http://localhost:8080/x", True),
        ("https://hub.example", "http://hub.example/x", False),
        ("https://hub.example", "https://hub.example:8443/x", False),
        ("https://hub.example", "https://cdn.hub.example/x", False),
        ("https://hub.example", "https://hub.example.evil/x", False),
        ("http://mirror.lan", "http://mirror.lan/x", False),  # a line that others can read
        ("http://127.0.0.1:80", "http://localhost:80/x", False),
        ("http://127.0.0.1:80", "http://127.0.0.1:81/x", False),
    ],
)
def test_who_sees_the_token(endpoint: str, url: str, sent: bool) -> None:
    headers = Access(endpoint, "hf_secret").headers(httpx.URL(url))
    assert headers == ({"Authorization": "Bearer hf_secret"} if sent else {})


def test_the_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(ACCESS)
    assert Access("https://hub.example").headers(httpx.URL("https://hub.example/x")) == {}


@pytest.mark.parametrize("token", ["hf_sec ret", "hf_secret\n", "hf_sécret", "hf_secret\0"])
def test_a_malformed_token_is_not_repeated(token: str) -> None:
    with pytest.raises(NeedsToken, match="HF_TOKEN") as caught:
        Access("https://hub.example", token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["", "hub.example", "ftp://hub.example", "https://", "https://u:hunter2@h", "https://h?t=hunter2", "https://\0"],
)
def test_a_malformed_endpoint_is_not_repeated(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="HF_ENDPOINT") as caught:
        Access(endpoint)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def file() -> WebFile:
    return WebFile("https://hub.example/x", "x", 10, ACCESS, Patience(), "")


@pytest.mark.parametrize(
    "location", ["http://hub.example/x", "file:///etc/passwd", "ftp://h/x", "https://u:p@h/x", "https://h:999999/x"]
)
def test_where_a_redirect_may_not_lead(file: WebFile, location: str) -> None:
    with pytest.raises(DownloadError, match=r"redirects to") as caught:
        file._redirected(httpx.URL(file.url), location)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "url"), [("/y", "https://hub.example/y"), ("https://cdn.example/y?s=1", "https://cdn.example/y?s=1")]
)
def test_where_a_redirect_may_lead(file: WebFile, location: str, url: str) -> None:
    assert str(file._redirected(httpx.URL(file.url), location)) == url


def test_what_a_server_asks_to_wait() -> None:
    assert retry_after({"Retry-After": "7"}) == 7
    later = email.utils.format_datetime(email.utils.localtime(), usegmt=False)
    assert retry_after({"Retry-After": later}) == 0
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    waits = retry_after({"Retry-After": soon})
    assert waits is not None
    assert 50 < waits <= 60
    for nothing in ("", "soon", "-1", "9" * 99, "Mon, 99 Foo 2026"):
        assert retry_after({"Retry-After": nothing}) is None
    assert retry_after({}) is None


def _try_for_ever(tries: Tries) -> None:
    while True:
        tries.again(Transient("no answer"))


def test_patience_ends() -> None:
    tries = Tries("x", Patience(total_s=0.2, first_s=0.01, most_s=0.05), threading.Event())
    start = time.monotonic()
    with pytest.raises(DownloadError, match="x: no answer; try again later"):
        _try_for_ever(tries)
    assert 0.1 < time.monotonic() - start < 5


def test_a_pause_that_is_too_long_is_not_waited_for() -> None:
    tries = Tries("x", Patience(total_s=60), threading.Event())
    with pytest.raises(DownloadError, match="asks for a pause of 3600 s"):
        tries.again(Transient("busy", 3600))


def test_who_stops_does_not_wait() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(DownloadError, match="stopped"):
        Tries("x", replace(Patience(), first_s=30), stopped).again(Transient("busy"))
