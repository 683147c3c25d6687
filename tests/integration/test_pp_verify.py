"""`pp verify` from outside, and the same check as a request to workers started by hand, one of which is wrong."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.errors import RequestError
from pptasks.models import open_model
from pptasks.request import Request
from tests.integration.hand import by_hand
from tests.integration.run import Command, assert_one_line, pp

TOKENS = "7,8,9,430,51"
SECRET = "ab" * 32


@pytest.mark.parametrize("link", ["direct", "iroh"])
def test_a_sound_run_is_verified(tmp_path: Path, goldens: Path, link: str) -> None:
    argv = ["verify", "--model", str(goldens / "qwen3-tied"), "--stages", "3", "--tokens", TOKENS, "--link", link]
    ended = pp(tmp_path, *argv, "--json")
    assert ended.code == 0, ended.stderr
    found = ended.report["verification"]
    assert found["passed"]
    assert found["exact"]
    assert list(found["token_ids"]) == ended.report["token_ids"]
    assert [c["values_differ"] for c in found["stages"]] == [0, 0, 0]


def test_for_people_there_is_a_table(tmp_path: Path, goldens: Path) -> None:
    ended = pp(tmp_path, "verify", "--model", str(goldens / "gpt2"), "--max-tokens", "4")
    assert ended.code == 0, ended.stderr
    assert "from position" in ended.stdout
    assert ended.stdout.rstrip().endswith("every bit of every hidden state is the same")


def test_a_run_that_cannot_be_verified_exits_1(tmp_path: Path, goldens: Path) -> None:
    """The file changes after the stages have loaded it: what the head loads to verify them is another model."""
    folder = Path(shutil.copytree(goldens / "llama-tied", tmp_path / "model"))
    argv = ["--model", str(folder), "--stages", "2", "--tokens", TOKENS, "--max-tokens", "240"]
    with Command(tmp_path, "verify", *argv) as command:
        command.wait_for(lambda: "stage 0: ready" in command.stderr and "stage 1: ready" in command.stderr, "stages")
        spoil(folder, "blk.4.ffn_down.weight")
        ended = command.wait()
    assert ended.code == 1
    assert_one_line(ended.stderr, "the hidden state after stage 1 differs from position 0 on")
    assert "from position" in ended.stdout


@pytest.fixture
def settings(redis_url: str, goldens: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=str(goldens / "llama-tied"), num_stages=3, broker=redis_url, run="verified", secret=SECRET, wire="bf16",
        verify=True,
        cache=Settings.from_env().cache, cc=Settings.from_env().cc,
    )  # fmt: skip


@pytest.fixture
def with_a_wrong_stage(settings: Settings, goldens: Path, tmp_path: Path) -> Iterator[Client]:
    """Stage 2 holds a file with the same header, and one matrix of zeros: same plan, same fingerprint, fluent text."""
    other = Path(shutil.copytree(goldens / "llama-tied", tmp_path / "other"))
    spoil(other, "blk.5.attn_output.weight")
    with ExitStack() as stack:
        for stage in range(3):
            model = str(other) if stage == 2 else settings.model
            own = replace(settings, model=model)
            stack.enter_context(by_hand(stage, own, tmp_path / f"log{stage}"))
        yield Client(make_app(settings))


def test_a_stage_with_other_weights_is_named(with_a_wrong_stage: Client) -> None:
    client = with_a_wrong_stage
    request = client.submit(Request(tokens=(7, 8, 9, 430, 51), max_tokens=12, verify=True))
    result = client.result(request, timeout_s=60)
    found = result["verification"]
    assert not found["passed"]
    assert found["exact"]
    assert found["reason"].startswith("the hidden state after stage 2 differs from position 0 on")
    assert [c["values_differ"] > 0 for c in found["stages"]] == [False, False, True]
    again = client.result(client.submit(Request(tokens=(7, 8, 9, 430, 51), max_tokens=12)), timeout_s=60)
    assert again["token_ids"] == result["token_ids"]  # unverified, nobody would have noticed
    assert "verification" not in again


def spoil(folder: Path, name: str) -> None:
    """Zeros in the place of a tensor, in the middle of a file whose header stays."""
    ref = open_model(folder, folder).tensors[name]
    with ref.file.open("r+b") as file:
        file.seek(ref.offset)
        file.write(bytes(ref.nbytes))


def test_the_report_fits_json(tmp_path: Path, goldens: Path) -> None:
    ended = pp(tmp_path, "verify", "--model", str(goldens / "llama-tied"), "--tokens", TOKENS, "--json", "--quiet")
    assert json.loads(ended.stdout)["verification"]["stages"][0]["first_position"] is None
    assert ended.stderr == ""


def test_a_head_that_was_not_told_to_verifies_nothing(settings: Settings, tmp_path: Path) -> None:
    """Any producer could else have it fetch all layers, and wait."""
    with by_hand(0, replace(settings, num_stages=1, verify=False), tmp_path / "log"):
        client = Client(make_app(replace(settings, num_stages=1)))
        with pytest.raises(RequestError, match="PP_VERIFY=1"):
            client.result(client.submit(Request(tokens=(7, 8), verify=True)), timeout_s=60)
