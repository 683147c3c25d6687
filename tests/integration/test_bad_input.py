"""What wrong input gets: one clear line on stderr that names the thing, an exit code, and nothing left running."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from orchestrator.broker import EmbeddedBroker
from tests.integration.run import CLI, Command, Ended, assert_one_line, pp

FAILED, USAGE = 1, 2


@pytest.fixture(scope="module")
def places(goldens: Path, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models and files to name in a command line, by a short name."""
    folder = tmp_path_factory.mktemp("bad")
    with smollm2_gguf.open("rb") as whole:
        (folder / "truncated.gguf").write_bytes(whole.read(1 << 20))
    (folder / "text.gguf").write_text("# a README, not a model\n" * 100)
    for architecture, kind in (("mamba", gguf.GGMLQuantizationType.Q8_0), ("llama", gguf.GGMLQuantizationType.Q2_K)):
        write_gguf(folder / f"{architecture}-{kind.name}.gguf", architecture, kind)
    write_unknown_tokenizer(goldens / "llama-tied", folder / "odd-tokenizer")
    write_other_architecture(goldens / "llama-tied", folder / "gemma")
    (folder / "broken.json").write_text('[{"role": "user",')
    (folder / "object.json").write_text('{"role": "user", "content": "hi"}')
    (folder / "role.json").write_text('[{"role": "teacher", "content": "hi"}]')
    files = {path.stem.replace("-", "_").lower(): str(path) for path in folder.iterdir()}
    models = {name: str(goldens / folder) for name, folder in GOLDENS.items()}
    return files | models | {"smollm2": str(smollm2_gguf)}


GOLDENS = {"tied": "llama-tied"}


def write_gguf(path: Path, architecture: str, kind: gguf.GGMLQuantizationType) -> None:
    """One tensor of one group of `kind`."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((weights, nbytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_other_architecture(golden: Path, folder: Path) -> None:
    shutil.copytree(golden, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").chmod(0o600)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))


def write_unknown_tokenizer(golden: Path, folder: Path) -> None:
    shutil.copytree(golden, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").chmod(0o600)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


RUN_TIED = ("run", "--model", "{tied}")
CASES = {
    # models
    "unknown name": (("run", "--model", "llama9:1b", "hi"), FAILED, ["'llama9:1b'", "smollm2:135m", "file or folder"]),
    "missing file": (("run", "--model", "/nowhere/model.gguf", "hi"), FAILED, ["/nowhere/model.gguf"]),
    "truncated": (("run", "--model", "{truncated}", "hi"), FAILED, ["truncated.gguf", "truncated"]),
    "no GGUF": (("run", "--model", "{text}", "hi"), FAILED, ["text.gguf", "not a GGUF"]),
    "architecture of a folder": (("run", "--model", "{gemma}", "hi"), FAILED, ["'gemma3'", "llama, mistral, qwen2"]),
    "architecture of a file": (("run", "--model", "{mamba_q8_0}", "hi"), FAILED, ["'mamba'", "llama"]),
    "quantisation": (("run", "--model", "{llama_q2_k}", "hi"), FAILED, ["token_embd.weight", "Q2_K"]),
    "tokenizer": (("run", "--stages", "1", "--model", "{odd_tokenizer}", "hi"), FAILED, ["odd-tokenizer", "WordPiece"]),
    # plans
    "split too short": ((*RUN_TIED, "--split", "1,2", "hi"), FAILED, ["'1,2'", "3 blocks", "6"]),
    "split too long": (("run", "--model", "{smollm2}", "--split", "15,16", "hi"), FAILED, ["31 blocks", "30"]),
    "split with a hole": ((*RUN_TIED, "--split", "3,0,3", "hi"), FAILED, ["'3,0,3'", "only stage 0"]),
    "no split": ((*RUN_TIED, "--split", "x", "hi"), FAILED, ["'x'", "even", "auto", "10,10,10"]),
    "too many stages": ((*RUN_TIED, "--stages", "8", "hi"), FAILED, ["8 stages", "6 blocks", "7"]),
    "too long a context": ((*RUN_TIED, "--context", "300", "hi"), FAILED, ["300", "256"]),
    # requests
    "empty prompt": ((*RUN_TIED, ""), FAILED, ["prompt is empty"]),
    "empty stdin": (RUN_TIED, FAILED, ["prompt is empty"]),
    "negative id": ((*RUN_TIED, "--tokens", "1,-2"), FAILED, ["token 1", "-2"]),
    "outside the vocabulary": ((*RUN_TIED, "--stages", "1", "--tokens", "1,512"), FAILED, ["512", "vocabulary"]),
    "chat with a wrong role": ((*RUN_TIED, "--chat", "{role}"), FAILED, ["message 0", "'teacher'", "assistant"]),
    # wrong use
    "no tokens asked for": ((*RUN_TIED, "--max-tokens", "0", "hi"), USAGE, ["--max-tokens", "0"]),
    "unknown option": ((*RUN_TIED, "--speed", "9", "hi"), USAGE, ["--speed"]),
    "unknown command": (("walk",), USAGE, ["walk"]),
    "two prompts": ((*RUN_TIED, "--tokens", "1,2", "hi"), USAGE, ["PROMPT", "--chat", "--tokens"]),
    "no whole numbers": ((*RUN_TIED, "--tokens", "one"), USAGE, ["--tokens", "1,2,3"]),
    "broken JSON": ((*RUN_TIED, "--chat", "{broken}"), USAGE, ["broken.json", "JSON"]),
    "no list of messages": ((*RUN_TIED, "--chat", "{object}"), USAGE, ["object.json", "list"]),
    "missing chat": ((*RUN_TIED, "--chat", "/nowhere/chat.json"), USAGE, ["/nowhere/chat.json"]),
    "system and raw": ((*RUN_TIED, "--raw", "--system", "x", "hi"), USAGE, ["--system", "--raw"]),
    "log-probabilities that nobody sees": ((*RUN_TIED, "--logprobs", "1", "hi"), USAGE, ["--logprobs", "--json"]),
    "stop at nothing": ((*RUN_TIED, "--stop", "", "hi"), FAILED, ["stop", "0 characters", "256"]),
    "penalty": ((*RUN_TIED, "--presence-penalty", "2.5", "hi"), USAGE, ["--presence-penalty", "2.5"]),
    "timeout": ((*RUN_TIED, "--timeout", "nan", "hi"), USAGE, ["timeout", "nan"]),
    # brokers
    "no Redis URL": ((*RUN_TIED, "--broker", "http://127.0.0.1", "hi"), FAILED, ["'http'", "redis://"]),
    "unreachable": ((*RUN_TIED, "--broker", "redis://127.0.0.1:{unused}", "hi"), FAILED, ["{unused}", "refused"]),
    "wrong password": ((*RUN_TIED, "--broker", "redis://:no@127.0.0.1:{redis}", "hi"), FAILED, ["{redis}", "password"]),
    "port in use": ((*RUN_TIED, "--broker-port", "{redis}", "hi"), FAILED, ["port {redis}", "in use"]),
}


@pytest.mark.parametrize(("argv", "code", "words"), CASES.values(), ids=CASES.keys())
def test_one_clear_line(
    tmp_path: Path, places: dict[str, str], ports: dict[str, str], argv: tuple[str, ...], code: int, words: list[str]
) -> None:
    names = places | ports
    ended = pp(tmp_path, *(word.format_map(names) for word in argv))
    assert (ended.code, ended.stdout) == (code, "")
    assert_one_line(ended.stderr, *(word.format_map(names) for word in words))


@pytest.fixture(scope="module")
def ports(broker: EmbeddedBroker) -> Iterator[dict[str, str]]:
    """`redis`: a Redis listens there, with a password. `unused`: bound, but nobody listens, so it refuses."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield {"redis": str(broker.port), "unused": str(held.getsockname()[1])}


def test_a_prompt_that_is_no_unicode(tmp_path: Path, places: dict[str, str]) -> None:
    ended = pp(tmp_path, "run", "--model", places["tied"], stdin=b"\xff\xfe")
    assert ended.code == FAILED
    assert_one_line(ended.stderr, "prompt", "Unicode")


@pytest.mark.parametrize(("chars", "told"), [(5000, "has 5000 tokens"), (1 << 20, "has at least")])
def test_a_prompt_that_is_longer_than_the_context(
    tmp_path: Path, places: dict[str, str], chars: int, told: str
) -> None:
    argv = ("run", "-q", "--raw", "--stages", "1", "--context", "16", "--model", places["tied"])
    ended = pp(tmp_path, *argv, stdin=b"a" * chars)
    assert ended.code == FAILED
    assert_one_line(ended.stderr, told, "the context holds 16")
    assert ended.stderr.count("\n") == 1


# ---- around the command ----


def test_no_stdin_at_all(tmp_path: Path, places: dict[str, str]) -> None:
    ended = with_python_before(tmp_path, "os.close(0)", "run", "--model", places["tied"])
    assert ended.code in (FAILED, USAGE)
    assert_one_line(ended.stderr, "PROMPT")


def test_a_disk_that_is_full(tmp_path: Path, places: dict[str, str]) -> None:
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    argv = ("run", "-q", "--stages", "1", "--max-tokens", "3", "--model", places["tied"], "hi")
    ended = with_python_before(tmp_path, full, *argv)
    assert ended.code == FAILED
    assert_one_line(ended.stderr, "No space left")


def with_python_before(folder: Path, code: str, *argv: str) -> Ended:
    """`pp` in a process that has run `code` before."""
    program = ("-c", f"import os, sys; {code}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *CLI)
    with Command(folder, *argv, program=program) as command:
        return command.wait()


def test_a_state_folder_that_cannot_be_written(tmp_path: Path, places: dict[str, str]) -> None:
    (tmp_path / "file").touch()
    ended = pp(tmp_path, "run", "--model", places["tied"], "hi", XDG_STATE_HOME=str(tmp_path / "file"))
    assert ended.code == FAILED
    assert_one_line(ended.stderr, str(tmp_path / "file"))


def test_files_of_the_current_folder_are_not_run(tmp_path: Path, places: dict[str, str]) -> None:
    """Somebody's own celery.py, workers.py or queue.py is none of ours. And nobody needs a home folder."""
    for name in ("workers", "pptasks", "celery", "redis", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the current folder was run')")
    program = ("-P", "-c", f"import os; os.chdir({str(tmp_path)!r}); from orchestrator.cli import main; main()")
    argv = ("run", "-q", "--stages", "1", "--max-tokens", "3", "--model", places["tied"], "hi")
    with Command(tmp_path, *argv, program=program, HOME="") as command:
        ended = command.wait()
    assert (ended.code, ended.stderr) == (0, "")
