"""The main job on an NVIDIA GPU, with tinygrad's own kernels. Skipped where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
