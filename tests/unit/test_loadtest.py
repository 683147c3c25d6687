"""The pure half of `pp bench serve`: arrivals, percentiles, and what calls come to."""

import math
import statistics
from itertools import pairwise

import click
import pytest
from click.testing import CliRunner

from orchestrator.bench import DefaultGroup, Rates
from orchestrator.loadtest import MAX_REQUESTS, Call, arrivals, is_late, percentiles, prompt, row
from orchestrator.loadtest_http import base_of, client
from orchestrator.loadtest_show import table, warnings, write_png
from pptasks.errors import StorageError, UsageError

RATE, SECONDS = 50.0, 200.0


def test_arrivals_are_a_poisson_process():
    due = arrivals(RATE, SECONDS, seed=1)
    assert list(due) == sorted(due)
    assert all(0 < at < SECONDS for at in due)
    expected = RATE * SECONDS
    assert abs(len(due) - expected) < 4 * math.sqrt(expected)
    gaps = [b - a for a, b in pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(1 / RATE, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / RATE, rel=0.05)  # of an exponential: as large as its mean
    a_second = [sum(int(at) == second for at in due) for second in range(int(SECONDS))]
    assert statistics.variance(a_second) == pytest.approx(RATE, rel=0.3)  # bursts: not one every 20 ms


def test_arrivals_and_prompts_follow_from_the_seed_alone():
    assert arrivals(2, 30, seed=7) == arrivals(2, 30, seed=7)
    assert arrivals(2, 30, seed=7) != arrivals(2, 30, seed=8)
    assert arrivals(4, 30, seed=7) != arrivals(2, 30, seed=7)
    assert prompt(64, 7, 0) == prompt(64, 7, 0)
    assert len({prompt(64, 7, index) for index in range(100)}) == 100


def test_more_requests_than_can_be_kept_are_refused():
    with pytest.raises(UsageError, match=f"more than {MAX_REQUESTS}: lower --rate or --duration"):
        arrivals(10_000, 3600, seed=0)


def test_percentiles_are_interpolated():
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([2.0, 1.0]) == {"p50": 1.5, "p95": 1.95, "p99": 1.99}


def test_a_row_counts_from_when_requests_were_due():
    calls = [
        Call(due_s=1.0, sent_s=1.5, end_s=3.0, pieces_s=(2.0, 2.25, 3.0), prompt_tokens=10, tokens=3),
        Call(due_s=2.0, sent_s=2.0, end_s=5.0, pieces_s=(4.0, 5.0), prompt_tokens=12, tokens=5),
        Call(due_s=2.5, sent_s=2.5, end_s=2.6, error="429"),
        Call(due_s=2.5, sent_s=2.5, end_s=2.6, error="429"),
        Call(due_s=2.5, sent_s=2.5, end_s=9.9, pieces_s=(2.6,), error="timeout", tokens=1),
    ]
    found = row(2.0, 7, calls)
    assert (found["sent"], found["answered"], found["unfinished"]) == (7, 2, 2)
    assert found["errors"] == {"429": 2, "timeout": 1}
    assert found["ttft_s"]["p50"] == 1.5  # of 1.0 and 2.0
    assert found["inter_token_s"]["p50"] == 0.75  # of 0.25, 0.75 and 1.0
    assert found["e2e_s"]["p50"] == 2.5
    assert found["tokens_per_s"] == 8 / 4.0  # whole answers only, from 1.0 to 5.0
    assert (found["prompt_tokens"], found["completion_tokens"]) == (11, 8)
    assert found["late_max_s"] == 0.5
    assert is_late(found)


def test_a_row_of_nothing_is_one():
    found = row(1.0, 0, [])
    assert found["ttft_s"] is found["e2e_s"] is None
    assert found["tokens_per_s"] == 0.0
    assert not is_late(found)
    assert table([found], "nothing").row_count == 1


def test_a_generator_that_was_late_is_told_of():
    found = row(3.0, 1, [Call(due_s=1.0, sent_s=1.25, end_s=2.0, pieces_s=(2.0,), tokens=1)])
    assert warnings([found, row(1.0, 0, [])]) == [
        "at 3/s this machine sent requests up to 250 ms late: it is too busy to measure that"
    ]


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(StorageError, match="cannot write"):
        write_png(tmp_path / "gone" / "load.png", [row(1.0, 0, [])], "a title with $ and \x1b[31m")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("https://example.org/llm/v1", "https://example.org/llm"),
    ],
)
def test_an_address_with_and_without_v1_is_the_same(url, base):
    assert base_of(url) == base


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080", "ftp://host", "http://", "http://u:secret@host", "http://h?k=secret"]
)
def test_what_is_no_address_is_refused_without_its_secret(url):
    with pytest.raises(UsageError) as refused:
        base_of(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["two words", "a\nb", "ключ", "k" * 5000])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with pytest.raises(UsageError, match="PP_API_KEY"):
        client("http://127.0.0.1:1", key, 1.0)


@pytest.mark.parametrize("rates", ["", "1,", "1,nan", "0", "-1", "1e9", ",".join(["1"] * 21)])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(click.BadParameter):
        Rates()(rates)


def test_bench_is_bench_run_unless_a_command_is_named():
    @click.group(cls=DefaultGroup)
    def group():
        pass

    @group.command()
    @click.argument("prompt", default="")
    @click.option("--flag", is_flag=True)
    def run(prompt, flag):
        click.echo(f"run {prompt!r} {flag}")

    @group.command()
    def serve():
        click.echo("serve")

    said = {
        (): "run '' False", ("Say hello",): "run 'Say hello' False", ("--flag", "serve"): "run 'serve' True",
        ("--", "serve"): "run 'serve' False", ("run", "run"): "run 'run' False", ("serve",): "serve",
    }  # fmt: skip
    for argv, expected in said.items():
        assert CliRunner().invoke(group, argv).output == f"{expected}\n"
    assert "Commands:" in CliRunner().invoke(group, ["--help"]).output
