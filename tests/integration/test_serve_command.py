"""`pp serve` as a command: what it refuses, whom it lets in, and how it ends."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.run import Command, assert_one_line, pp
from tests.integration.serving import CHAT, KEY, LONG, PAGE, TEXT, Served, Timed, told

# ---- what it refuses ----


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--api-key", "--no-auth")),
        (("--host", "::"), ("--host ::", "--api-key")),
        (("--api-key", "a b"), ("--api-key",)),
        (("--api-key", KEY, "--no-auth"), ("--no-auth",)),
        (("--cors", "chat.example.org"), ("--cors",)),
        (("--cors", "https://chat.example.org/page"), ("--cors",)),
        (("--host", "no such host"), ("--host no such host",)),
        (("--cluster", "nobody"), ("nobody",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_it_refuses_before_anything_starts(tmp_path: Path, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    ended = pp(tmp_path, "serve", *argv)
    assert ended.code == 2
    assert_one_line(ended.stderr, *words)
    assert KEY not in ended.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = pp(tmp_path, "serve", "--port", str(port))
    assert ended.code == 2
    assert_one_line(ended.stderr, f"port {port}", "--port")


# ---- whom it lets in ----


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer nope", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"])
def test_without_the_key_nobody_is_served(strict: Served, given: str) -> None:
    for path in ("/v1/models", CHAT, "/metrics", "/api/pipeline"):
        response = httpx.get(strict.url + path, headers={"Authorization": given.encode()} if given else {})
        assert (response.status_code, told(response)["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


def test_the_key_lets_in_and_is_never_told(strict: Served) -> None:
    assert strict.http.get("/v1/models").status_code == 200
    assert httpx.get(f"{strict.url}/v1/models", headers={"authorization": f"bearer  {KEY}"}).status_code == 200
    assert not [process for process in strict.processes() if KEY in " ".join(process.cmdline())]
    assert all(KEY not in text for text in (strict.stderr, *strict.logs().values()))


def test_a_probe_and_the_page_need_no_key(strict: Served) -> None:
    for path in ("/healthz", "/readyz", "/"):
        assert httpx.get(strict.url + path).status_code == 200


def test_with_a_key_the_server_may_have_any_name(strict: Served) -> None:
    assert strict.http.get("/v1/models", headers={"host": "llm.example.org"}).status_code == 200


def test_a_page_from_a_named_origin_may_use_it_and_no_other(strict: Served) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = httpx.options(strict.url + CHAT, headers=asks | {"origin": PAGE})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    other = httpx.options(strict.url + CHAT, headers=asks | {"origin": "https://elsewhere.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    assert httpx.get(f"{strict.url}/v1/models", headers={"origin": PAGE}).headers["access-control-allow-origin"] == PAGE


def test_more_than_the_queue_holds_is_refused_with_a_time_to_wait(strict: Served) -> None:
    response = strict.post(TEXT, prompt="x", n=3)
    assert (response.status_code, told(response)["code"]) == (429, "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) > 0
    with strict.stream(TEXT, **LONG, n=2) as stream:
        next(stream)
        assert strict.post(TEXT, prompt="x").status_code == 429
    strict.wait_for(lambda: strict.post(TEXT, prompt="x", max_tokens=1).status_code == 200, "there is room again")


# ---- how it ends ----


@pytest.fixture
def mortal(tmp_path: Path, long_golden: Path) -> Iterator[Served]:
    argv = ("--wire", "f32", "--context", "4096", "--model", str(long_golden), "--timeout", "5")
    with Served(tmp_path, *argv) as served:
        yield served


def test_a_stage_that_stalls_is_away_until_it_goes_on(mortal: Served) -> None:
    stage1 = mortal.workers()[1]
    with mortal.stream(TEXT, **LONG) as stream:
        next(stream)
        stage1.suspend()
        *_, last = stream
    assert last["error"]["code"] == "timeout"
    mortal.wait_for(lambda: mortal.http.get("/readyz").status_code == 503, "it is missed")
    response = mortal.post(TEXT, prompt="x", stream=True)
    assert (response.status_code, told(response)["code"]) == (503, "unavailable")
    stage1.resume()
    mortal.wait_for(lambda: mortal.http.get("/readyz").status_code == 200, "it is back")
    assert mortal.text("x", max_tokens=1)["choices"]


def test_a_stage_that_dies_fails_what_is_under_way_and_all_that_comes(mortal: Served) -> None:
    with mortal.stream(TEXT, **LONG) as stream, Timed() as timed:
        next(stream)
        mortal.workers()[1].kill()
        *_, last = stream
    assert (last["error"]["type"], "stage 1" in last["error"]["message"]) == ("server_error", True)
    assert timed.seconds < 4  # well before the timeout
    response = mortal.post(TEXT, prompt="x")
    assert (response.status_code, told(response)["code"]) == (503, "unavailable")
    assert "stage 1" in told(response)["message"]
    assert int(response.headers["retry-after"]) > 0
    assert mortal.http.get("/readyz").status_code == 503
    assert mortal.http.get("/healthz").status_code == 200
    assert "not ready: stage 1" in mortal.stderr
    assert mortal.stop().code == 0


def test_an_interrupt_ends_what_is_under_way_and_leaves_nothing(mortal: Served) -> None:
    with mortal.stream(TEXT, **LONG) as stream:
        next(stream)
        mortal.signal(signal.SIGINT)
        *_, last = stream
    assert last["error"]["message"] == "the server is being stopped"
    ended = mortal.wait()
    assert (ended.code, ended.kept) == (0, ()), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_interrupt_while_it_starts_ends_it(tmp_path: Path, long_golden: Path) -> None:
    with Command(tmp_path, "serve", "--port", "0", "--model", str(long_golden)) as command:
        command.wait_for_worker()
        command.signal(signal.SIGINT)
        ended = command.wait()
    assert (ended.code, ended.stdout) == (1, "")


def test_only_the_ports_that_it_names_listen(strict: Served) -> None:
    """Its own on loopback, and nothing of the cluster's that another command holds."""
    process = psutil.Process(strict.process.pid)
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(a.ip, f"http://127.0.0.1:{a.port}") for a in listening] == [("127.0.0.1", strict.url)]
