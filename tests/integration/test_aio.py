"""The asyncio client against a real Redis; the head is the test's own, so that it can say what no sound head says."""

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import kombu.pools
import pytest
import redis

from pptasks import aio
from pptasks.aio import Answer, AsyncClient
from pptasks.app import make_app
from pptasks.config import Settings
from pptasks.errors import BrokerError, RequestError, RequestFailed
from pptasks.keys import Keys
from pptasks.request import MAX_MESSAGES, Request
from pptasks.stream import Account, Piece, Writer

KEYS = Keys("aio")
HELLO = Request(prompt="Say hello")
DONE = Account("stop", 5, 0, 2)


class Head:
    """Reads requests from stage 0's queue, and says what it is told to say."""

    def __init__(self, url: str):
        self.redis = redis.Redis.from_url(url)
        self._writer = Writer(self.redis, KEYS, 1)

    def request(self) -> tuple[str, dict[str, Any]]:
        """The next one: its id, and its arguments."""
        popped = self.redis.brpop(f"{KEYS.prefix}stage0", timeout=10)
        assert popped is not None
        envelope = json.loads(popped[1])
        assert envelope["headers"]["ignore_result"]
        return envelope["headers"]["id"], json.loads(base64.b64decode(envelope["body"]))[1]

    def say(self, reply: str, *pieces: Piece) -> None:
        self._writer.write(self._writer.prepare({reply: pieces}))

    def answer(self, *texts: str) -> None:
        """The next request, at once."""
        request_id, kwargs = self.request()
        said = [Piece(request_id, (i,), text) for i, text in enumerate(texts)]
        self.say(kwargs["reply"], *said, Piece(request_id, end="ok", account=DONE))


@pytest.fixture
def head(redis_url: str) -> Iterator[Head]:
    head = Head(redis_url)
    yield head
    head.redis.close()


@pytest.fixture
def settings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.setattr(aio, "LEAVE_S", 0.3)  # this head hears of no cancels
    yield replace(Settings(), broker=redis_url, run="aio", secret="ab" * 32)
    kombu.pools.reset()  # they know what was declared in a broker that the next test empties


async def in_thread(work: Any, *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


async def text_of(answer: Answer) -> str:
    return "".join([piece.text async for piece in answer])


def test_many_answers_come_by_one_stream(settings: Settings, head: Head) -> None:
    async def use() -> list[str]:
        async with AsyncClient(make_app(settings)) as client:
            answers = [await client.submit(replace(HELLO, prompt=f"Say {i}")) for i in range(20)]
            requests = [await in_thread(head.request) for _ in answers]
            assert [kwargs["prompt"] for _, kwargs in requests] == [f"Say {i}" for i in range(20)]
            (reply,) = {kwargs["reply"] for _, kwargs in requests}
            await in_thread(head.say, reply, *(Piece(i, (1,), "a") for i, _ in requests))
            ends = [Piece(i, (2,), f"{n}") for n, (i, _) in enumerate(requests)]
            ends += [Piece(i, end="ok", account=DONE) for i, _ in requests]
            await in_thread(head.say, reply, *reversed(ends[:20]), *ends[20:])
            texts = await asyncio.gather(*map(text_of, answers))
            assert client.n_waited_for == 0
            return texts

    assert asyncio.run(use()) == [f"a{i}" for i in range(20)]
    assert not list(head.redis.scan_iter(f"{KEYS.prefix}stream:*"))


def test_an_answer_that_comes_before_its_request_was_seen_to_be_sent(settings: Settings, head: Head) -> None:
    async def use() -> str:
        async with AsyncClient(make_app(settings)) as client:
            answering = asyncio.create_task(in_thread(head.answer, "at", " once"))
            answer = await client.submit(HELLO)
            await answering
            return await text_of(answer)

    assert asyncio.run(use()) == "at once"


def test_a_failure_is_a_piece_of_its_own(settings: Settings, head: Head) -> None:
    async def use() -> Piece:
        async with AsyncClient(make_app(settings)) as client:
            answer = await client.submit(HELLO)
            request_id, kwargs = await in_thread(head.request)
            await in_thread(head.say, kwargs["reply"], Piece(request_id, end="failed", error="no", error_type="Busy"))
            return [piece async for piece in answer][-1]

    last = asyncio.run(use())
    assert (last.end, last.error, last.error_type) == ("failed", "no", "Busy")


def test_nothing_of_a_cancelled_request_is_delivered(settings: Settings, head: Head) -> None:
    async def use() -> None:
        async with AsyncClient(make_app(settings)) as client:
            cancelled, other = [await client.submit(HELLO) for _ in range(2)]
            (first, kwargs), (second, _) = [await in_thread(head.request) for _ in range(2)]
            await cancelled.cancel()
            await cancelled.cancel()
            said = [Piece(i, (1,), "late") for i in (first, second)]
            ends = [Piece(first, end="cancelled"), Piece(second, end="ok", account=DONE)]
            await in_thread(head.say, kwargs["reply"], *said, *ends)
            assert await text_of(other) == "late"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(text_of(cancelled), 0.2)

    asyncio.run(use())


def test_a_client_that_is_closed_fails_what_it_waits_for(settings: Settings, head: Head) -> None:
    async def use() -> None:
        async with AsyncClient(make_app(settings)) as client:
            answer = await client.submit(HELLO)
            waiting = asyncio.create_task(text_of(answer))
            await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="closed"):
            await waiting

    asyncio.run(use())
    assert not list(head.redis.scan_iter(f"{KEYS.prefix}stream:*"))


@pytest.mark.parametrize("entry", [b"{", b'{"pieces": 5}', b"[" * 100_000], ids=["half", "no pieces", "a nest"])
def test_what_no_head_writes_fails_the_answers_and_not_the_client(settings: Settings, head: Head, entry: bytes) -> None:
    async def use() -> str:
        async with AsyncClient(make_app(settings)) as client:
            answer = await client.submit(HELLO)
            _, kwargs = await in_thread(head.request)
            await in_thread(head.redis.xadd, KEYS.stream(kwargs["reply"]), {"e": entry}, "1-1")
            with pytest.raises(RequestFailed, match="no piece"):
                await text_of(answer)
            again = await client.submit(HELLO)
            await in_thread(head.answer, "fine")
            return await text_of(again)

    assert asyncio.run(use()) == "fine"


def test_pieces_of_requests_that_nobody_made_are_dropped(settings: Settings, head: Head) -> None:
    async def use() -> str:
        async with AsyncClient(make_app(settings)) as client:
            answer = await client.submit(HELLO)
            request_id, kwargs = await in_thread(head.request)
            strange = [Piece("somebody", (1,), "x"), Piece("somebody", end="ok", account=DONE)]
            mine = [Piece(request_id, (1,), "mine"), Piece(request_id, end="ok", account=DONE)]
            await in_thread(head.say, kwargs["reply"], *strange, *mine)
            return await text_of(answer)

    assert asyncio.run(use()) == "mine"


def test_what_the_head_would_drop_unread_is_refused_here(settings: Settings) -> None:
    """An envelope over the limit; a character outside ASCII takes six bytes of it, and then base64 a third more."""
    message = {"role": "user", "content": "é" * (1 << 20)}
    assert len([message] * 2) < MAX_MESSAGES

    async def use() -> None:
        async with AsyncClient(make_app(settings)) as client:
            with pytest.raises(RequestError, match="at most 16777216"):
                await client.submit(Request(messages=(message, message)))
            assert client.n_waited_for == 0

    asyncio.run(use())


class Wire:
    """A TCP proxy to the broker that a test cuts and mends."""

    def __init__(self, port: int):
        self._target, self.is_cut = port, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        self.is_cut = True
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass, args=ends, daemon=True))
                self._threads[-1].start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_broker_that_is_away_for_moments_delays_and_nothing_more(settings: Settings, head: Head) -> None:
    async def use(wire: Wire) -> str:
        url = settings.broker.replace(f":{urlsplit(settings.broker).port}", f":{wire.port}")
        async with AsyncClient(make_app(replace(settings, broker=url))) as client:
            answer = await client.submit(HELLO)
            request_id, kwargs = await in_thread(head.request)
            await in_thread(head.say, kwargs["reply"], Piece(request_id, (1,), "a"))
            said = [piece.text async for piece in first(answer)]
            wire.cut()
            with pytest.raises(BrokerError, match="cannot be sent"):
                await client.submit(HELLO)
            end = [Piece(request_id, (2,), "b"), Piece(request_id, end="ok", account=DONE)]
            await in_thread(head.say, kwargs["reply"], *end)
            wire.is_cut = False
            return "".join(said) + await text_of(answer)

    async def first(answer: Answer) -> Any:
        async for piece in answer:
            yield piece
            return

    with closing(Wire(urlsplit(settings.broker).port or 0)) as wire:
        assert asyncio.run(use(wire)) == "ab"


def test_a_broker_that_stays_away_fails_what_is_waited_for_and_may_come_back(
    settings: Settings, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "LOST_S", 0.5)

    async def use(wire: Wire) -> str:
        url = settings.broker.replace(f":{urlsplit(settings.broker).port}", f":{wire.port}")
        async with AsyncClient(make_app(replace(settings, broker=url))) as client:
            answer = await client.submit(HELLO)
            request_id, kwargs = await in_thread(head.request)
            wire.cut()
            with pytest.raises(BrokerError, match="was lost"):
                await text_of(answer)
            wire.is_cut = False
            again = await client.submit(HELLO)
            await in_thread(head.say, kwargs["reply"], Piece(request_id, end="cancelled"))
            await in_thread(head.answer, "back")
            return await text_of(again)

    with closing(Wire(urlsplit(settings.broker).port or 0)) as wire:
        assert asyncio.run(use(wire)) == "back"
