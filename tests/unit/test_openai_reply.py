"""Pieces of answers, as OpenAI's clients read them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.serve import openai_errors
from orchestrator.serve.openai_ask import Ask, Endpoint
from orchestrator.serve.openai_errors import ApiError, bad
from orchestrator.serve.openai_reply import Answer, Events, Heading, error, usage, whole
from pptasks.errors import BrokerError, Busy, NotReady, PPError, PromptTooLong, RequestError, StageFailed, VerifyFailed
from pptasks.request import Request
from pptasks.stream import Account, Piece, TokenLogprobs

CHAT = Request(messages=({"role": "user", "content": "x"},))
TEXT = Request(prompt="Once", raw=True)
EMOJI = "\N{GRINNING FACE}"


def heading(ask: Ask, *echoes: str) -> Heading:
    return Heading(ask, "id-1", 1700000000, "m", "fp_1", echoes)


def chat(n: int = 1, stream: bool = False, include_usage: bool = False, **request: Any) -> Heading:
    return heading(Ask(Endpoint.CHAT, "m", (replace(CHAT, **request),), n, stream, include_usage))


def answer(*pieces: Piece) -> Answer:
    made = Answer()
    for piece in pieces:
        made.add(piece)
    return made


def said(text: str, *logprobs: TokenLogprobs) -> Piece:
    return Piece("r", tuple(range(len(logprobs) or 1)), text, logprobs)


def end(reason: str = "stop", prompt: int = 5, cached: int = 0, completion: int = 2) -> Piece:
    return Piece("r", end="ok", account=Account(reason, prompt, cached, completion))


def token(text: str, logprob: float = -0.5, *top: tuple[int, str, float]) -> TokenLogprobs:
    return TokenLogprobs(1, text, text.encode(), logprob, top)


def events(data: bytes) -> list[Any]:
    """What a client reads: the JSON of each event, and "[DONE]"."""
    lines = data.decode("ascii").split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_a_chat_that_is_whole() -> None:
    response = json.loads(whole(chat(), [answer(said("Hel"), said("lo"), end())]))
    assert response == {
        "id": "id-1", "object": "chat.completion", "created": 1700000000, "model": "m", "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip


def test_a_completion_that_is_whole_and_repeats_its_prompts() -> None:
    ask = Ask(Endpoint.TEXT, "m", (TEXT, TEXT), n=2, echo=True)
    answers = [answer(said(text), end("length")) for text in "abcd"]
    response = json.loads(whole(heading(ask, "One ", "Two "), answers))
    assert response["object"] == "text_completion"
    assert [c["text"] for c in response["choices"]] == ["One a", "One b", "Two c", "Two d"]
    assert [c["index"] for c in response["choices"]] == [0, 1, 2, 3]
    assert {c["finish_reason"] for c in response["choices"]} == {"length"}


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    ask = Ask(Endpoint.TEXT, "m", (TEXT, TEXT), n=2)
    accounts = [
        Account("stop", 10, 8, 1),
        Account("stop", 10, 0, 2),
        Account("stop", 20, 16, 3),
        Account("stop", 20, 4, 4),
    ]
    assert usage(ask, accounts) == {
        "prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


def test_a_chat_that_streams() -> None:
    made = Events(chat(stream=True))
    opening, *pieces = made.opening(), made.of(0, said("Hel")), made.of(0, said("lo")), made.of(0, end())
    first, one, two, last, done = events(b"".join([opening, *pieces, made.closing()]))
    assert done == "[DONE]"
    for chunk in (first, one, two, last):
        assert {k: chunk[k] for k in ("id", "object", "created", "model", "system_fingerprint")} == {
            "id": "id-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m",
            "system_fingerprint": "fp_1",
        }  # fmt: skip
        assert "usage" not in chunk
    assert [chunk["choices"][0]["delta"] for chunk in (first, one, two, last)] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, one, two, last)] == [None, None, None, "stop"]


def test_usage_comes_last_in_a_stream_and_is_null_before() -> None:
    made = Events(chat(n=2, stream=True, include_usage=True))
    data = [made.opening(), *(made.of(i, p) for i in (1, 0) for p in (said("x"), end(cached=3 + i))), made.closing()]
    *chunks, last, done = events(b"".join(data))
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * 6
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


@pytest.mark.parametrize("text", [EMOJI, 'a"b\\c', "\n\r\u2028\0", "é", "data: [DONE]\n\n"])
def test_any_text_survives_an_event(text: str) -> None:
    for made in (Events(chat(stream=True)), Events(heading(Ask(Endpoint.TEXT, "m", (TEXT,), stream=True)))):
        (chunk,) = events(made.of(0, said(text)))
        choice = chunk["choices"][0]
        assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == text


def test_choices_of_a_stream_keep_their_index() -> None:
    made = Events(chat(n=3, stream=True))
    assert [chunk["choices"][0]["index"] for chunk in events(made.opening())] == [0, 1, 2]
    assert [events(made.of(i, said("x")))[0]["choices"][0]["index"] for i in (2, 0, 1)] == [2, 0, 1]


def test_a_piece_that_says_nothing_yet_is_no_event() -> None:
    assert Events(chat(stream=True)).of(0, said("")) == b""


def test_a_piece_may_say_something_and_be_the_last() -> None:
    made = Events(chat(stream=True))
    one, last = events(made.of(0, replace(end(), ids=(7,), text="!")))
    assert one["choices"][0]["delta"] == {"content": "!"}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_completion_that_streams_begins_with_its_prompt() -> None:
    made = Events(heading(Ask(Endpoint.TEXT, "m", (TEXT, TEXT), stream=True, echo=True), "One", "Two"))
    assert [c["choices"][0]["text"] for c in events(made.opening())] == ["One", "Two"]
    quiet = Events(heading(Ask(Endpoint.TEXT, "m", (TEXT,), stream=True)))
    assert quiet.opening() == b""
    assert events(quiet.of(0, end("length")))[0]["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    ]


def test_log_probabilities_of_a_chat() -> None:
    tokens = (token("Hel", -0.25, (1, "Hel", -0.25), (2, "Hi", -1.5)), token("é", -2.0))
    entry = {"token": "Hel", "logprob": -0.25, "bytes": [72, 101, 108]}
    content = [
        entry | {"top_logprobs": [entry, {"token": "Hi", "logprob": -1.5, "bytes": [72, 105]}]},
        {"token": "é", "logprob": -2.0, "bytes": [195, 169], "top_logprobs": []},
    ]
    made = chat(logprobs=2)
    (choice,) = json.loads(whole(made, [answer(said("Helé", *tokens), end())]))["choices"]
    assert choice["logprobs"] == {"content": content, "refusal": None}
    (chunk,) = events(Events(made).of(0, said("Helé", *tokens)))
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]


def test_a_token_is_told_before_its_character_is_whole() -> None:
    made = Events(chat(stream=True, logprobs=0))
    half = TokenLogprobs(5, "\N{REPLACEMENT CHARACTER}", b"\xf0\x9f", -1.0)
    (chunk,) = events(made.of(0, Piece("r", (5,), "", (half,))))
    assert chunk["choices"][0]["delta"] == {"content": ""}
    assert chunk["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xF0, 0x9F]


def test_log_probabilities_of_a_completion_count_characters_from_the_start_of_its_text() -> None:
    ask = Ask(Endpoint.TEXT, "m", (replace(TEXT, logprobs=1),), stream=True, echo=True)
    pieces = [said("ab", token("ab", -0.5, (1, "ab", -0.5))), said("cd", token("c", -1.0, (9, "x", -0.1)), token("d"))]
    logprobs = json.loads(whole(heading(ask, "Once"), [answer(*pieces, end())]))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["ab", "c", "d"],
        "token_logprobs": [-0.5, -1.0, -0.5],
        "top_logprobs": [{"ab": -0.5}, {"x": -0.1, "c": -1.0}, {"d": -0.5}],
        "text_offset": [4, 6, 7],
    }
    made = Events(heading(ask, "Once"))
    streamed = [events(made.of(0, piece))[0]["choices"][0]["logprobs"] for piece in pieces]
    assert [offset for part in streamed for offset in part["text_offset"]] == [4, 6, 7]


def test_an_error_in_a_stream_is_an_event_with_nothing_behind_it() -> None:
    (event,) = events(error(bad("no", "stop")))
    assert event["error"]["param"] == "stop"


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        (RequestError("the prompt is empty"), 400, None),
        (PromptTooLong("the prompt has 9 tokens, but the context holds 8"), 400, "context_length_exceeded"),
        (Busy("1024 requests wait"), 429, "rate_limit_exceeded"),
        (StageFailed("stage 1 failed"), 503, "unavailable"),
        (BrokerError("the broker was lost"), 503, "unavailable"),
        (NotReady("stage 1 is not ready"), 503, "unavailable"),
        (VerifyFailed("it differs"), 500, None),
    ],
)
def test_errors_have_the_status_that_clients_expect(cause: PPError, status: int, code: str | None) -> None:
    for told in (openai_errors.of(cause), openai_errors.of_head(str(cause), type(cause).__name__)):
        assert (told.status, told.code, str(told)) == (status, code, str(cause))
        assert ("retry-after" in told.headers) == (status in (429, 503))


@pytest.mark.parametrize("name", ["", "SystemExit", "Exception", "object", "x" * 40])
def test_a_head_cannot_name_an_error_that_is_none(name: str) -> None:
    assert openai_errors.of_head("what it says", name).status == 500


def test_an_error_of_the_api_stays_what_it_is() -> None:
    mine = ApiError(418, "no coffee")
    assert openai_errors.of(mine) is mine
