"""Whatever a server streams, a load test counts it, as an answer or as an error."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count

import httpx
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.loadtest_http import Answer, ask

BODY = {"max_tokens": 8}
ERRORS = ("", "cut off", "not understood", "error in the stream", "more text than asked for")


def answered(pieces: list[bytes], status: int = 200) -> tuple[str, Answer]:
    """What `ask` makes of a reply whose body comes in these pieces."""

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def asked() -> str:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as server:
            return await ask(server, BODY, answer, lambda: float(next(clock)))

    answer, clock = Answer(), count()
    return asyncio.run(asked()), answer


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "delta", "content", "usage", "error", "prompt_tokens"]), inner)
    ),
    max_leaves=8,
)
lines = st.binary(max_size=40) | values.map(lambda value: b"data: " + json.dumps(value).encode())


@given(st.lists(lines, max_size=6), st.sampled_from([200, 429, 500]))
@example([b'data: {"choices": [], "usage": {"prompt_tokens": Infinity, "completion_tokens": 1}}'], 200)
@example([b"data: " + b"[" * 100_000], 200)
@example([b'{"error": {"message": 7}}'], 500)
def test_no_reply_is_more_than_an_error(sent: list[bytes], status: int) -> None:
    error, answer = answered([line + b"\n" for line in sent], status)
    assert error in (ERRORS if status == 200 else (str(status),))
    assert error or b"[DONE]" in b"".join(sent)
    assert 0 <= answer.prompt_tokens <= 1 << 31


@given(st.lists(st.text(min_size=1, max_size=5), max_size=8), st.data())
def test_where_a_network_cuts_a_stream_makes_no_difference(texts: list[str], data: st.DataObject) -> None:
    events = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
    whole = (
        b"".join(b"data: %s\r\n\r\n" % json.dumps(event).encode() for event in [*events, usage]) + b"data: [DONE]\n\n"
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    error, answer = answered(pieces)
    assert error == ""
    assert len(answer.pieces_s) == len(texts)
    assert (answer.prompt_tokens, answer.tokens) == (5, 9)
