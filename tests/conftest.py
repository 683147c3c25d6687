"""Fixtures that every test may use. A missing model skips on a laptop and fails in CI (CI=true)."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from orchestrator.broker import EmbeddedBroker

WaitUntil = Callable[..., None]


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """A real Valkey on a private port, with a password, for the whole session."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def redis_url(broker: EmbeddedBroker) -> str:
    """URL of the session's broker, emptied for this test."""
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    return broker.url


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """`wait_until(predicate, timeout=10, what="...")`: poll until the predicate holds, or fail the test."""

    def wait(predicate: Callable[[], object], timeout: float = 10.0, what: str = "the condition") -> None:
        deadline = time.monotonic() + timeout
        while not predicate():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not hold within {timeout} s")
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Folder of the golden models and their expected tokens."""
    return Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, downloaded once into the user's cache."""
    from pptasks.config import Settings
    from pptasks.errors import ModelError
    from pptasks.models import open_model

    try:
        return open_model("smollm2:135m", cache=Settings.from_env().cache).path
    except ModelError as error:
        lacks(f"smollm2:135m ({error})")


def lacks(what: str) -> NoReturn:
    """End a test that needs what is not there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"this test needs {what}")
    pytest.skip(f"needs {what}")
