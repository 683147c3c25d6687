"""What an answer may carry besides its text, and where it goes: stop texts, log-probabilities, penalties, prefixes that
are there already, streams that requests share. Real workers; the head reads out, or the last stage."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery

from orchestrator.cluster import LocalCluster
from orchestrator.run import Options
from pptasks import stream
from pptasks.config import Settings
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.stream import Account, Piece, TokenLogprobs, logprobs_of
from tests.conftest import WaitUntil
from tests.integration.hand import send, stock_app
from tests.pipeline import Pipeline, logits_of

STORY = {"prompt": "Once upon a time", "raw": True, "max_tokens": 24}


@pytest.fixture(scope="module", params=["first", "last"])
def cluster(smollm2_gguf: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    settings = replace(
        Settings.from_env(), model=str(smollm2_gguf), num_stages=2, wire="f32", context=512, readout=request.param
    )
    plan = make_plan(open_model(smollm2_gguf, settings.cache), settings)
    with LocalCluster(settings, plan, Options()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def producer(cluster: LocalCluster) -> Iterator[Celery]:
    with stock_app(cluster.settings.broker, cluster.keys.prefix) as app:
        yield app


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(cluster.settings.broker) as client:
        yield client


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path) -> Pipeline:
    """The same model in this process."""
    return Pipeline(smollm2_gguf, context=512, wire="f32")


def answer(producer: Celery, **kwargs: Any) -> dict[str, Any]:
    return send(producer, **STORY | kwargs).get(timeout=60)


def streamed(client: redis.Redis, cluster: LocalCluster, name: str, ends: int = 1) -> list[Piece]:
    """All pieces of a stream until so many requests have ended, for 60 s at most."""
    pieces: list[Piece] = []
    deadline = time.monotonic() + 60
    for piece in stream.read(client, cluster.keys, name):
        pieces += [piece] if piece is not None else []
        if sum(p.end is not None for p in pieces) == ends:
            return pieces
        if time.monotonic() > deadline:
            pytest.fail(f"{name} has no {ends} ends within 60 s: {pieces[-3:]}")
    raise AssertionError("a reader that ended by itself")


def text_of(pieces: list[Piece], request: str | None = None) -> str:
    return "".join(p.text for p in pieces if request in (None, p.request))


# ---- log-probabilities ----


def test_log_probabilities_are_those_of_the_model(producer: Celery, alone: Pipeline) -> None:
    """Drawn with temperature and penalties, which change no log-probability."""
    result = answer(producer, logprobs=3, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5)
    tokens = [logprobs_of(record) for record in result["logprobs"]]
    assert [t.id for t in tokens] == result["token_ids"]
    logits = logits_of(alone, result["prompt_token_ids"] + result["token_ids"][:-1]).astype(np.float64)
    logits = logits[len(result["prompt_token_ids"]) - 1 :]
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= logits.max(-1, keepdims=True)
    for token, row in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-4)
        assert [i for i, _, _ in token.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [p for _, _, p in token.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
    assert b"".join(t.raw for t in tokens).decode() == result["text"]
    assert all(t.text == t.raw.decode(errors="replace") for t in tokens)


def test_log_probabilities_come_with_their_tokens(producer: Celery, client: redis.Redis, cluster: LocalCluster) -> None:
    request = send(producer, **STORY, logprobs=1)
    pieces = streamed(client, cluster, request.id)
    told: list[TokenLogprobs] = [t for p in pieces for t in p.logprobs]
    assert all([t.id for t in p.logprobs] == list(p.ids) for p in pieces)
    assert [t.to_json()[:4] for t in told] == [record[:4] for record in request.get(timeout=10)["logprobs"]]
    assert all(t.top[0][0] == t.id for t in told)  # greedy


def test_one_that_asks_does_not_change_what_another_gets(producer: Celery) -> None:
    """In one batch: a frame of tokens is as wide as its widest lane."""
    ids = answer(producer)["token_ids"]
    asked = [send(producer, **STORY, **({} if n is None else {"logprobs": n})) for n in (None, 20, 0, None, 5)]
    results = [request.get(timeout=60) for request in asked]
    assert [r["token_ids"] for r in results] == [ids] * 5
    assert [r["logprobs"] and len(r["logprobs"][0][4]) for r in results] == [None, 20, 0, None, 5]


# ---- stop texts ----


def test_a_stop_text_across_tokens_ends_the_answer_and_never_leaks(
    producer: Celery, client: redis.Redis, cluster: LocalCluster
) -> None:
    whole = answer(producer, logprobs=0)
    raws = [logprobs_of(record).raw.decode() for record in whole["logprobs"]]
    stop = raws[4][-1] + raws[5] + raws[6][:1]
    at = whole["text"].find(stop)
    assert at == len("".join(raws[:5])) - 1, "a text that comes sooner: choose another prompt"
    request = send(producer, **STORY, stop=["never", stop])
    pieces, result = streamed(client, cluster, request.id), request.get(timeout=10)
    assert text_of(pieces) == result["text"] == whole["text"][:at]
    assert (result["finish_reason"], result["completion_tokens"]) == ("stop", 7)
    assert result["token_ids"] == whole["token_ids"][:7]
    assert pieces[-1].account == Account("stop", result["prompt_tokens"], result["cached_tokens"], 7)


def test_the_beginning_of_a_stop_text_at_the_end_is_text(
    producer: Celery, client: redis.Redis, cluster: LocalCluster
) -> None:
    whole = answer(producer)
    request = send(producer, **STORY, stop=[whole["text"][-3:] + "\0"])
    assert text_of(streamed(client, cluster, request.id)) == request.get(timeout=10)["text"] == whole["text"]
    assert request.get()["finish_reason"] == "length"


# ---- penalties ----


def test_penalties_count_what_was_generated(producer: Celery, alone: Pipeline) -> None:
    """Each id is the largest logit less its penalty; without any, the model repeats itself."""
    asked = {"prompt": "a b a b a b a b a b a b", "max_tokens": 30}
    plain = answer(producer, **asked)["token_ids"]
    result = answer(producer, **asked, frequency_penalty=1.5, presence_penalty=0.5)
    ids, n_prompt = result["token_ids"], len(result["prompt_token_ids"])
    assert max(Counter(ids).values()) < max(Counter(plain).values())
    for i, row in enumerate(logits_of(alone, result["prompt_token_ids"] + ids[:-1])[n_prompt - 1 :]):
        for token, times in Counter(ids[:i]).items():
            row[token] -= 1.5 * times + 0.5
        assert int(row.argmax()) == ids[i]


# ---- counts ----


def test_a_prompt_that_was_computed_is_not_computed_again(producer: Celery) -> None:
    asked = {"prompt": "The quick brown fox jumps over the lazy dog, and then it tells a story of its own. " * 3}
    first, second = answer(producer, **asked), answer(producer, **asked)
    longer = answer(producer, prompt=asked["prompt"] + "It is about a cat.")
    assert first["prompt_tokens"] == len(first["prompt_token_ids"]) == second["prompt_tokens"] > 50
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, first["prompt_tokens"] - 1)
    assert longer["prompt_tokens"] > longer["cached_tokens"] >= first["prompt_tokens"] - 1
    assert second["token_ids"] == first["token_ids"]
    assert second["completion_tokens"] == len(second["token_ids"])


def test_no_tokens_are_an_answer_too(producer: Celery, client: redis.Redis, cluster: LocalCluster) -> None:
    request = send(producer, **STORY | {"max_tokens": 0, "logprobs": 2})
    assert streamed(client, cluster, request.id) == [Piece(request.id, end="ok", account=Account("length", 4, 0, 0))]
    result = request.get(timeout=10)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("", [], "length")
    assert (result["prompt_tokens"], result["completion_tokens"], result["logprobs"]) == (4, 0, [])


# ---- streams that requests share ----


def test_requests_that_share_a_stream_are_told_apart(
    producer: Celery, client: redis.Redis, cluster: LocalCluster
) -> None:
    asked = [send(producer, **STORY | {"prompt": f"The number {i} is", "reply": "shared-1"}) for i in range(5)]
    pieces = streamed(client, cluster, "shared-1", ends=5)
    for request in asked:
        result = request.get(timeout=10)
        assert text_of(pieces, request.id) == result["text"]
        assert [i for p in pieces if p.request == request.id for i in p.ids] == result["token_ids"]
        [end] = [p for p in pieces if p.request == request.id and p.end]
        counts = (result[n] for n in ("finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"))
        assert (end.end, end.account) == ("ok", Account(*counts))
        assert not client.exists(cluster.keys.stream(request.id))
    assert client.xlen(cluster.keys.stream("shared-1")) < len(pieces)  # what a lap made came at once
    assert 0 < client.ttl(cluster.keys.stream("shared-1")) <= stream.KEEP_S


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"tokens": [49152]}, "RequestError"),
        ({"prompt": "x", "stop": "x"}, "RequestError"),
        ({"tokens": [1] * 513}, "PromptTooLong"),
    ],
)
def test_a_refusal_is_told_on_the_stream_that_was_asked_for(
    producer: Celery, client: redis.Redis, cluster: LocalCluster, kwargs: dict[str, Any], kind: str
) -> None:
    name = f"refused-{kind}-{len(kwargs)}"
    request = send(producer, **kwargs, reply=name)
    [end] = streamed(client, cluster, name)
    assert (end.request, end.end, end.error_type) == (request.id, "failed", kind)
    assert end.error == str(request.get(timeout=10, propagate=False))


def test_a_request_that_is_revoked_ends_on_its_stream(
    producer: Celery, client: redis.Redis, cluster: LocalCluster, wait_until: WaitUntil
) -> None:
    request = send(producer, **STORY | {"max_tokens": 400, "reply": "revoked"})
    wait_until(lambda: client.exists(cluster.keys.stream("revoked")), what="its first token")
    request.revoke()
    pieces = streamed(client, cluster, "revoked")
    assert pieces[-1] == Piece(request.id, end="cancelled")
    assert 0 < sum(len(p.ids) for p in pieces) < 400
