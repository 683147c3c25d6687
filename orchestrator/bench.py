"""`pp bench`: how fast a pipeline is, alone (`run`) and under load (`serve`)."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator import asked, launch, loadtest_run, loadtest_show, options, tables
from orchestrator.job import Job, describe
from orchestrator.loadtest import Load
from orchestrator.loadtest_run import Measured, Outcome
from orchestrator.options import Number
from orchestrator.progress import Display
from pptasks import shown
from pptasks.errors import RequestFailed
from pptasks.request import MAX_TEMPERATURE, MAX_TOKENS

MAX_RATES, MAX_RATE = 20, 10_000.0


class DefaultGroup(click.Group):
    """A group whose command `run` is meant where none is named, so that `pp bench "Say hello"` works."""

    default = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultGroup, context_settings=options.HELP)
def bench() -> None:
    """Measure a pipeline: one request at a time (run, the default), or a server under load (serve)."""


@bench.command()
@options.prompt
@options.model
@options.max_tokens
@options.sampling
@options.cluster
@options.named
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Requests, one after the other.")
@options.as_json
def run(
    prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, repeat: int, as_json: bool, **given: Any
) -> None:
    """Measure the main job: ready time, prefill, decode, hops. PROMPT defaults to "Say hello"."""
    prompt = prompt if prompt or chat or tokens else "Say hello"
    request = asked.request(prompt, chat, tokens, raw, given)
    with launch.cluster(given, Console(stderr=True)) as (cluster, model):
        job = Job(cluster, given["timeout"])
        reports = [describe(cluster, model, job.run(request)) for _ in range(repeat)]
    summary = tables.summary(reports)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        title = f"{model.name}, {cluster.plan.n_stages} stages"
        Console().print(tables.bench_table(summary, f"median of {repeat}", title))


class Rates(click.ParamType):
    """Requests a second, from "0.5,1,2"."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        number, words = Number(0, MAX_RATE, min_open=True), value.split(",")
        if len(words) > MAX_RATES:
            self.fail(f"{len(words)} rates are more than {MAX_RATES}.", param, ctx)
        return tuple(number.convert(word, param, ctx) for word in words)


@bench.command()
@options.option("--url", "Where the server is.", default="http://127.0.0.1:8080")
@options.option(
    "--api-key",
    "The server's key. Others see arguments: better give it as PP_API_KEY.",
    envvar="PP_API_KEY",
    show_envvar=False,
)
@options.option("--name", "The model, as the server names it.  [default: its first]", metavar="MODEL")
@options.option("--rate", "Requests a second, one rate after the other.", type=Rates(), default="0.5,1,2,4")
@options.option("--duration", "For how long requests come at each rate.", type=options.Duration(), default="30s")
@options.option("--prompt-tokens", "Tokens of a prompt, about.", type=click.IntRange(1, 1 << 20), default=64)
@options.option("--max-tokens", "Most tokens of an answer.", type=click.IntRange(1, MAX_TOKENS), default=64)
@options.option("--temperature", "0 takes the likeliest token.", type=Number(0, MAX_TEMPERATURE), default=0.0)
@options.option("--seed", "Decides when requests come, and what they ask.", type=click.IntRange(0, 1 << 30), default=0)
@options.option("--timeout", "Most seconds that an answer may take.", type=Number(min=0, min_open=True), default=120.0)
@options.option("--png", "Draw latency against load.", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@options.as_json
def serve(
    url: str, api_key: str | None, name: str | None, png: Path | None, quiet: bool, as_json: bool, **given: Any
) -> None:
    """Put a load on a server that speaks OpenAI's API, such as pp serve, and measure what clients wait.

    An open loop: requests come at random (a Poisson process), whether or not those before were answered. Prints time to
    the first token, time between tokens and time of a whole answer, as median, 95th and 99th percentile, for each rate.
    Ctrl-C ends it and prints what was measured so far.
    """
    if png is not None:
        loadtest_show.check_png(png)
    load = Load(
        given["rate"], given["duration"], given["prompt_tokens"], given["max_tokens"], given["temperature"],
        given["seed"], given["timeout"],
    )  # fmt: skip
    with Display(Console(stderr=True), quiet=quiet) as display:

        def show(measured: Measured) -> None:
            display.progress("answered", len(measured.calls), measured.due, who=f"{measured.rate:g}/s")

        outcome = loadtest_run.measure(url, api_key, name, load, show)
    _tell(outcome, load, png, as_json)


def _tell(outcome: Outcome, load: Load, png: Path | None, as_json: bool) -> None:
    """Exits with 1 if it was interrupted. Raises RequestFailed if nothing was answered."""
    rows = [measured.row() for measured in outcome.rates]
    title = f"{outcome.name}: {load.duration_s:g} s at each rate, prompts of about {load.prompt_tokens} tokens"
    if as_json:
        report = {"model": shown.line(outcome.name), "load": load.to_json(), "rates": rows}
        click.echo(json.dumps(report | {"interrupted": outcome.interrupted}))
    else:
        Console().print(loadtest_show.table(rows, title))
    for warning in loadtest_show.warnings(rows):
        click.echo(f"warning: {warning}", err=True)
    if png is not None:
        loadtest_show.write_png(png, rows, title)
    if outcome.interrupted:
        click.echo("cancelled", err=True)
        sys.exit(1)
    if not any(row["answered"] for row in rows):
        raise RequestFailed("no request was answered: the errors column, or errors in --json, tells why")
