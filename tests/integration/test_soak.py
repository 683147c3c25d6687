"""Many clients at once, some of which go: every answer is what it is alone, and nothing is left of any of them."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.run import ROOT
from tests.integration.serving import TEXT, Served

N_ROUNDS, N_REQUESTS, N_CLIENTS = 3, 200, 32
N_KINDS = 60  # different requests
CANCELLED = 0.1  # of all
WITHIN = 1.05  # of its memory after the first round a process has after the last


@dataclass(frozen=True)
class Kind:
    """A request, and its answer when nothing else runs: text, log-probabilities of each token, why it ended."""

    fields: dict[str, Any]
    alone: Any


def some_request(draw: random.Random) -> dict[str, Any]:
    """Short and long prompts, some of which begin alike; short and long answers; greedy, sampled, penalised."""
    shared, own = (
        [9] * draw.choice([0, 0, 40, 150]),
        [draw.randrange(3, 390) for _ in range(draw.choice([1, 5, 30, 200]))],
    )
    how = draw.choice([{}, {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"frequency_penalty": 1.0}])
    most = draw.choice([1, 4, 20, 80])
    return {"prompt": shared + own, "max_tokens": most, "logprobs": 2, "seed": draw.randrange(1 << 32), **how}


def essence(response: dict[str, Any]) -> Any:
    (choice,) = response["choices"]
    usage = {k: response["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
    return choice["text"], choice["logprobs"], choice["finish_reason"], usage


async def ask(http: httpx.AsyncClient, served: Served, kind: Kind, streams: bool) -> Any:
    """The essence of an answer, from a stream or whole."""
    body = {"model": served.model, "temperature": 0} | kind.fields
    if not streams:
        response = await http.post(TEXT, json=body)
        assert response.status_code == 200, response.text
        return essence(response.json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text, logprobs, reason = "", dict[str, list[Any]](), None
    async with http.stream("POST", TEXT, json=body | options) as response:
        assert response.status_code == 200
        async for event in events(response):
            usage = event["usage"]
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
                for name, values in (choice["logprobs"] or {}).items():
                    logprobs.setdefault(name, []).extend(values)
    return text, logprobs, reason, {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}


async def events(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def go_away(served: Served, kind: Kind, draw: random.Random) -> None:
    """Ask, and close the connection a moment later, or after some of the answer. With a client of its own: httpx may
    lose a connection of a pool when it is cancelled."""
    body = {"model": served.model, "temperature": 0, "stream": draw.random() < 0.5} | kind.fields
    n_events, patience_s = draw.randrange(4), draw.random() * 0.2

    async def look() -> None:
        async with http.stream("POST", TEXT, json=body) as response:
            async for _ in response.aiter_lines():
                nonlocal n_events
                n_events -= 1
                if n_events < 0:
                    return

    async with httpx.AsyncClient(base_url=served.url, timeout=served.timeout) as http:
        with suppress(TimeoutError):
            await asyncio.wait_for(look(), patience_s)


async def a_round(served: Served, kinds: Sequence[Kind], draw: random.Random) -> int:
    """How many went away. Every other answer is what it is alone."""
    todo = [(draw.choice(kinds), draw.random() < CANCELLED, draw.random() < 0.5) for _ in range(N_REQUESTS)]
    waiting = iter(todo)

    async def client() -> None:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=served.url, timeout=served.timeout, limits=limits) as http:
            for kind, leaves, streams in waiting:
                if leaves:
                    await go_away(served, kind, draw)
                else:
                    assert await ask(http, served, kind, streams) == kind.alone

    await asyncio.gather(*(client() for _ in range(N_CLIENTS)))
    return sum(leaves for _, leaves, _ in todo)


def keys(served: Served) -> set[bytes]:
    with served.broker() as (client, of_run):
        return set(client.scan_iter(f"{of_run.prefix}*"))


def processes(served: Served) -> dict[str, psutil.Process]:
    return {"server": psutil.Process(served.process.pid)} | {f"stage {i}": p for i, p in served.workers().items()}


def fds(served: Served) -> dict[str, int]:
    return {name: process.num_fds() for name, process in processes(served).items()}


def tasks(served: Served) -> list[Any]:
    """What Celery says its workers hold."""
    environ = served.wait_for_worker()
    env = {k: v for k, v in environ.items() if k != "STAGE"}
    found = []
    for what in ("active", "reserved", "scheduled"):
        argv = [sys.executable, "-m", "celery", "-A", "pptasks", "inspect", what, "--json"]
        said = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        found += [task for of_one in json.loads(said.stdout).values() for task in of_one]
    return found


@pytest.mark.timeout(240)
def test_many_clients_of_whom_some_go_leave_every_answer_right_and_nothing_behind(tiny: Served) -> None:
    draw = random.Random(5)
    fields = [some_request(draw) for _ in range(N_KINDS)]
    kinds = [Kind(f, essence(tiny.text(**f))) for f in fields]
    assert len({kind.alone[0] for kind in kinds}) > N_KINDS // 2
    before, memory = tiny.wait_until_idle(), list[dict[str, int]]()
    for number in range(N_ROUNDS):
        n_left = asyncio.run(a_round(tiny, kinds, draw))
        after = tiny.wait_until_idle()
        assert n_left > N_REQUESTS * CANCELLED / 2
        assert after.requests - before.requests >= N_REQUESTS - n_left
        assert after.failed == before.failed
        memory.append({name: process.memory_info().rss for name, process in processes(tiny).items()})
        if number == 0:
            tasks(tiny)  # a worker that was asked once keeps the connection that it answered on
            at_rest = fds(tiny), keys(tiny)
        assert after.cancelled > before.cancelled
        before = after
    assert all(memory[-1][name] <= memory[0][name] * WITHIN for name in memory[0]), memory
    assert tasks(tiny) == []
    tiny.wait_for(lambda: keys(tiny) <= at_rest[1], "no key is left")
    tiny.wait_for(lambda: all(n <= at_rest[0][name] for name, n in fds(tiny).items()), f"no more than {at_rest[0]}")
