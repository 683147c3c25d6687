"""What the tests of models from a Hub share: its repositories, and a cache. tinygrad runs $CC for each kernel: it is
chosen as a worker does, before any test imports tinygrad."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pptasks.config import Settings
from tests.fake_hub import FakeHub
from tests.integration.run import Command
from tests.integration.serving import KEY, PAGE, Served
from tests.remote import SHARDED, TIED, write_repo
from workers.clang import compiler

os.environ["CC"] = compiler(os.environ, Settings.from_env().cache)


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
    """A golden model that takes 16384 positions (RoPE has no limit of its own), and begins every text with bos: its
    tokenizer adds one, and so does its chat template."""
    folder = shutil.copytree(goldens / "llama-tied", tmp_path_factory.mktemp("long") / "llama-tied")
    change(folder / "config.json", max_position_embeddings=16384)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    change(folder / "tokenizer_config.json", add_bos_token=True, chat_template="{{ bos_token }}" + template)
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


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


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory, long_golden: Path) -> Iterator[Served]:
    """`pp serve` with a key, on a cluster that another command holds, for two answers at once."""
    folder = tmp_path_factory.mktemp("strict")
    with Command(folder, "up", "--json", "--name", "held", "--wire", "f32", "--model", str(long_golden)) as up:
        assert up.process.stdout
        assert b'"held"' in up.process.stdout.readline()
        argv = ("--cluster", "held", "--cors", PAGE, "--max-queue", "2")
        with Served(folder, *argv, PP_API_KEY=KEY, XDG_STATE_HOME=str(up.state)) as served:
            served.http.headers["Authorization"] = f"Bearer {KEY}"
            yield served
            assert served.stop().code == 0
        up.signal(signal.SIGINT)
        assert up.wait().code == 0
