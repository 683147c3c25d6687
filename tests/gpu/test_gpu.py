"""The main job on an NVIDIA GPU, with tinygrad's own kernels. Skipped where there is none."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cluster import LocalCluster
from orchestrator.run import Options
from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.request import Request


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")]


def run(*argv: str) -> dict:
    """`pp run --json` with tinygrad on CUDA; both stages share the GPU."""
    command = [sys.executable, "-m", "orchestrator.cli", "run", "--json", "-q", "--timeout", "240", *argv]
    done = subprocess.run(command, env={**os.environ, "DEV": "CUDA"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("split", ["3,3", "0,2,4"])
def test_two_stages_on_a_gpu_yield_the_golden_tokens(goldens: Path, split: str) -> None:
    folder = goldens / "llama-tied"
    golden = json.loads((folder / "expected.json").read_text())
    prompt = ",".join(map(str, golden["prompt_ids"]))
    answer = run("--model", str(folder), "--split", split, "--wire", "f32", "--tokens", prompt, "--max-tokens", "24")
    assert answer["token_ids"] == golden["greedy_ids"]
    assert {stage["device"].split(":")[0] for stage in answer["stages"]} == {"CUDA"}


def test_the_real_model_answers_on_a_gpu(smollm2_gguf: Path) -> None:
    answer = run("--model", str(smollm2_gguf), "--max-tokens", "20", "What is the capital of France?")
    assert "Paris" in answer["text"]


def test_many_at_once_get_the_tokens_that_each_gets_alone(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts that begin alike, so that the KV cache is copied between slots on the device."""
    monkeypatch.setenv("DEV", "CUDA")
    model = open_model(goldens / "llama-tied", cache=Settings().cache)
    settings = replace(Settings.of_this_machine(), model=model.spec, split="3,3", wire="f32")
    prompts = [tuple(range(5, 35)) + tuple(range(40, 41 + i)) for i in range(8)]
    with LocalCluster(settings, make_plan(model, settings), Options(timeout_s=240), lambda *_: None) as cluster:
        client = Client(make_app(cluster.settings))

        def answers(ids: list[str]) -> list[list[int]]:
            return [client.result(request_id, timeout_s=120)["token_ids"] for request_id in ids]

        alone = [answers([client.submit(Request(tokens=prompt, max_tokens=16))])[0] for prompt in prompts]
        together = answers([client.submit(Request(tokens=prompt, max_tokens=16)) for prompt in prompts])
        assert together == alone
        assert cluster.stages.refresh()[0].cached_tokens > 0
