"""What OpenAI's clients send: read as it is meant, or refused by the name of what is at fault."""

import json
import sys
from typing import Any

import pytest

from orchestrator.serve.openai_ask import MAX_CHOICES, MAX_N, Ask, Endpoint, parse
from orchestrator.serve.openai_errors import ApiError
from orchestrator.serve.openai_params import NEUTRAL
from pptasks.request import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MIN_TOP_P

CONTEXT = 2048
HELLO = [{"role": "user", "content": "Say hello"}]


def chat(**fields: Any) -> Ask:
    body = json.dumps({"model": "m", "messages": HELLO} | fields)
    return parse(body.encode(), Endpoint.CHAT, CONTEXT)


def text(**fields: Any) -> Ask:
    return parse(json.dumps({"model": "m", "prompt": "Once"} | fields).encode(), Endpoint.TEXT, CONTEXT)


def refused(ask: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.status == 400
    return caught.value


# ---- what is asked for ----


def test_a_chat_has_openais_defaults_and_the_whole_context() -> None:
    ask = chat()
    (request,) = ask.requests
    assert request.messages == ({"role": "user", "content": "Say hello"},)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (1.0, 1.0, 0, None)
    assert (request.max_tokens, request.logprobs, request.stop, request.raw) == (CONTEXT, None, (), False)
    assert (ask.model, ask.n, ask.stream, ask.include_usage, ask.echo) == ("m", 1, False, False, False)


def test_a_completion_is_raw_and_has_16_tokens() -> None:
    (request,) = text().requests
    assert (request.prompt, request.raw, request.max_tokens, request.temperature) == ("Once", True, 16, 1.0)


def test_everything_that_is_served_reaches_the_request() -> None:
    (request,) = chat(
        temperature=0.5, top_p=0.9, top_k=40, seed=7, max_tokens=5, presence_penalty=1, frequency_penalty=-2,
        logprobs=True, top_logprobs=3, stop=["a", "b"],
    ).requests  # fmt: skip
    assert (request.temperature, request.top_p, request.top_k, request.seed, request.max_tokens) == (0.5, 0.9, 40, 7, 5)
    assert (request.presence_penalty, request.frequency_penalty) == (1.0, -2.0)
    assert (request.logprobs, request.stop) == (3, ("a", "b"))


def test_null_means_not_given() -> None:
    names = ["temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "stream_options", "logprobs",
             "top_logprobs", "max_tokens", "max_completion_tokens", "presence_penalty", *NEUTRAL]  # fmt: skip
    assert chat(**dict.fromkeys(names)) == chat()
    assert text(**dict.fromkeys(["echo", "best_of", "suffix", "max_tokens", "logprobs"])) == text()


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 0}, 0),
        ({}, CONTEXT),
    ],
)
def test_most_tokens_of_a_chat_have_two_names(fields: dict[str, int], most: int) -> None:
    assert chat(**fields).requests[0].max_tokens == most


def test_max_tokens_of_zero_is_not_the_default() -> None:
    assert text(max_tokens=0).requests[0].max_tokens == 0


def test_roles_and_parts_become_what_the_template_knows() -> None:
    ask = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": [], "annotations": []},
            {"role": "user", "content": ""},
        ]
    )
    assert ask.requests[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": ""},
    )


@pytest.mark.parametrize(
    ("prompt", "prompts", "tokens"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [(1, 2)]),
        ([[1], [2, 3]], [None, None], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[str | None], tokens: list[Any]) -> None:
    requests = text(prompt=prompt).requests
    assert [r.prompt for r in requests] == prompts
    assert [r.tokens for r in requests] == tokens


def test_choices_count_the_seed_up_and_go_by_prompt() -> None:
    ask = text(prompt=["a", "b"], n=3, seed=10)
    assert [(r.prompt, r.seed) for r in ask.requests] == [
        ("a", 10), ("a", 11), ("a", 12), ("b", 10), ("b", 11), ("b", 12),
    ]  # fmt: skip
    assert [ask.prompt_of(i).prompt for i in range(6)] == ["a", "a", "a", "b", "b", "b"]
    assert [r.seed for r in chat(n=2).requests] == [None, None]


@pytest.mark.parametrize(("given", "seed"), [(-1, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1), (0, 0)])
def test_a_seed_of_64_bits_may_have_a_sign(given: int, seed: int) -> None:
    assert chat(seed=given).requests[0].seed == seed


def test_the_seed_of_a_last_choice_wraps_around() -> None:
    assert [r.seed for r in chat(seed=(1 << 64) - 1, n=2).requests] == [(1 << 64) - 1, 0]


def test_ways_to_say_the_likeliest_or_all() -> None:
    assert chat(top_p=0).requests[0].top_p == MIN_TOP_P
    assert chat(top_k=-1).requests[0].top_k == 0


@pytest.mark.parametrize(("given", "stops"), [("x", ("x",)), (["x", "y"], ("x", "y")), ([], ()), (None, ())])
def test_stop_is_a_text_or_a_list(given: Any, stops: tuple[str, ...]) -> None:
    assert chat(stop=given).requests[0].stop == stops


def test_log_probabilities_of_a_chat_and_of_a_completion() -> None:
    assert chat(logprobs=True).requests[0].logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).requests[0].logprobs == 20
    assert chat(logprobs=False).requests[0].logprobs is None
    assert text(logprobs=0).requests[0].logprobs == 0
    assert text(logprobs=5).requests[0].logprobs == 5


def test_usage_may_be_asked_for_in_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_obfuscation": False}).include_usage


# ---- what is refused ----

ASKS_FOR_MORE: dict[str, Any] = {
    "tools": [{"type": "function"}], "tool_choice": "auto", "functions": [{}], "function_call": "auto",
    "response_format": {"type": "json_object"}, "logit_bias": {"5": 1}, "audio": {}, "modalities": ["text", "audio"],
    "store": True, "service_tier": "flex", "prediction": {}, "web_search_options": {}, "reasoning_effort": "high",
    "verbosity": "low", "best_of": 2, "suffix": "x", "parallel_tool_calls": "yes", "user": 5, "metadata": [],
    "safety_identifier": 1, "prompt_cache_key": 1, "prompt_cache_retention": 24, "moderation": {}, "min_p": 0.1,
    "repetition_penalty": 1.1,
}  # fmt: skip
ASKS_FOR_NOTHING: dict[str, Any] = {
    "tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "response_format": {"type": "text"},
    "logit_bias": {}, "modalities": ["text"], "store": False, "service_tier": "auto", "reasoning_effort": "none",
    "verbosity": "medium", "best_of": 1, "suffix": "", "parallel_tool_calls": True, "user": "me",
    "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "24h",
    "min_p": 0, "repetition_penalty": 1.0,
}  # fmt: skip


def test_every_known_parameter_that_is_not_served_is_in_these_tests() -> None:
    assert set(ASKS_FOR_MORE) == set(NEUTRAL)
    assert set(ASKS_FOR_NOTHING) | {"audio", "prediction", "web_search_options", "moderation"} == set(NEUTRAL)


@pytest.mark.parametrize("name", ASKS_FOR_MORE)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    for ask in (chat, text):
        error = refused(ask, **{name: ASKS_FOR_MORE[name]})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert name in str(error)


@pytest.mark.parametrize("name", ASKS_FOR_NOTHING)
def test_what_asks_for_nothing_is_taken(name: str) -> None:
    assert chat(**{name: ASKS_FOR_NOTHING[name]}) == chat()
    assert text(**{name: ASKS_FOR_NOTHING[name]}) == text()


@pytest.mark.parametrize(
    ("ask", "name"),
    [(chat, "temprature"), (chat, "prompt"), (chat, "echo"), (text, "messages"), (text, "top_logprobs")],
)
def test_an_unknown_parameter_is_named(ask: Any, name: str) -> None:
    error = refused(ask, **{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"max_tokens": 16.0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 1}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": HELLO * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_chat_that_cannot_be_served_names_the_parameter(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 8}, "prompt"),
        ({"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 0}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_completion_that_cannot_be_served_names_the_parameter(fields: dict[str, Any], param: str) -> None:
    assert refused(text, **fields).param == param


BOMBS = {
    "no JSON": b"hello",
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"x"',
    "not UTF-8": b'{"model": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"model": "m"}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "nested lists": b'{"model": ' + b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000,
    "NaN": b'{"model": "m", "temperature": NaN}',
    "infinity": b'{"model": "m", "temperature": -Infinity}',
    "a whole number of 100,000 digits": b'{"model": "m", "max_tokens": ' + b"9" * 100_000 + b"}",
    "cut short": b'{"model": "m", "messages": [',
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    for endpoint in Endpoint:
        with pytest.raises(ApiError) as caught:
            parse(body, endpoint, CONTEXT)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", ["1e999", "9" * 4000, "-1e999", "1e-999999"])
def test_numbers_beyond_all_measure_are_out_of_range(number: str) -> None:
    body = (
        f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "presence_penalty": 3, "seed": {number}}}'
    )
    with pytest.raises(ApiError) as caught:
        parse(body.encode(), Endpoint.CHAT, CONTEXT)
    assert caught.value.param == "seed"
    assert len(caught.value.to_json()) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": [{"role": "user", "content": "\\ud800"}]', "messages[0].content"),
        ('"messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"', "stop"),
        ('"messages": [{"role": "\\ud800", "content": "x"}]', "messages[0].role"),
        ('"messages": [{"role": "user", "content": "x"}], "\\ud800": 1', "\ud800"),
    ],
)
def test_half_a_surrogate_is_refused_and_can_be_told(fields: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(f'{{"model": "m", {fields}}}'.encode(), Endpoint.CHAT, CONTEXT)
    assert caught.value.param == param
    assert json.loads(caught.value.to_json())["error"]["param"] == param


def test_a_nest_that_can_be_read_can_be_refused() -> None:
    """However deep Python's own limit lets it be."""
    depth = sys.getrecursionlimit() // 2
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * depth + b"]" * depth + b"}"
    )
    with pytest.raises(ApiError, match=r"tools|nested"):
        parse(body, Endpoint.CHAT, CONTEXT)


def test_an_error_is_what_openais_clients_read() -> None:
    error = refused(chat, tools=[1])
    assert json.loads(error.to_json()) == {
        "error": {
            "message": "tools is not supported: leave it out",
            "type": "invalid_request_error",
            "param": "tools",
            "code": "unsupported_parameter",
        }
    }
