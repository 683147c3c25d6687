"""How we speak to servers: who sees the token, where redirects may lead, how long we wait."""

import email.utils
import socket
import time
from dataclasses import replace

import httpx
import pytest

from pptasks.errors import ConfigError, DownloadError, NeedsToken
from pptasks.remote.line import Access, Line, Patience, Transient, Tries, redirected, retry_after
from pptasks.remote.webfile import WebFile

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


HERE, THERE = "http://127.0.0.1:80/x", "https://hub.example/x"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        (THERE, "http://hub.example/x"),
        (THERE, "file:///etc/passwd"),
        (THERE, "ftp://h/x"),
        (THERE, "https://u:p@h/x"),
        (THERE, "https://h:999999/x"),
        (HERE, "http://other.example/x"),
        ("http://mirror.lan/x", "http://127.0.0.1/x"),
    ],
)
def test_where_a_redirect_may_not_lead(url: str, location: str) -> None:
    with pytest.raises(DownloadError, match=r"x: the server redirects to") as caught:
        redirected(httpx.URL(url), location, "x")
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "location", "target"),
    [
        (THERE, "/y", "https://hub.example/y"),
        (THERE, "https://cdn.example/y?s=1", "https://cdn.example/y?s=1"),
        (HERE, "http://localhost/y", "http://localhost/y"),
        (HERE, "https://cdn.example/y", "https://cdn.example/y"),
        ("http://mirror.lan/x", "/y", "http://mirror.lan/y"),
    ],
)
def test_where_a_redirect_may_lead(url: str, location: str, target: str) -> None:
    assert str(redirected(httpx.URL(url), location, "x")) == target


@pytest.mark.parametrize(
    ("etag", "strong"),
    [('"v1"', True), ('""', True), ('W/"v1"', False), ("v1", False), ('"\xe9"', False), ('"a b"', False), ("", False)],
)
def test_which_etags_hold_for_bytes(etag: str, strong: bool) -> None:
    assert WebFile(THERE, "x", 10, ACCESS, "", etag).strong_etag == (etag if strong else "")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HTTP_PROXY", "127.0.0.1:hunter2"),
        ("ALL_PROXY", "gopher://hunter2"),
        ("SSL_CERT_FILE", "/nope/ca.pem"),
    ],
)
def test_an_environment_that_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable) as caught:
        Line(Patience())
    assert "hunter2" not in str(caught.value)


def test_what_a_server_asks_to_wait() -> None:
    assert retry_after({"Retry-After": "7"}) == 7
    later = email.utils.format_datetime(email.utils.localtime(), usegmt=False)
    assert retry_after({"Retry-After": later}) == 0
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    waits = retry_after({"Retry-After": soon})
    assert waits is not None
    assert 50 < waits <= 60
    for nothing in ("", "soon", "-1", "²", "9" * 99, "Mon, 99 Foo 2026"):
        assert retry_after({"Retry-After": nothing}) is None
    assert retry_after({}) is None


def _try_for_ever(tries: Tries) -> None:
    while True:
        tries.again(Transient("no answer"))


def test_patience_ends() -> None:
    tries = Tries(Line(Patience(total_s=0.2, first_s=0.01, most_s=0.05)), "x")
    start = time.monotonic()
    with pytest.raises(DownloadError, match="x: no answer; try again later"):
        _try_for_ever(tries)
    assert 0.1 < time.monotonic() - start < 5


def test_a_pause_that_is_too_long_is_not_waited_for() -> None:
    with pytest.raises(DownloadError, match="asks for a pause of 3600 s"):
        Tries(Line(Patience()), "x").again(Transient("busy", 3600))


def test_no_pause_is_shorter_than_ours() -> None:
    start = time.monotonic()
    Tries(Line(Patience(first_s=0.1)), "x").again(Transient("busy", 0))
    assert time.monotonic() - start >= 0.1


def test_who_stops_does_not_wait() -> None:
    line = Line(replace(Patience(), first_s=30))
    line.stop()
    with pytest.raises(DownloadError, match="stopped"):
        Tries(line, "x").again(Transient("busy"))


def test_a_server_that_cannot_be_reached_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
    file = WebFile(url, "x", 10, ACCESS, "")
    with (
        Line(Patience(reach_s=0.3, first_s=0.05)) as line,
        pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached \(.*refused\)") as caught,
    ):
        next(file.read(line, 0, 10))
    assert "kept" not in str(caught.value)
    assert caplog.text.count("cannot reach 127.0.0.1") == 1


def test_a_name_that_does_not_resolve_is_not_waited_for_long() -> None:
    file = WebFile("https://no-such-host.invalid/x", "x", 10, ACCESS, "")
    start = time.monotonic()
    with Line(Patience()) as line, pytest.raises(DownloadError, match=r"no-such-host\.invalid cannot be reached"):
        next(file.read(line, 0, 10))
    assert time.monotonic() - start < 8
