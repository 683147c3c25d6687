"""A request from what a command was given."""

import json
from pathlib import Path

import pytest

from orchestrator import asked
from pptasks.errors import RequestError, UsageError
from pptasks.request import Request

GIVEN = {"max_tokens": 8, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
USER = {"role": "user", "content": "Hi"}
PIRATE = {"role": "system", "content": "You are a pirate."}


def request(
    prompt: str | None = None, chat: Path | None = None, tokens: str | None = None, raw: bool = False, **given: object
) -> Request:
    return asked.request(prompt, chat, tokens, raw, {**GIVEN, **given})


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([USER]))
    return file


def test_what_is_told_of_the_answer_reaches_the_request() -> None:
    told = {"stop": ("a", "b"), "presence_penalty": 1.0, "frequency_penalty": -1.0, "logprobs": 2}
    assert request("Hi", **told, quiet=True) == Request(prompt="Hi", **GIVEN, **told)
    assert request("Hi") == Request(prompt="Hi", **GIVEN)  # a command that has none of these options


def test_a_system_text_comes_first(chat: Path) -> None:
    for made in (request("Hi", system=PIRATE["content"]), request(chat=chat, system=PIRATE["content"])):
        assert made == Request(messages=(PIRATE, USER), **GIVEN)
    assert request(chat=chat, system=None) == Request(messages=(USER,), **GIVEN)


def test_a_system_text_that_has_no_place(chat: Path) -> None:
    for given, words in (({"prompt": "Hi", "raw": True}, "--raw"), ({"tokens": "1,2"}, "--tokens")):
        with pytest.raises(UsageError, match=f"--system and {words}"):
            request(**given, system="x")
    chat.write_text(json.dumps([PIRATE, USER]))
    with pytest.raises(UsageError, match="has a system message already"):
        request(chat=chat, system="x")


def test_an_empty_prompt_stays_one_with_a_system_text() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        request("", system="x")
