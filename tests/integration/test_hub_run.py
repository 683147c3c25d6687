"""Real workers and the real command line against a Hub: who fetches what, and who may."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.request import Request
from tests.fake_hub import FakeHub, Fault
from tests.integration.hand import by_hand
from tests.integration.run import Command, assert_one_line, pp

TOKEN = "hf_" + "hunter2" * 4
REPO = "somebody/llama"


def expected_of(folder: Path) -> tuple[str, list[int]]:
    golden = json.loads((folder / "expected.json").read_text())
    return ",".join(map(str, golden["prompt_ids"])), golden["greedy_ids"]


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied-sharded-bf16"])
def test_each_stage_fetches_its_own_tensors_and_no_more(
    redis_url: str, goldens: Path, tmp_path: Path, name: str
) -> None:
    """Three workers with a home each. The head alone has the tokenizer; the file is fetched once in all."""
    folder = goldens / name
    local = open_model(folder, tmp_path)
    settings = replace(
        Settings.of_this_machine(), model=REPO, num_stages=3, broker=redis_url, run="hub", secret="ab" * 32, wire="f32"
    )
    plan = make_plan(local, settings)
    header = sum(min(r.offset for r in local.tensors.values() if r.file == f) for f in files_of(local))
    prompt, answer = expected_of(folder)
    with FakeHub({REPO: folder}) as hub, ExitStack() as stack:
        workers = []
        for stage in range(3):
            own = replace(settings, hf_endpoint=hub.url_of(f"stage{stage}"), cache=own_cache(tmp_path / f"home{stage}"))
            workers.append(stack.enter_context(by_hand(stage, own, tmp_path / f"log{stage}")))
        client = Client(make_app(settings))
        request = client.submit(Request(tokens=tuple(map(int, prompt.split(","))), max_tokens=len(answer)))
        assert client.result(request, timeout_s=120)["token_ids"] == answer
        for stage, span in enumerate(plan.spans):
            readout = stage == plan.readout_stage
            mine = local.stage_tensors(span.lo, span.hi, embedding=stage == 0, readout=readout)
            own_bytes = sum(ref.nbytes for ref in mine) + header
            assert own_bytes <= hub.sent(".safetensors", f"stage{stage}") <= 1.02 * own_bytes
            asked = {request.path.rsplit("/", 1)[-1] for request in hub.log if request.client == f"stage{stage}"}
            assert ("tokenizer.json" in asked) is (stage == 0)
        assert not any("tokeniz" in open_file for open_file in open_files(workers[1].pid))
        sizes = sum(file.stat().st_size for file in files_of(local))
        assert hub.sent(".safetensors") <= 1.02 * sizes + 2 * header


def test_stages_that_share_a_cache_share_the_file(goldens: Path, tmp_path: Path) -> None:
    """`pp run`: headers are read by the command, each tensor by the stage that holds it, nothing twice."""
    prompt, answer = expected_of(goldens / "qwen3-untied-bf16-sharded")
    with FakeHub({"q/q": goldens / "qwen3-untied-bf16-sharded"}) as hub:
        hub.faults.append(Fault("slow", match=".safetensors", times=60, seconds=0.2))
        argv = ["run", "--model", "q/q@main", "--tokens", prompt, "--max-tokens", str(len(answer)), "--stages", "3"]
        environ = {"HF_ENDPOINT": hub.url, "PP_CACHE": str(own_cache(tmp_path / "cache"))}
        ended = pp(tmp_path, *argv, "--wire", "f32", "--json", **environ)
        assert ended.code == 0, ended.stderr
        assert ended.report["token_ids"] == answer
        assert re.search(r"stage \d: download", ended.stderr)
        sizes = sum(f.stat().st_size for f in (goldens / "qwen3-untied-bf16-sharded").glob("*.safetensors"))
        assert hub.sent(".safetensors") <= 1.02 * sizes
        before = hub.sent()
        again = pp(tmp_path, *argv, "--wire", "f32", "--json", **environ)
        assert again.report["token_ids"] == answer
        assert hub.sent(".safetensors") - before < 1024
        verified = pp(tmp_path, "verify", *argv[1:], **environ)
        assert verified.code == 0, verified.stderr


def test_a_gated_model_is_fetched_with_a_token_that_shows_nowhere(goldens: Path, tmp_path: Path) -> None:
    prompt, answer = expected_of(goldens / "llama-tied")
    with FakeHub({REPO: goldens / "llama-tied"}, gated={REPO}, tokens={TOKEN}) as hub:
        argv = ["run", "--model", REPO, "--tokens", prompt, "--max-tokens", str(len(answer)), "--wire", "f32", "--json"]
        environ = {"HF_ENDPOINT": hub.url, "PP_CACHE": str(own_cache(tmp_path / "cache")), "HF_TOKEN": TOKEN}
        with Command(tmp_path, *argv, **environ) as command:
            command.wait_for(lambda: len(command.workers()) == 2, "two workers")
            arguments = [word for p in command.processes() for word in p.cmdline()]
            logs = command.logs()
            ended = command.wait()
        assert ended.code == 0, ended.stderr
        assert ended.report["token_ids"] == answer
        shown = [ended.stdout, ended.stderr, *arguments, *logs.values()]
        assert not any(TOKEN in text for text in shown)
        assert not any(TOKEN.encode() in f.read_bytes() for f in (tmp_path / "cache").rglob("*") if f.is_file())
        assert not any(TOKEN in request.path for request in hub.log)
        elsewhere = [request for request in hub.log if request.host != "127.0.0.1"]
        assert elsewhere
        assert not any(request.authorization for request in elsewhere)


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_without_access_it_says_what_to_do_and_asks_nobody(goldens: Path, tmp_path: Path, token: str) -> None:
    with FakeHub({REPO: goldens / "llama-tied"}, gated={REPO}, tokens={TOKEN}) as hub:
        environ = {
            "HF_ENDPOINT": hub.url,
            "PP_CACHE": str(own_cache(tmp_path / "cache")),
            "HF_HOME": str(tmp_path / "home"),
        }
        ended = pp(tmp_path, "run", "--model", REPO, "Hello", **environ, **({"HF_TOKEN": token} if token else {}))
    assert ended.code == 1
    assert_one_line(ended.stderr, REPO, "HF_TOKEN")
    assert hub.sent(".safetensors") == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("somebody/nothing", ("somebody/nothing",)),
        (f"{REPO}@nosuch", ("nosuch",)),
        (f"hf:{REPO}/x.gguf", ("x.gguf",)),
        ("../../etc/passwd", ("passwd",)),
        ("a/../b", ("a/../b",)),
        ("https://user:hunter2@hub.example/x.gguf", ("hub.example",)),
    ],
)
def test_what_is_not_there_or_must_not_be_is_one_line(
    goldens: Path, tmp_path: Path, model: str, words: tuple[str, ...]
) -> None:
    with FakeHub({REPO: goldens / "llama-tied"}) as hub:
        ended = pp(
            tmp_path, "run", "--model", model, "Hello", HF_ENDPOINT=hub.url, PP_CACHE=str(own_cache(tmp_path / "cache"))
        )
    assert ended.code == 1
    assert_one_line(ended.stderr, *words)
    assert "hunter2" not in ended.stderr


def test_pp_models_lists_what_anyone_may_download(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(pp(tmp_path, "models", "--json").stdout)}
    wanted = {"smollm2:135m", "llama3.2:1b", "llama3.2:3b", "llama3.1:8b", "qwen2.5:0.5b", "qwen3:0.6b", "gpt2"}
    assert wanted | {"tinyllama:1.1b", "mistral:7b"} == set(rows)
    assert all(row["source"] and row["size"] for row in rows.values())
    assert "llama3.1:8b" in pp(tmp_path, "models").stdout


def files_of(model: object) -> set[Path]:
    return {ref.file for ref in model.tensors.values()}  # type: ignore[attr-defined]


def own_cache(cache: Path) -> Path:
    """An empty cache for models, with the user's compiled kernels in it, so that the test compiles nothing."""
    cache.mkdir()
    users = Settings.of_this_machine().cache
    for name in ("compilers", "kernels"):
        (users / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(users / name)
    return cache


def open_files(pid: int) -> list[str]:
    return [file.path for file in psutil.Process(pid).open_files()]
