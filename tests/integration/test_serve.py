"""`pp serve` over HTTP, before a pipeline of real workers on a golden model."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pptasks.models import open_model
from pptasks.text import open_text
from tests.integration.serving import CHAT, LONG, TEXT, Served, told


@pytest.fixture(scope="module")
def golden(goldens: Path) -> dict[str, Any]:
    return json.loads((goldens / "llama-tied" / "expected.json").read_text())


# ---- answers ----


def test_the_golden_tokens_come_out(tiny: Served, golden: dict[str, Any], goldens: Path) -> None:
    ids = golden["greedy_ids"]
    response = tiny.text(golden["prompt_ids"], max_tokens=len(ids), logprobs=0)
    text = open_text(open_model(goldens / "llama-tied", Path("/nonexistent"))).decode(ids)
    assert response["choices"][0]["text"] == text
    assert len(response["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert response["choices"][0]["finish_reason"] == "length"
    assert response["usage"]["prompt_tokens"] == len(golden["prompt_ids"])
    assert response["usage"]["completion_tokens"] == len(ids)
    assert (response["object"], response["model"]) == ("text_completion", "llama-tied")


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1.0, "seed": 5}], ids=["greedy", "three choices"])
def test_a_stream_says_what_the_whole_answer_says(tiny: Served, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Say hello"}]
    whole = tiny.chat("Say hello", max_tokens=24, **fields)
    said: dict[int, str] = {}
    reasons: dict[int, str] = {}
    with tiny.stream(
        CHAT, messages=messages, max_tokens=24, stream_options={"include_usage": True}, **fields
    ) as stream:
        *chunks, last, done = stream
    for chunk in chunks:
        (choice,) = chunk["choices"]
        said[choice["index"]] = said.get(choice["index"], "") + choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert said == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert reasons == {c["index"]: c["finish_reason"] for c in whole["choices"]}
    assert done == "[DONE]"
    assert {k: last["usage"][k] for k in ("prompt_tokens", "completion_tokens")} == {
        k: whole["usage"][k] for k in ("prompt_tokens", "completion_tokens")
    }


def test_a_seed_decides_the_answer_whatever_else_runs(tiny: Served) -> None:
    def answer(seed: int) -> str:
        return tiny.chat("Tell me", max_tokens=16, temperature=1.0, seed=seed)["choices"][0]["message"]["content"]

    alone = [answer(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(answer, range(12)))
    assert together == alone
    assert len(set(alone)) > 6


def test_choices_are_what_their_seeds_give_alone(tiny: Served) -> None:
    three = tiny.text("Once", n=3, seed=40, temperature=1.0, max_tokens=12)["choices"]
    alone = [tiny.text("Once", seed=40 + i, temperature=1.0, max_tokens=12)["choices"][0]["text"] for i in range(3)]
    assert [choice["text"] for choice in three] == alone


def test_several_prompts_at_once(tiny: Served) -> None:
    prompts = ["Once", "Twice", "Three times"]
    together = [choice["text"] for choice in tiny.text(prompts, max_tokens=8)["choices"]]
    assert together == [tiny.text(prompt, max_tokens=8)["choices"][0]["text"] for prompt in prompts]


def test_echo_repeats_a_prompt_of_text_and_of_tokens(tiny: Served, golden: dict[str, Any], goldens: Path) -> None:
    plain = tiny.text("Once", max_tokens=8)["choices"][0]["text"]
    assert tiny.text("Once", max_tokens=8, echo=True)["choices"][0]["text"] == f"Once{plain}"
    prompt = golden["prompt_ids"]
    text = open_text(open_model(goldens / "llama-tied", Path("/nonexistent"))).decode(prompt)
    said = tiny.text(prompt, max_tokens=8)["choices"][0]["text"]
    assert tiny.text(prompt, max_tokens=8, echo=True)["choices"][0]["text"] == text + said
    with tiny.stream(TEXT, prompt="Once", max_tokens=8, echo=True) as stream:
        assert "".join(e["choices"][0]["text"] for e in stream if e != "[DONE]") == f"Once{plain}"


def test_log_probabilities_are_of_the_tokens_that_were_said(tiny: Served) -> None:
    choice = tiny.chat("Say hello", max_tokens=6, logprobs=True, top_logprobs=3)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for token in content:
        assert token["logprob"] < 0
        likeliest = token["top_logprobs"]
        assert [t["logprob"] for t in likeliest] == sorted((t["logprob"] for t in likeliest), reverse=True)
        assert len(likeliest) == 3
        assert token["logprob"] == likeliest[0]["logprob"]  # greedy
    assert (
        bytes(b for token in content for b in token["bytes"]).decode(errors="replace") == choice["message"]["content"]
    )


def test_a_prompt_that_was_seen_is_not_computed_again(tiny: Served) -> None:
    prompt = "The very same words, said twice in a row to one model"
    tiny.text(prompt, max_tokens=1)
    usage = tiny.text(prompt, max_tokens=1)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_models_and_the_fingerprint_are_the_same_everywhere(tiny: Served) -> None:
    listed = tiny.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == ("llama-tied", "model")
    assert tiny.http.get("/v1/models/llama-tied").json() == model
    prints = {tiny.text("x", max_tokens=1)["system_fingerprint"] for _ in range(2)}
    assert len(prints) == 1
    assert next(iter(prints)).startswith("fp_")


def test_it_says_that_it_serves(tiny: Served) -> None:
    assert tiny.http.get("/healthz").json() == {"status": "ok"}
    assert tiny.http.get("/readyz").json() == {"status": "ready"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", TEXT, 415),
    ],
)
def test_what_is_not_there_is_an_error_in_openais_form(tiny: Served, method: str, path: str, status: int) -> None:
    response = tiny.http.request(method, path)
    assert response.status_code == status
    assert told(response)["type"] == "invalid_request_error"


def test_another_model_is_not_found(tiny: Served) -> None:
    response = tiny.post(TEXT, prompt="x", model="gpt-4")
    assert (response.status_code, told(response)["code"], told(response)["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"tools": [{}]}, "tools"), ({"temperature": 3}, "temperature"), ({"what": 1}, "what"), ({"stop": ""}, "stop")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_served_is_named(tiny: Served, fields: Any, param: str, stream: bool) -> None:
    response = tiny.post(CHAT, messages=[{"role": "user", "content": "x"}], stream=stream, **fields)
    assert (response.status_code, told(response)["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_head_refuses_is_refused_before_an_answer_begins(tiny: Served, stream: bool) -> None:
    response = tiny.post(TEXT, prompt=[1, 511, 512], stream=stream)
    assert response.status_code == 400
    assert "512" in told(response)["message"]
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"model": "\xff"}', b'{"model": 1e999, "seed": NaN}'])
def test_a_body_that_is_no_json_is_refused(tiny: Served, body: bytes) -> None:
    response = tiny.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, told(response)["code"]) == (400, "invalid_json")


def test_a_body_that_is_too_large_is_refused_before_it_comes(tiny: Served) -> None:
    host, port = tiny.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    for more in (f"Content-Length: {1 << 40}", "Content-Length: 9" + "9" * 30):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(f"{head}{more}\r\n\r\n".encode())
            assert client.recv(1000).split(b"\r\n")[0] in (b"HTTP/1.1 413 Request Entity Too Large",
                                                           b"HTTP/1.1 413 Content Too Large",
                                                           b"HTTP/1.1 400 Bad Request")  # fmt: skip


def test_a_body_in_chunks_is_refused_when_it_grows_too_large(tiny: Served) -> None:
    def chunks() -> Any:
        for _ in range(9):
            yield b" " * (1 << 20)

    response = tiny.http.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    assert (response.status_code, told(response)["code"]) == (413, "request_too_large")


def test_a_web_page_elsewhere_cannot_use_it(tiny: Served) -> None:
    """A page may send text/plain to any server, and JSON after it has asked; and by DNS rebinding, by its own name."""
    body = json.dumps({"model": tiny.model, "prompt": "x"})
    elsewhere = {"origin": "https://elsewhere.example"}
    plain = tiny.http.post(TEXT, content=body, headers=elsewhere | {"content-type": "text/plain"})
    assert plain.status_code == 415
    asks = elsewhere | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight = tiny.http.options(TEXT, headers=asks)
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    rebound = tiny.http.get("/v1/models", headers={"host": "elsewhere.example"})
    assert (rebound.status_code, told(rebound)["code"]) == (403, "unknown_host")
    assert tiny.http.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


# ---- clients that go ----


def test_a_client_that_closes_a_stream_cancels_it(tiny: Served) -> None:
    before = tiny.wait_until_idle()
    with tiny.stream(TEXT, **LONG, n=2) as stream:
        assert next(stream)["object"] == "text_completion"
    after = tiny.wait_until_idle()
    assert after.cancelled == before.cancelled + 2
    assert after.tokens < before.tokens + LONG["max_tokens"]


def test_a_client_that_does_not_wait_for_an_answer_cancels_it(tiny: Served) -> None:
    before = tiny.wait_until_idle()
    raw = json.dumps({"model": tiny.model, "temperature": 0, "n": 2} | LONG).encode()
    host, port = tiny.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        tiny.head_after(lambda m: m.live == 2, "both of its choices run")
    after = tiny.wait_until_idle()
    assert after.cancelled == before.cancelled + 2


def test_nothing_is_left_of_what_was_answered_or_cancelled(tiny: Served) -> None:
    """But the one stream that all answers come by."""
    tiny.text("x", max_tokens=2)
    with tiny.stream(TEXT, **LONG) as stream:
        next(stream)
    with tiny.broker() as (client, keys):

        def left() -> list[str]:
            return [key.decode().removeprefix(keys.prefix) for key in client.scan_iter(f"{keys.prefix}*")]

        tiny.wait_for(lambda: not any("task-meta" in key for key in left()), "no result is left")
        assert len([key for key in left() if key.startswith("stream:")]) == 1


def test_a_request_takes_no_connection_of_the_brokers(tiny: Served) -> None:
    with tiny.broker() as (client, _):
        tiny.text("x", max_tokens=1)
        before = client.info("clients")["connected_clients"]
        for i in range(30):
            tiny.text(f"x{i}", max_tokens=1)
        deadline = time.monotonic() + 5
        while client.info("clients")["connected_clients"] > before + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.info("clients")["connected_clients"] <= before + 1
