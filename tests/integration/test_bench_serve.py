"""`pp bench serve` against a server that speaks OpenAI's API, as a command."""

import json
import signal
import struct
from contextlib import ExitStack
from pathlib import Path

from tests.fake_openai import MODEL, FakeOpenAI
from tests.integration.run import Command, Ended, pp, pp_at_once

SHORT = ("--rate", "10", "--duration", "1s", "--seed", "3")


def serve(folder: Path, *argv: str, **environ: str) -> Ended:
    return pp(folder, "bench", "serve", *argv, **environ)


def test_a_load_is_measured_and_drawn(tmp_path: Path) -> None:
    png = tmp_path / "load.png"
    with FakeOpenAI(tokens=8, first_s=0.1, each_s=0.02, key="k" * 20) as server:
        done = serve(
            tmp_path, "--url", f"{server.url}/v1", "--rate", "8,30", "--duration", "2s", "--seed", "3",
            "--prompt-tokens", "40", "--max-tokens", "6", "--png", str(png), "--json", PP_API_KEY=server.key,
        )  # fmt: skip
    assert done.code == 0, done
    assert (done.report["model"], done.report["interrupted"]) == (MODEL, False)
    slow, fast = done.report["rates"]
    assert (slow["rate"], fast["rate"]) == (8, 30)
    assert slow["sent"] == slow["answered"] < fast["sent"] == fast["answered"]
    for row in (slow, fast):
        assert row["errors"] == {}
        assert row["prompt_tokens"] == 40  # the first two told what the template adds
        assert row["completion_tokens"] == 6 * row["answered"]
        assert 0.1 <= row["ttft_s"]["p50"] <= row["ttft_s"]["p95"] <= row["ttft_s"]["p99"]
        assert 0.01 < row["inter_token_s"]["p50"] < 0.2
        assert row["e2e_s"]["p50"] >= 0.1 + 5 * 0.02
    assert len(server.asked) == 2 + slow["sent"] + fast["sent"]
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1440, 480)
    assert png.stat().st_size > 10_000
    assert "k" * 20 not in done.stdout + done.stderr


def test_our_own_server_is_measured(tmp_path: Path, goldens: Path) -> None:
    with Command(tmp_path, "serve", "--port", "0", "--json", "--model", str(goldens / "llama-tied")) as server:
        url = json.loads(server.process.stdout.readline())["url"]
        done = serve(tmp_path, "--url", url, *SHORT, "--prompt-tokens", "100", "--max-tokens", "4", "--json")
        server.signal(signal.SIGINT)
        assert server.wait().code == 0
    row = done.report["rates"][0]
    assert row["answered"] == row["sent"] > 3
    assert row["errors"] == {}
    assert 70 < row["prompt_tokens"] < 130  # its tiny vocabulary makes several tokens of a word
    assert row["completion_tokens"] > row["answered"]


def test_the_loop_is_open(tmp_path: Path) -> None:
    """Answers take longer than the whole load: a loop that waited for them would send one."""
    with FakeOpenAI(tokens=1, first_s=2.0) as server:
        done = serve(tmp_path, "--url", server.url, *SHORT, "--json")
    row = done.report["rates"][0]
    assert row["answered"] == row["sent"] > 3
    came = server.came_at[2:]
    assert came[-1] - came[0] < 2.0


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    asked = []
    for _ in range(2):
        with FakeOpenAI(tokens=1, first_s=0) as server:
            assert serve(tmp_path, "--url", server.url, *SHORT, "--json").code == 0
        asked.append(sorted(body["messages"][0]["content"] for body in server.asked))
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0])


def test_a_server_that_is_full_is_counted(tmp_path: Path) -> None:
    with FakeOpenAI(tokens=1, first_s=0.4, lanes=1) as server:
        done = serve(tmp_path, "--url", server.url, *SHORT)
    assert done.code == 0
    assert "x 429" in done.stdout
    assert "p50/p95/p99" in done.stdout


FAULTS = {
    "cut": "cut off",
    "garbage": "not understood",
    "endless": "not understood",
    "error": "error in the stream",
    "silent": "timeout",
}


def test_a_server_that_answers_nothing_whole_is_no_result(tmp_path: Path) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(FakeOpenAI(fault=fault)).url for fault in FAULTS]
        all_done = pp_at_once(tmp_path, *(("bench", "serve", "--url", url, *SHORT, "--timeout", "3") for url in urls))
    for done, url, told in zip(all_done, urls, FAULTS.values(), strict=True):
        assert (done.code, done.stdout) == (1, "")
        assert done.stderr == f"error: {url} answers no request ({told}): is it ready?\n"


def test_answers_that_fail_later_are_counted_by_their_kind(tmp_path: Path) -> None:
    with FakeOpenAI(tokens=3, first_s=0.05, whole=5, fault="error") as server:
        done = serve(tmp_path, "--url", server.url, *SHORT, "--json")
    row = done.report["rates"][0]
    assert (done.code, row["answered"]) == (0, 3)  # two were asked before
    assert row["errors"] == {"error in the stream": row["sent"] - 3}


def test_a_wrong_key_is_told_with_its_remedy(tmp_path: Path) -> None:
    with FakeOpenAI(key="right") as server:
        done = serve(tmp_path, "--url", server.url, *SHORT, PP_API_KEY="wrong")
    assert done.code == 1
    assert (
        done.stderr == f"error: {server.url} answers no request (HTTP 401): no such key: give its key as PP_API_KEY\n"
    )


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        url = server.url
    done = serve(tmp_path, "--url", url, *SHORT)
    assert done.code == 1
    assert done.stderr.endswith(f"error: {url}/v1/models does not answer (no connection): is the server up?\n")


def test_a_model_with_a_wicked_name_commands_no_terminal(tmp_path: Path) -> None:
    with FakeOpenAI(tokens=1, first_s=0, model="a\x1b[31m[bold]b") as server:
        done = serve(tmp_path, "--url", server.url, *SHORT)
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert "[bold]b" in done.stdout


WRONG_USE = {
    ("--rate", "0"): "is not in the range",
    ("--url", "127.0.0.1:1"): "--url must be the address of a server",
    ("--png", "gone/x.png"): "is no folder",
}


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    all_done = pp_at_once(tmp_path, *(("bench", "serve", *argv) for argv in WRONG_USE))
    for done, told in zip(all_done, WRONG_USE.values(), strict=True):
        assert (done.code, done.stdout) == (2, "")
        assert told in done.stderr


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(tmp_path: Path) -> None:
    without = "import sys; sys.modules['matplotlib'] = None; from orchestrator.cli import main; main()"
    with Command(tmp_path, "bench", "serve", "--png", "x.png", program=("-c", without)) as command:
        done = command.wait()
    assert done.code == 2
    assert done.stderr == "error: --png needs matplotlib: pip install 'pptasks[plot]', or leave --png out\n"


def test_a_load_too_large_to_keep_is_refused(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        done = serve(tmp_path, "--url", server.url, "--rate", "10000", "--duration", "1d")
    assert done.code == 2
    assert done.stderr.endswith("lower --rate or --duration\n")
    assert server.asked == []


def test_an_interrupt_ends_it_with_what_was_measured(tmp_path: Path) -> None:
    png = tmp_path / "load.png"
    with FakeOpenAI(tokens=3, first_s=0.05) as server:
        argv = ("bench", "serve", "--url", server.url, "--rate", "20", "--duration", "30m", "--json", "--png", str(png))
        with Command(tmp_path, *argv) as command:
            command.wait_for(lambda: len(server.asked) > 12, "some requests")
            command.signal(signal.SIGINT)
            done = command.wait(20)
    assert done.code == 1
    assert done.stderr.endswith("cancelled\n")
    assert "Traceback" not in done.stderr
    assert "never retrieved" not in done.stderr
    assert done.report["interrupted"] is True
    row = done.report["rates"][0]
    assert 0 < row["answered"] <= row["sent"]
    assert row["unfinished"] == row["sent"] - row["answered"]
    assert png.read_bytes()[:4] == b"\x89PNG"
