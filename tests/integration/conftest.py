"""What the tests of models from a Hub share: its repositories, and a cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from tests.remote import SHARDED, TIED, write_repo


@pytest.fixture(scope="session")
def gguf_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repo(tmp_path_factory.mktemp("repo"))


@pytest.fixture
def server(goldens: Path, gguf_repo: Path) -> Iterator[FakeHub]:
    repos = {TIED: goldens / "llama-tied", SHARDED: goldens / "llama-untied-sharded-bf16", "o/q": gguf_repo}
    with FakeHub(repos) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
