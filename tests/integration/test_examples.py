"""The examples run as they stand, against a pipeline, and need nothing of pptasks."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
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

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = ("Say hello", "Count to three", "Name a colour")


@pytest.fixture(scope="module")
def settings(goldens: Path) -> Iterator[Settings]:
    """How to reach a pipeline of two stages."""
    model = goldens / "llama-tied"
    settings = replace(Settings.from_env(), model=str(model), num_stages=2, wire="f32")
    with LocalCluster(settings, make_plan(open_model(model, settings.cache), settings), Options()) as cluster:
        yield cluster.settings


def run(settings: Settings, name: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("PP_")}
    env |= {"PP_BROKER": settings.broker, "PP_RUN": settings.run}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *argv], env=env, text=True, capture_output=True, timeout=60
    )


def expected(settings: Settings, question: str) -> str:
    client = Client(make_app(settings))
    return client.result(client.submit(Request(prompt=question, max_tokens=64)))["text"]


def test_a_request_from_celery(settings: Settings) -> None:
    done = run(settings, "submit_from_celery.py", QUESTIONS[0])
    assert (done.returncode, done.stderr) == (0, "")
    text, account = done.stdout.splitlines()
    assert ast.literal_eval(text) == expected(settings, QUESTIONS[0]) != ""
    reason, *counts = account.split()
    assert reason in ("stop", "length")
    assert 0 < int(counts[2]) <= 64


def test_tokens_as_they_come(settings: Settings) -> None:
    done = run(settings, "stream_tokens.py", *QUESTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    texts, pieces = ["", "", ""], 0
    for line in done.stdout.splitlines():
        number, _, piece = line.partition(" ")
        if piece != "ok ''":
            texts[int(number)] += ast.literal_eval(piece)
            pieces += 1
    assert texts == [expected(settings, question) for question in QUESTIONS]
    assert pieces > 30


def test_a_request_that_fails_is_told(settings: Settings) -> None:
    done = run(settings, "stream_tokens.py", "many words " * 500)
    assert done.returncode == 1
    assert done.stdout.startswith("0 failed 'the prompt has ")


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*.py")])
def test_an_example_needs_nothing_of_pptasks(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {*sys.stdlib_module_names, "celery", "redis"}
