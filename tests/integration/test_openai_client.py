"""The official `openai` package against `pp serve` with SmolLM2."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.integration.serving import KEY, LONG, Served

PARIS: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
COUNT: Any = [{"role": "user", "content": "Count from one to ten."}]
MODEL = "smollm2:135m"


@pytest.fixture
def client(smollm2: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smollm2.url}/v1", api_key="none is asked for", max_retries=0) as client:
        yield client


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=PARIS, max_completion_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.message.refusal, choice.finish_reason) == ("assistant", None, "stop")
    assert (answer.object, answer.model, choice.index, choice.logprobs) == ("chat.completion", MODEL, 0, None)
    assert answer.system_fingerprint
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id
    usage = answer.usage
    assert usage
    assert usage.prompt_tokens > 10
    assert 0 < usage.completion_tokens < 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details


def test_a_chat_that_streams(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=COUNT, max_tokens=40, temperature=0)
    with client.chat.completions.create(
        model=MODEL, messages=COUNT, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        first, *chunks, last = stream
    assert first.choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 10
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage and last.usage.completion_tokens) == (
        [],
        whole.usage and whole.usage.completion_tokens,
    )


def test_the_packages_own_helper_for_streams(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=PARIS, max_tokens=20, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "Paris" in "".join(texts)
    assert final.choices[0].message.content == "".join(texts)


def test_a_completion_whole_and_streaming(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    assert "Paris" in whole.choices[0].text
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    with client.completions.create(**asked, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_log_probabilities(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(**asked, messages=PARIS, logprobs=True, top_logprobs=2).choices[0]
    assert chat.logprobs
    assert chat.logprobs.content
    assert "".join(token.token for token in chat.logprobs.content).startswith(chat.message.content or "?")
    for token in chat.logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert bytes(token.bytes or ()).decode() == token.token
    text = client.completions.create(**asked, prompt="The capital of France is", logprobs=3).choices[0]
    assert text.logprobs
    assert "".join(text.logprobs.tokens or ()) == text.text
    assert text.logprobs.text_offset
    assert text.logprobs.text_offset[0] == 0
    assert [len(top) for top in text.logprobs.top_logprobs or ()] == [3] * 5
    with client.chat.completions.create(**asked, messages=PARIS, logprobs=True, stream=True) as stream:
        streamed = [t for chunk in stream if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content or ()]
    assert [t.token for t in streamed] == [t.token for t in chat.logprobs.content]


def test_several_choices(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    answer = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts[0] == client.chat.completions.create(**asked).choices[0].message.content
    said = ["", "", ""]
    with client.chat.completions.create(**asked, n=3, stream=True) as stream:
        for chunk in stream:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == texts


def test_stop_texts(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    (choice,) = client.completions.create(**asked, stop=[stop, "never said"]).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_penalties_change_what_repeats(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "ha ha ha ha ha ha", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, frequency_penalty=2, presence_penalty=2).choices[0].text != plain


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_the_asynchronous_client(smollm2: Served) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="x", max_retries=0) as client:
            asked: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0}
            chats = [client.chat.completions.create(**asked, messages=PARIS) for _ in range(4)]
            for answer in await asyncio.gather(*chats):
                assert "Paris" in (answer.choices[0].message.content or "")
            said = ""
            async with await client.chat.completions.create(**asked, messages=PARIS, stream=True) as stream:
                async for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
            assert said == answer.choices[0].message.content
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**asked, messages=PARIS, tools=[{"type": "function"}])  # type: ignore[list-item]

    asyncio.run(ask())


# ---- errors ----


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"temperature": 5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_its_parameter(client: OpenAI, fields: Any, param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": PARIS, "stream": stream} | fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert param in str(caught.value)


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        client.completions.create(model=MODEL, prompt="word " * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_another_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=PARIS)
    assert caught.value.code == "model_not_found"


def test_a_wrong_key(strict: Served) -> None:
    with OpenAI(base_url=f"{strict.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with OpenAI(base_url=f"{strict.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.models.list().data


def test_a_full_queue_is_a_rate_limit_and_a_client_that_waits_gets_its_answer(strict: Served) -> None:
    with OpenAI(base_url=f"{strict.url}/v1", api_key=KEY, max_retries=0) as client:
        with client.completions.create(**LONG, model=strict.model, n=2, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=strict.model, prompt="x", max_tokens=1)
            assert caught.value.response.headers["retry-after"]
        patient = client.with_options(max_retries=5)
        assert patient.completions.create(model=strict.model, prompt="x", max_tokens=1).choices
