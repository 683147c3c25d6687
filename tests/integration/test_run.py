"""The main job through real processes: `pp run` and its sisters, over both links, on an embedded and a given Redis."""

import json
import re
import struct
from collections.abc import Mapping
from itertools import takewhile
from math import prod
from pathlib import Path
from types import MappingProxyType

import pytest
import redis
from redis.client import Monitor

from tests.integration.run import SMOKE_RUN, Command, Ended, pp, pp_at_once

KEYS = {
    "text", "token_ids", "prompt_token_ids", "finish_reason", "cached_tokens", "logprobs", "model", "plan", "stages",
    "timings", "seed",
}  # fmt: skip
MODEL_KEYS = {"name", "architecture", "fingerprint"}
PLAN_KEYS = {"spans", "wire", "readout", "digest"}
STAGE_KEYS = {
    "stage", "pid", "device", "kernels", "gate_failure", "span", "weights_bytes", "rss_bytes", "slots", "kv_bytes",
    "compiles",
}  # fmt: skip
TIMINGS_KEYS = {"ready_s", "prefill_s", "decode_s", "tokens_per_s", "hop_us_p50", "hop_us_p99"}
CUTS = [
    ("llama-tied", ("--stages", "2"), [[0, 3], [3, 6]]),
    ("llama-tied", ("--split", "0,3,3"), [[0, 0], [0, 3], [3, 6]]),
    ("llama-untied-sharded-bf16", ("--stages", "2"), [[0, 3], [3, 7]]),
    ("llama-untied-sharded-bf16", ("--split", "0,3,4"), [[0, 0], [0, 3], [3, 7]]),
]


@pytest.mark.parametrize(("name", "cut", "spans"), CUTS, ids=["tied-2", "tied-0,3,3", "untied-2", "untied-0,3,4"])
def test_the_golden_tokens_over_both_links(
    tmp_path: Path, goldens: Path, name: str, cut: tuple[str, ...], spans: list[list[int]]
) -> None:
    golden = json.loads((goldens / name / "expected.json").read_text())
    argv = ("run", "--json", "-q", "--raw", *wants(golden), *cut, "--model", str(goldens / name))
    blocks = blocks_bytes(goldens / name, {1: 4})
    for ended in pp_at_once(tmp_path, (*argv, "--link", "direct"), (*argv, "--link", "iroh")):
        assert (ended.code, ended.stderr, ended.kept) == (0, "", ())
        report = ended.report
        assert report["token_ids"] == golden["greedy_ids"]
        assert report["prompt_token_ids"] == golden["prompt_ids"]
        assert report["finish_reason"] == "length"
        assert report["plan"]["spans"] == spans
        assert report["model"]["name"] == name
        check_form(report, n_stages=len(spans))
        for stage in report["stages"][1:-1]:
            assert stage["weights_bytes"] == sum(blocks[slice(*stage["span"])])


def wants(golden: dict) -> tuple[str, ...]:
    """The options that ask for a golden's tokens."""
    prompt = ",".join(map(str, golden["prompt_ids"]))
    return ("--wire", "f32", "--tokens", prompt, "--max-tokens", str(len(golden["greedy_ids"])))


def check_form(report: dict, n_stages: int) -> None:
    """What the report is made of; nothing more, nothing less."""
    assert set(report) == KEYS
    assert set(report["model"]) == MODEL_KEYS
    assert set(report["plan"]) == PLAN_KEYS
    assert set(report["timings"]) == TIMINGS_KEYS
    assert all(value > 0 for value in report["timings"].values())
    assert report["timings"]["hop_us_p50"] <= report["timings"]["hop_us_p99"]
    assert all(set(stage) == STAGE_KEYS for stage in report["stages"])
    assert [stage["stage"] for stage in report["stages"]] == list(range(n_stages))
    assert [stage["span"] for stage in report["stages"]] == report["plan"]["spans"]
    assert len({stage["pid"] for stage in report["stages"]}) == n_stages
    assert all(stage["device"] and 0 < stage["weights_bytes"] < stage["rss_bytes"] for stage in report["stages"])


def blocks_bytes(folder: Path, widened: Mapping[int, int] = MappingProxyType({})) -> list[int]:
    """Bytes of each block's tensors, from the headers of the safetensors files: a u64 length, then JSON.

    `widened`: bytes of an element of the tensors with so many dimensions; in memory, vectors are float32.
    """
    sizes: dict[int, int] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if block := re.match(r"model\.layers\.(\d+)\.", name):
                width = widened.get(len(tensor["shape"]), {"F32": 4, "BF16": 2}[tensor["dtype"]])
                size = prod(tensor["shape"]) * width
                sizes[int(block[1])] = sizes.get(int(block[1]), 0) + size
    return [sizes[i] for i in range(len(sizes))]


# ---- the real model ----


@pytest.fixture(scope="module")
def hello(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Ended]:
    """ "Say hello" as a person sees it: what came at each read of stdout while it ran, and how it ended."""
    folder = tmp_path_factory.mktemp("hello")
    pieces = []
    with Command(folder, "run", "Say hello", "--max-tokens", "48", "--model", str(smollm2_gguf)) as command:
        while piece := command.process.stdout.read1():
            pieces.append(piece.decode())
        return pieces, command.wait()


def test_text_streams_to_stdout(hello: tuple[list[str], Ended]) -> None:
    pieces, ended = hello
    assert ended.code == 0
    assert len(pieces) > 5
    text = "".join(pieces)
    assert text.strip()
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_the_closing_line_tells_how_it_went(hello: tuple[list[str], Ended]) -> None:
    *progress, closing = hello[1].stderr.splitlines()
    assert {f"stage {i}: ready [{15 * i}, {15 * i + 15})" for i in range(2)} <= set(progress)
    found = re.fullmatch(r"(\d+) tokens \((stop|length)\), ready in (\d+\.\d) s, (\d+\.\d) tok/s", closing)
    assert found, closing
    assert 1 < int(found[1]) <= 48
    assert float(found[3]) > 0
    assert float(found[4]) > 0
    assert hello[1].kept == ()


def test_a_prompt_on_stdin_over_iroh(tmp_path: Path, smollm2_gguf: Path, hello: tuple[list[str], Ended]) -> None:
    argv = ("run", "--quiet", "--link", "iroh", "--max-tokens", "48", "--model", str(smollm2_gguf))
    ended = pp(tmp_path, *argv, stdin=b"Say hello")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == "".join(hello[0])


def test_a_chat_from_a_file(tmp_path: Path, smollm2_gguf: Path, hello: tuple[list[str], Ended]) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "Say hello"}]))
    argv = ("run", "--json", "--max-tokens", "48", "--chat", str(chat), "--model", str(smollm2_gguf))
    report = pp(tmp_path, *argv).report
    check_form(report, n_stages=2)
    assert report["text"].rstrip("\n") == "".join(hello[0]).rstrip("\n")


def test_pp_smoke_run(tmp_path: Path, smollm2_gguf: Path) -> None:
    with Command(tmp_path, "--model", str(smollm2_gguf), program=SMOKE_RUN) as command:
        ended = command.wait()
    assert ended.code == 0
    assert ended.stdout.strip()


# ---- other ways to use it ----


def test_a_seed_repeats_a_sample(tmp_path: Path, goldens: Path) -> None:
    argv = (
        "run", "--json", "-q", "--stages", "1", "--model", str(goldens / "llama-tied"), "--tokens", "1,2,3",
        "--max-tokens", "32", "--temperature", "0.8",
    )  # fmt: skip
    fresh = pp(tmp_path, *argv).report
    seeds = (fresh["seed"], fresh["seed"] + 1)
    again, other = (ended.report for ended in pp_at_once(tmp_path, *((*argv, "--seed", str(s)) for s in seeds)))
    assert again["text"] == fresh["text"]
    assert again["token_ids"] == fresh["token_ids"]
    assert other["text"] != fresh["text"]


def test_what_an_answer_is_told_to_be_like(tmp_path: Path, smollm2_gguf: Path) -> None:
    """--system, --stop, --logprobs and the penalties reach the head; each changes what it is for."""
    argv = ("run", "--json", "-q", "Name three colours.", "--max-tokens", "24", "--model", str(smollm2_gguf))
    system = ("--system", "You are a pirate.")
    stops = ("--stop", "no such words", "--stop", ".", "--logprobs", "2")
    penalties = ("--presence-penalty", "2", "--frequency-penalty", "2")
    plain, changed = (pp(tmp_path, *argv, *given).report for given in (stops, (*system, *penalties)))
    check_form(plain, n_stages=2)
    assert plain["finish_reason"] == "stop"
    assert "." not in plain["text"]
    assert len(plain["logprobs"]) == len(plain["token_ids"]) > 1
    for token, likeliest in ((t["id"], t["top"]) for t in plain["logprobs"]):
        assert [token] == [likeliest[0]["id"]]  # as it was not sampled
        assert 0 >= likeliest[0]["logprob"] >= likeliest[1]["logprob"]
    assert changed["logprobs"] is None
    assert len(changed["prompt_token_ids"]) != len(plain["prompt_token_ids"])
    assert len(set(changed["token_ids"])) > 0.9 * len(changed["token_ids"])  # hardly any of them twice


def test_pp_plan_starts_nothing(tmp_path: Path, goldens: Path) -> None:
    with Command(tmp_path, "plan", "--json", "--split", "0,3,3", "--model", str(goldens / "llama-tied")) as command:
        ended = command.wait()
        assert not command.state.exists()
    assert ended.code == 0
    assert ended.report["plan"]["spans"] == [[0, 0], [0, 3], [3, 6]]
    head, middle, last = ended.report["stages"]
    assert middle["bytes"] == sum(blocks_bytes(goldens / "llama-tied")[:3])
    assert "embedding" in head["also"]
    assert middle["also"] == last["also"] == ""


def test_pp_plan_for_people(tmp_path: Path, goldens: Path) -> None:
    ended = pp(tmp_path, "plan", "--split", "2,4", "--model", str(goldens / "llama-tied"))
    assert ended.code == 0
    assert "[0, 2)" in ended.stdout
    assert "[2, 6)" in ended.stdout


def test_pp_bench_measures_each_request(tmp_path: Path, goldens: Path) -> None:
    argv = ("bench", "--json", "--repeat", "3", "--max-tokens", "16", "--model", str(goldens / "llama-tied"))
    report = pp(tmp_path, *argv).report
    runs = report.pop("runs")
    check_form(report, n_stages=2)
    assert len(runs) == 3
    assert sorted(run["decode_s"] for run in runs)[1] == report["timings"]["decode_s"]


def test_control_tokens_and_rare_characters_in_a_prompt_are_text(tmp_path: Path, goldens: Path) -> None:
    prompt = "<|im_end|>\0 🤖 é<|im_start|>"
    argv = (
        "run",
        "--json",
        "-q",
        "--raw",
        "--stages",
        "1",
        "--max-tokens",
        "2",
        "--model",
        str(goldens / "llama-tied"),
    )
    ended = pp(tmp_path, *argv, stdin=prompt.encode())
    assert ended.code == 0
    special = json.loads((goldens / "llama-tied" / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"] for t in special} >= {"<|im_start|>", "<|im_end|>"}
    assert not {t["id"] for t in special} & set(ended.report["prompt_token_ids"])


# ---- a Redis that is not ours alone ----


END = "the-end-of-this-test"
NAMELESS = {
    "HELLO",
    "AUTH",
    "CLIENT",
    "PING",
    "INFO",
    "SELECT",
    "MULTI",
    "EXEC",
    "SCRIPT",
    "SCAN",
    "COMMAND",
    "DUMP",
    "TIME",
}
SUBSCRIPTIONS = {"SUBSCRIBE", "PSUBSCRIBE", "UNSUBSCRIBE", "PUNSUBSCRIBE"}
STRANGERS = ("stage0", "celery", "_kombu.binding.celery", "unacked", "pp:", "pp:other:lease", "lease", "pp:run:stage0")


def test_two_runs_at_once_on_a_redis_full_of_others(tmp_path: Path, goldens: Path, redis_url: str) -> None:
    golden = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    argv = ("run", "--json", "-q", *wants(golden), "--model", str(goldens / "llama-tied"))
    client = redis.Redis.from_url(redis_url)
    fill(client)
    before = dump(client)
    with (
        client,
        client.monitor() as monitor,
        Command(tmp_path, *argv, "--broker", redis_url) as one,
        Command(tmp_path, *argv, PP_BROKER=redis_url) as other,
    ):
        prefixes = {f"pp:{command.wait_for_worker()['PP_RUN']}:" for command in (one, other)}
        for command in (one, other):
            ended = command.wait()
            assert (ended.code, ended.stderr) == (0, "")
            assert ended.report["token_ids"] == golden["greedy_ids"]
        assert dump(client) == before
        client.echo(END)
        commands = list(takewhile(lambda words: words != ["ECHO", END], iter(lambda: read_command(monitor), None)))
        touched = set().union(*(names_of(client, words) for words in commands))
    assert len(prefixes) == 2
    assert {key for key in touched if not key.startswith(tuple(prefixes))} == set()
    assert all(any(key.startswith(prefix) for key in touched) for prefix in prefixes)


def fill(client: redis.Redis) -> None:
    client.rpush("stage0", "a message of somebody", "and another")
    client.sadd("_kombu.binding.celery", "celery\x06\x16\x06\x16celery")
    client.hset("unacked", mapping={"tag": "message"})
    for key in STRANGERS:
        client.setnx(key, "somebody's")
    for i in range(2000):
        client.set(f"cache:{i}", i)


def dump(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.scan_iter(count=1000)}


def read_command(monitor: Monitor) -> list[str]:
    """The next command that MONITOR tells: `1700000000.1 [0 127.0.0.1:5] "SET" "key" "a \\"value\\""`."""
    return re.findall(r'"((?:[^"\\]|\\.)*)"', monitor.connection.read_response().decode())


def names_of(client: redis.Redis, words: list[str]) -> set[str]:
    """The keys, and the channels, that a command names."""
    if words[0].upper() in NAMELESS:
        return set()
    if words[0].upper() == "PUBLISH":
        return {words[1]}
    if words[0].upper() in SUBSCRIPTIONS:
        return set(words[1:])
    return set(client.execute_command("COMMAND GETKEYS", *words))
