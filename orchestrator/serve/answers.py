"""The handlers of /v1/chat/completions and /v1/completions: a body in, an answer out, whole or as it comes."""

import asyncio
import time
from collections.abc import Mapping
from secrets import token_hex

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from orchestrator.serve import body, openai_reply
from orchestrator.serve.exchange import Exchange
from orchestrator.serve.openai_ask import Ask, Endpoint, parse
from orchestrator.serve.openai_errors import ApiError, away, no_model, of
from orchestrator.serve.openai_reply import COMMENT, Answer, Events, Heading
from orchestrator.serve.respond import respond, start
from orchestrator.serve.room import Room
from orchestrator.serve.state import ServeState
from orchestrator.serve.texts import Texts
from pptasks.errors import PPError

GONE = 499  # no status of HTTP's: the client did not wait for one
_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy passes each event on as it comes
}


class Shared:
    """What both endpoints share."""

    def __init__(self, state: ServeState):
        most = state.limits.queue
        self.queue = Room(most, f"{most} answers are under way already")
        self.bodies = Room(state.limits.bodies, "too much is being sent at once")
        self.texts = Texts(state.model)


class Completions:
    """An ASGI app: one of the two endpoints."""

    def __init__(self, state: ServeState, shared: Shared, endpoint: Endpoint):
        self._state, self._shared, self._endpoint = state, shared, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            await self._serve(scope, receive, reply)
        except ClientDisconnect:
            reply.status = GONE
        except PPError as e:
            await reply.fail(of(e))
        finally:
            self._state.observe.request(self._endpoint.value, reply.status)

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        began = asyncio.get_running_loop().time()
        if reason := self._state.health.reason:
            raise away(f"the pipeline does not serve now: {reason}")
        ask = await self._ask(scope, receive)
        requests = ask.requests
        with self._shared.queue.take(len(requests)):
            heading = await self._heading(ask)
            async with Exchange(self._state, requests, receive, began) as exchange:
                await (_stream if ask.stream else _whole)(exchange, heading, reply)

    async def _ask(self, scope: Scope, receive: Receive) -> Ask:
        with self._shared.bodies.take(0) as taken:
            data = await body.read(scope["headers"], receive, self._state.limits, taken)
            ask = parse(data, self._endpoint, self._state.cluster.plan.context)
        if ask.model != self._state.model.name:
            raise no_model(ask.model, self._state.model.name)
        return ask

    async def _heading(self, ask: Ask) -> Heading:
        echoes = list[str]()
        for prompt in ask.prompts if ask.echo else ():
            echoes.append(await self._shared.texts.decode(prompt.tokens) if prompt.tokens else prompt.prompt or "")
        kind = "chatcmpl" if self._endpoint is Endpoint.CHAT else "cmpl"
        name, fingerprint = self._state.model.name, self._state.fingerprint
        return Heading(ask, f"{kind}-{token_hex(12)}", int(time.time()), name, fingerprint, tuple(echoes))


async def _whole(exchange: Exchange, heading: Heading, reply: "_Reply") -> None:
    answers = [Answer() for _ in heading.ask.requests]
    while not exchange.is_over:
        for choice, piece in await exchange.come():
            answers[choice].add(piece)
    await reply.whole(openai_reply.whole(heading, answers))


async def _stream(exchange: Exchange, heading: Heading, reply: "_Reply") -> None:
    """The status is sent with the first piece: until then a request may yet be refused. Where that takes long, the
    client hears at least that somebody is there."""
    events, waits = Events(heading), True
    while waits:
        pieces = await exchange.come()
        waits = not exchange.is_over
        said = b"".join(events.of(choice, piece) for choice, piece in pieces) if pieces else COMMENT
        await reply.event(said if reply.has_begun else events.opening() + said)
    await reply.last(events.closing())


class _Reply:
    """The response to one request. `status`: what was sent, or what comes of an error that nobody expected."""

    def __init__(self, send: Send):
        self._send, self.status, self.has_begun = send, 500, False
        self._headers = {"x-request-id": f"req_{token_hex(12)}"}

    async def whole(self, data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.has_begun = status, True
        await respond(self._send, status, data, self._headers | dict(headers or {}))

    async def event(self, data: bytes) -> None:
        if not self.has_begun:
            self.status, self.has_begun = 200, True
            await start(self._send, 200, self._headers | _EVENTS)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        await self.event(data)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Before the response has begun it can have the error's status; after that the error is its last event."""
        if self.has_begun:
            await self.last(openai_reply.error(error))
        else:
            await self.whole(error.to_json(), error.status, error.headers)
