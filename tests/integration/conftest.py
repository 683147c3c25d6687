"""What the tests of models from a Hub share: its repositories, and a cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from tests.integration.serving import Served
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


@pytest.fixture(scope="session")
def long_golden(tmp_path_factory: pytest.TempPathFactory, goldens: Path) -> Path:
    """A golden model that takes 16384 positions; RoPE has no limit of its own."""
    folder = shutil.copytree(goldens / "llama-tied", tmp_path_factory.mktemp("long") / "llama-tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, long_golden: Path) -> Iterator[Served]:
    """`pp serve` of a golden model over two stages, f32 between them; so small that a token takes a millisecond."""
    argv = ("--wire", "f32", "--context", "4096", "--model", str(long_golden))
    with Served(tmp_path_factory.mktemp("tiny"), *argv) as served:
        yield served
        ended = served.stop()
    assert (ended.code, ended.kept) == (0, ()), ended.stderr


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Served]:
    """`pp serve` of SmolLM2 over two stages."""
    with Served(tmp_path_factory.mktemp("smollm2"), "--model", "smollm2:135m") as served:
        yield served
        ended = served.stop()
    assert (ended.code, ended.kept) == (0, ()), ended.stderr
