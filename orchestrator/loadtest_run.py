"""The open loop itself: every request is sent when it is due, whatever became of those before it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from orchestrator import loadtest_http as http
from orchestrator.loadtest import Call, Load, arrivals, prompt, row
from orchestrator.signals import ENDING
from pptasks.errors import RequestFailed

SHOWN_S = 0.25  # progress is told that often
PROBE_WORDS = 16


@dataclass
class Measured:
    """One rate: how many requests were sent, and those that have ended."""

    rate: float
    due: int
    sent: int = 0
    calls: list[Call] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return row(self.rate, self.sent, self.calls)


OnProgress = Callable[[Measured], None]


def measure(url: str, key: str | None, name: str | None, load: Load, on_progress: OnProgress) -> "Outcome":
    """Put `load` on the server at `url`. An interrupt ends it, and the outcome is what had come until then.

    Raises UsageError for what is no address, RequestFailed for a server that does not answer one request.
    """
    outcome = Outcome(name or "")
    asyncio.run(_until_interrupted(_measure(url, key, load, on_progress, outcome), outcome))
    return outcome


@dataclass
class Outcome:
    """What was measured of the model `name`; whole unless it was interrupted."""

    name: str
    rates: list[Measured] = field(default_factory=list)
    interrupted: bool = False


async def _until_interrupted(work: Any, outcome: Outcome) -> None:
    working = asyncio.create_task(work)

    def interrupt() -> None:
        outcome.interrupted = True
        working.cancel()

    with _signals_to(interrupt):
        try:
            await working
        except asyncio.CancelledError:
            if not outcome.interrupted:
                raise


@contextmanager
def _signals_to(interrupt: Callable[[], None]) -> Iterator[None]:
    """The signals that end a command call `interrupt` between two steps of the loop instead."""
    loop = asyncio.get_running_loop()
    before = {name: handler for name in ENDING if (handler := signal.getsignal(name)) is not signal.SIG_IGN}
    for name in before:
        loop.add_signal_handler(name, interrupt)
    try:
        yield
    finally:
        for name, handler in before.items():
            loop.remove_signal_handler(name)
            signal.signal(name, handler)


async def _measure(url: str, key: str | None, load: Load, on_progress: OnProgress, outcome: Outcome) -> None:
    due_at = {rate: arrivals(rate, load.duration_s, load.seed) for rate in load.rates}
    async with http.client(url, key, load.timeout_s) as server:
        outcome.name = outcome.name or await http.first_model(server)
        words = await _words(server, outcome.name, load)
        for rate, due in due_at.items():
            outcome.rates.append(Measured(rate, len(due)))
            await _open_loop(server, outcome, due, words, load, on_progress)


async def _words(server: httpx.AsyncClient, name: str, load: Load) -> int:
    """How many words make a prompt of `prompt_tokens`. Two requests find out what a word comes to and what is there
    besides, and that the server answers at all."""
    few, many = [await _probe(server, name, load, words) for words in (1, 1 + PROBE_WORDS)]
    each = (many - few) / PROBE_WORDS
    return max(1, 1 + round((load.prompt_tokens - few) / each)) if each > 0 else load.prompt_tokens


async def _probe(server: httpx.AsyncClient, name: str, load: Load, words: int) -> int:
    """Tokens of a prompt of so many words, as the server counts them; 0 if it does not tell. Raises RequestFailed."""
    answer, loop = http.Answer(), asyncio.get_running_loop()
    body = _body(name, load, words, -1) | {"max_tokens": 1}
    try:
        async with asyncio.timeout(load.timeout_s):
            error = await http.ask(server, body, answer, loop.time)
    except TimeoutError:
        error = "timeout"
    if error:
        told = f"HTTP {error}" if error.isdecimal() else error
        why = f": {answer.refusal}" if answer.refusal else ""
        remedy = {"401": "give its key as PP_API_KEY", "403": "give its key as PP_API_KEY"}.get(error, "is it ready?")
        raise RequestFailed(f"{server.base_url} answers no request ({told}){why}: {remedy}")
    return answer.prompt_tokens


async def _open_loop(
    server: httpx.AsyncClient,
    outcome: Outcome,
    due: tuple[float, ...],
    words: int,
    load: Load,
    on_progress: OnProgress,
) -> None:
    loop, measured = asyncio.get_running_loop(), outcome.rates[-1]
    began = loop.time()

    async def one(index: int, due_s: float) -> None:
        answer, error = http.Answer(), "timeout"
        body = _body(outcome.name, load, words, index)
        sent_s = loop.time() - began
        measured.sent += 1
        try:
            async with asyncio.timeout(load.timeout_s):
                error = await http.ask(server, body, answer, lambda: loop.time() - began)
        except TimeoutError:
            pass
        end_s = loop.time() - began
        measured.calls.append(
            Call(due_s, sent_s, end_s, tuple(answer.pieces_s), answer.prompt_tokens, answer.tokens, error)
        )

    async def show() -> None:
        while True:
            on_progress(measured)
            await asyncio.sleep(SHOWN_S)

    showing = asyncio.create_task(show())
    try:
        async with asyncio.TaskGroup() as group:
            for index, due_s in enumerate(due):
                await asyncio.sleep(began + due_s - loop.time())
                group.create_task(one(index, due_s))
    finally:
        showing.cancel()
        on_progress(measured)


def _body(name: str, load: Load, words: int, index: int) -> dict[str, Any]:
    """Of a request. Each has a seed of its own, so that a run asks the same as the one before."""
    return {
        "model": name,
        "messages": [{"role": "user", "content": prompt(words, load.seed, index)}],
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": abs(load.seed + index) & 0x7FFFFFFF,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
