"""A request is checked once at each door, and every refusal names the parameter."""

import json
from typing import Any

import pytest

from pptasks.errors import RequestError
from pptasks.request import MAX_MESSAGES, MAX_PROMPT_CHARS, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, Request
from pptasks.wire import MAX_LOGPROBS, Sampling

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}]


def through_json(kwargs: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(kwargs))


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt="Say hello"),
        Request(prompt=" \n\0é😀", raw=True),
        Request(messages=tuple(CHAT)),
        Request(tokens=(0, 5, (1 << 31) - 1), max_tokens=1),
        Request(prompt="x", max_tokens=MAX_TOKENS, temperature=0.7, top_k=40, top_p=0.95, seed=(1 << 64) - 1),
        Request(prompt="x", temperature=1, top_p=1, seed=0),
        Request(prompt="x", max_tokens=0, stop=("\n\n", "é😀", " "), logprobs=0, reply="Az_-09"),
        Request(prompt="x", presence_penalty=-2, frequency_penalty=1.5, logprobs=MAX_LOGPROBS, reply="r" * 64),
    ],
)
def test_a_request_survives_the_message(request_: Request) -> None:
    assert Request.from_kwargs(through_json(request_.to_kwargs())) == request_


def test_only_what_differs_from_the_default_travels() -> None:
    assert Request(prompt="x").to_kwargs() == {"prompt": "x"}
    assert Request(tokens=(1,), seed=0).to_kwargs() == {"tokens": (1,), "seed": 0}


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({}, "exactly one of prompt, messages and tokens, not none"),
        ({"prompt": "a", "tokens": [1]}, "not prompt and tokens"),
        ({"prompt": "", "messages": CHAT}, "not prompt and messages"),
        ({"prompt": "a", "stops": "b"}, "unknown parameter 'stops'; .* stop, logprobs, reply"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
        ({"prompt": "a" * (MAX_PROMPT_CHARS + 1)}, f"{MAX_PROMPT_CHARS + 1} characters; at most {MAX_PROMPT_CHARS}"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "message 0"),
        ({"messages": [*CHAT, {"role": "user"}]}, "message 2"),
        ({"messages": [{**CHAT[0], "name": "x"}]}, "message 0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 0 has role 'tool'; .*system, user, assistant"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0 has role"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 is None, which is not text"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "message 0 holds a lone surrogate"),
        (
            {"messages": CHAT * (MAX_MESSAGES // 2 + 1)},
            f"messages has {MAX_MESSAGES + 2} entries; at most {MAX_MESSAGES}",
        ),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "1,2"}, "tokens"),
        ({"tokens": [1, -1]}, "token 1 is -1"),
        ({"tokens": [1 << 31]}, "token 0 is 2147483648"),
        ({"tokens": [1, 2, 3.0]}, "token 2 is 3.0"),
        ({"tokens": [True]}, "token 0 is True"),
        ({"tokens": [None]}, "token 0 is None"),
        ({"tokens": [0] * (MAX_TOKENS + 1)}, f"tokens has {MAX_TOKENS + 1} entries; at most {MAX_TOKENS}"),
        ({"prompt": "a", "max_tokens": -1}, f"max_tokens is -1: .* 0 to {MAX_TOKENS}"),
        ({"prompt": "a", "max_tokens": 1 << 200}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": None}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature is -0.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "temperature": float("inf")}, "temperature is inf"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "a", "temperature": True}, "temperature is True"),
        ({"prompt": "a", "top_k": -1}, "top_k is -1"),
        ({"prompt": "a", "top_k": 1 << 31}, "top_k"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0"),
        ({"prompt": "a", "top_p": 1.01}, "top_p is 1.01"),
        ({"prompt": "a", "seed": -1}, "seed is -1"),
        ({"prompt": "a", "seed": 1 << 64}, "seed"),
        ({"prompt": "a", "seed": 1.5}, "seed is 1.5"),
        ({"prompt": "a", "max_tokens": 0, "verify": True}, "max_tokens is 0, and verify is true"),
        ({"prompt": "a", "stop": "b"}, "stop is 'b': give a list of at most 16 texts"),
        ({"prompt": "a", "stop": None}, "stop is None"),
        ({"prompt": "a", "stop": {"b": 1}}, "stop is {'b': 1}"),
        ({"prompt": "a", "stop": ["b", ""]}, f"a stop text has 0 characters; give 1 to {MAX_STOP_CHARS}"),
        ({"prompt": "a", "stop": ["b" * (MAX_STOP_CHARS + 1)]}, f"a stop text has {MAX_STOP_CHARS + 1} characters"),
        ({"prompt": "a", "stop": ["b"] * (MAX_STOPS + 1)}, f"list of at most {MAX_STOPS} texts"),
        ({"prompt": "a", "stop": [5]}, "stop is 5, which is not text"),
        ({"prompt": "a", "stop": [["b"]]}, "stop is .*, which is not text"),
        ({"prompt": "a", "stop": ["\ud83d"]}, "stop holds a lone surrogate"),
        ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty is 2.1: give a number from -2.0 to 2.0"),
        ({"prompt": "a", "presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"prompt": "a", "presence_penalty": None}, "presence_penalty is None"),
        ({"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"prompt": "a", "frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"prompt": "a", "frequency_penalty": True}, "frequency_penalty is True"),
        ({"prompt": "a", "logprobs": -1}, f"logprobs is -1: give a whole number from 0 to {MAX_LOGPROBS}"),
        ({"prompt": "a", "logprobs": MAX_LOGPROBS + 1}, f"logprobs is {MAX_LOGPROBS + 1}"),
        ({"prompt": "a", "logprobs": True}, "logprobs is True"),
        ({"prompt": "a", "logprobs": 1.0}, "logprobs is 1.0"),
        ({"prompt": "a", "reply": ""}, "reply is '': give up to 64 letters, digits, '_' or '-'"),
        ({"prompt": "a", "reply": "r" * 65}, "reply is 'r"),
        ({"prompt": "a", "reply": "a:b"}, "reply is 'a:b'"),
        ({"prompt": "a", "reply": "a\n"}, "reply is "),
        ({"prompt": "a", "reply": "é"}, "reply is 'é'"),
        ({"prompt": "a", "reply": "*"}, "reply is"),
        ({"prompt": "a", "reply": 5}, "reply is 5"),
        ({"prompt": "a", "raw": 1}, "raw is 1"),
        ({"prompt": "a", "raw": "yes"}, "raw is"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_refusal_names_the_parameter(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told) as refusal:
        Request.from_kwargs(kwargs)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
def test_a_number_beyond_any_float_is_refused(name: str) -> None:
    kwargs = through_json({"prompt": "a", name: 10**400})
    with pytest.raises(RequestError, match=name):
        Request.from_kwargs(kwargs)


def test_an_unknown_name_is_quoted_in_part() -> None:
    with pytest.raises(RequestError) as refusal:
        Request.from_kwargs({"x" * 100_000: 1})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("kwargs", [{"prompt": 5}, {"tokens": "1,2"}, {"messages": "hello"}])
def test_the_wrong_type_is_not_called_empty(kwargs: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        Request.from_kwargs(kwargs)
    assert "empty" not in str(refusal.value)


def test_a_limit_itself_is_fine() -> None:
    Request(prompt="a" * MAX_PROMPT_CHARS)
    Request(prompt="a", temperature=100, top_k=1 << 30, top_p=1e-6, seed=0)
    Request(prompt="a", stop=("x" * MAX_STOP_CHARS,) * MAX_STOPS, logprobs=MAX_LOGPROBS, max_tokens=0)
    for penalty in (-2, 2):
        Request(prompt="a", presence_penalty=penalty, frequency_penalty=penalty)


def test_a_seed_is_drawn_only_where_it_matters() -> None:
    assert Request(prompt="a").sampling == Sampling(0.0, 0, 1.0, 0)
    assert Request(prompt="a", temperature=1, seed=7, top_k=5, top_p=0.5).sampling == Sampling(1.0, 5, 0.5, 7)
    drawn = {Request(prompt="a", temperature=1).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 1 << 64 for seed in drawn)
    assert Request(prompt="a", temperature=1, seed=0).sampling.seed == 0


def test_penalties_and_log_probabilities_are_part_of_the_sampling() -> None:
    request = Request(prompt="a", presence_penalty=1, frequency_penalty=-0.5, logprobs=4)
    assert request.sampling == Sampling(0.0, 0, 1.0, 0, 1.0, -0.5, 4)
    assert (Request(prompt="a").sampling.is_penalised, request.sampling.is_penalised) == (False, True)
    assert Sampling(frequency_penalty=0.1).is_penalised
