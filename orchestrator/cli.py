"""`pp`: parse, call, echo. Text goes to stdout as it is sampled; everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong use."""

import json
import logging
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from orchestrator.cluster import EMBEDDED, LocalCluster, Options
from orchestrator.job import Job, describe
from orchestrator.progress import Display
from pptasks.config import Settings
from pptasks.errors import PPError, RequestFailed, StageFailed, UsageError
from pptasks.modelinfo import Model, nbytes
from pptasks.models import open_model
from pptasks.plan import Plan, make_plan, split_sizes
from pptasks.request import Request

FAILED = 1


class CLI(click.Group):
    """Every PPError becomes one line on stderr and its exit code; a stage's own last lines follow it."""

    def invoke(self, ctx: click.Context) -> Any:
        with _errors():
            return super().invoke(ctx)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except PPError as e:
        click.echo(f"error: {e}", err=True)
        for line in e.log if isinstance(e, StageFailed) else ():
            click.echo(f"  | {line}", err=True)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        click.echo("cancelled", err=True)
        sys.exit(FAILED)


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = _options(
    click.option("--model", default="smollm2:135m", show_default=True, help="Alias, .gguf file, or Hugging Face folder."),
    click.option("--stages", type=click.IntRange(1), help="Pipeline stages, one worker each.  [default: 2, or as many as --split names]"),
    click.option("--split", default="even", show_default=True, metavar="even|auto|a,b,...", help="Blocks of each stage; auto balances parameters."),
    click.option("--wire", type=click.Choice(["bf16", "f32", "f16"]), default="bf16", show_default=True, help="Dtype of the hidden state between stages; f32 makes a split bit-equal to the whole."),
    click.option("--readout", type=click.Choice(["auto", "first", "last"]), default="auto", show_default=True, help="Where tokens are sampled: on the head (a ring) or the last stage (a line). auto: the head when its embedding is also the output head."),
    click.option("--context", type=click.IntRange(1), help="Positions a sequence may take.  [default: 2048, or the model's if less]"),
    click.option("--slots", type=click.IntRange(1), default=4, show_default=True, help="Sequences in flight at once."),
    click.option("--prefill-chunk", type=click.IntRange(1), default=128, show_default=True, help="Most prompt tokens in one frame."),
)  # fmt: skip

cluster_options = _options(
    click.option("--link", type=click.Choice(["direct", "iroh"]), default="direct", show_default=True, help="How workers reach the broker."),
    click.option("--relay", default="none", show_default=True, metavar="none|default|URL,...", help="iroh relays for --link iroh; none stays on this machine's own addresses."),
    click.option("--broker", default=EMBEDDED, metavar="embedded|redis://...", envvar="PP_BROKER", help="A private Redis for this run, or your own. A URL with a password is better given as PP_BROKER.  [default: embedded]"),
    click.option("--broker-port", type=click.IntRange(1, 65535), help="Port of the embedded broker.  [default: a free one]"),
    click.option("--kernels", type=click.Choice(["auto", "tinygrad"]), default="auto", show_default=True, help="auto: C kernels on a CPU; tinygrad: its own everywhere."),
    click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True, help="Seconds until all stages must be ready, and the longest wait for a token."),
    click.option("--quiet", "-q", is_flag=True, help="No progress and no closing line."),
)  # fmt: skip

sampling_options = _options(
    click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens to generate."),
    click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="Sample among the k likeliest; 0: all."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Sample among the likeliest that reach this probability."),
    click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), help="Makes sampling repeatable.  [default: a fresh one]"),
)  # fmt: skip

prompt_options = _options(
    click.argument("prompt", required=False),
    click.option("--chat", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json", help='Chat messages: [{"role": "user", "content": "..."}, ...]'),
    click.option("--tokens", metavar='"1,2,3"', help="Token ids instead of text."),
    click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template."),
)  # fmt: skip

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")


@click.group(cls=CLI, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pptasks")
def main() -> None:
    """Run one large language model across several machines, cut by layers.

    Each stage is a Celery worker that holds its own layers only; the hidden state travels from queue to queue. Try: pp run "Say hello"
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)


@main.command()
@prompt_options
@model_options
@sampling_options
@cluster_options
@json_option
def run(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, as_json: bool, **options: Any) -> None:
    """Start the stages here, answer PROMPT (or what is piped in), and leave nothing behind."""
    request = _request(prompt, chat, tokens, raw, options)
    console = Console(stderr=True)
    show = (lambda text: None) if as_json else _print_text
    with _cluster(options, console) as (cluster, model):
        answer = Job(cluster, options["timeout"]).run(request, show)
        report = describe(cluster, model, answer)
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo("" if report["text"].endswith("\n") else "\n", nl=False)
    if not options["quiet"]:
        console.print(_closing_line(report), highlight=False, soft_wrap=True)
    if report["finish_reason"] == "cancelled":
        sys.exit(FAILED)


@main.command()
@model_options
@json_option
def plan(as_json: bool, **options: Any) -> None:
    """Show what each stage would hold; start nothing."""
    console = Console(stderr=True)
    settings = _settings(options)
    with Display(console) as display:
        model = open_model(settings.model, settings.cache, display.progress)
    made = make_plan(model, settings)
    rows = [_stage_row(model, made, i) for i in range(made.n_stages)]
    if as_json:
        click.echo(json.dumps({"model": model.name, "plan": made.to_json(), "stages": rows}))
        return
    table = Table("stage", "blocks", "also", "tensors", "bytes to load", title=f"{model.name}: {made.n_blocks} blocks, {made.wire} on the wire")
    for row in rows:
        table.add_row(str(row["stage"]), "[{}, {})".format(*row["span"]).replace("[", r"\["), row["also"], str(row["tensors"]), f"{row['bytes']:,}")
    Console().print(table)


@main.command()
@prompt_options
@model_options
@sampling_options
@cluster_options
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Requests, one after the other.")
@json_option
def bench(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, repeat: int, as_json: bool, **options: Any) -> None:
    """Measure the main job: ready time, prefill, decode, hops. PROMPT defaults to "Say hello"."""
    given = prompt or chat or tokens
    request = _request(prompt if given else "Say hello", chat, tokens, raw, options)
    with _cluster(options, Console(stderr=True)) as (cluster, model):
        job = Job(cluster, options["timeout"])
        reports = [describe(cluster, model, job.run(request)) for _ in range(repeat)]
    timings = {k: _median([r["timings"][k] for r in reports]) for k in reports[0]["timings"]}
    summary = reports[-1] | {"timings": timings, "runs": [r["timings"] for r in reports]}
    if as_json:
        click.echo(json.dumps(summary))
        return
    table = Table("figure", f"median of {repeat}", title=f"{model.name}, {cluster.plan.n_stages} stages")
    for name, value in timings.items():
        table.add_row(name, "-" if value is None else f"{value:,.3f}" if name.endswith("_s") and name != "tokens_per_s" else f"{value:,.1f}")
    for stage in summary["stages"]:
        table.add_row(f"stage {stage['stage']} weights_bytes", f"{stage['weights_bytes']:,}")
    Console().print(table)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@model_options
@cluster_options
@json_option
def smoke_run(as_json: bool, **options: Any) -> None:
    """The main job with "Say hello" and 64 tokens; fails if the reply is empty."""
    with _errors():
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, _interrupt)
        request = Request(prompt="Say hello", max_tokens=64)
        console = Console(stderr=True)
        with _cluster(options, console) as (cluster, model):
            answer = Job(cluster, options["timeout"]).run(request, (lambda text: None) if as_json else _print_text)
            report = describe(cluster, model, answer)
        click.echo(json.dumps(report) if as_json else "")
        if not report["text"].strip():
            raise RequestFailed("the reply is empty: `pp run --json` shows its token ids")
        if not options["quiet"]:
            console.print(_closing_line(report), highlight=False, soft_wrap=True)


@contextmanager
def _cluster(options: Mapping[str, Any], console: Console) -> Iterator[tuple[LocalCluster, Model]]:
    """Model, plan, and a cluster that is ready; progress meanwhile."""
    settings = _settings(options)
    how = Options(options["broker"], options["broker_port"], options["link"], options["relay"], options["timeout"])
    with Display(console, quiet=options["quiet"]) as display:
        model = open_model(settings.model, settings.cache, display.progress)
        cluster = LocalCluster(settings, make_plan(model, settings), how, display.members)
        entered = cluster.__enter__()
    with _leaving(entered):
        yield entered, model


@contextmanager
def _leaving(cluster: LocalCluster) -> Iterator[None]:
    """Leave a cluster that was entered elsewhere."""
    try:
        yield
    except BaseException:
        if not cluster.__exit__(*sys.exc_info()):
            raise
    else:
        cluster.__exit__(None, None, None)


def _settings(options: Mapping[str, Any]) -> Settings:
    names = ("model", "split", "wire", "readout", "context", "slots", "prefill_chunk", "kernels")
    given = {n: options[n] for n in names if options.get(n) is not None}
    stages = options["stages"] or (2 if options["split"] in ("even", "auto") else len(split_sizes(options["split"])))
    return replace(Settings.from_env(), stage=None, num_stages=stages, **given)


def _request(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, options: Mapping[str, Any]) -> Request:
    """Raises UsageError for a wrong combination, RequestError for a request that cannot be served."""
    if sum(x is not None for x in (prompt, chat, tokens)) > 1:
        raise UsageError("give one of PROMPT, --chat and --tokens")
    sampling = {n: options[n] for n in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
    if chat is not None:
        return Request(messages=_messages(chat), **sampling)
    if tokens is not None:
        return Request(tokens=_token_ids(tokens), **sampling)
    if prompt is None:
        if sys.stdin.isatty():
            raise UsageError('give a PROMPT, such as pp run "Say hello", or pipe one in')
        prompt = sys.stdin.read()
    return Request(prompt=prompt, raw=raw, **sampling)


def _messages(file: Path) -> tuple[Any, ...]:
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"--chat {file} is not readable JSON: {e}") from None
    if not isinstance(messages, list):
        raise UsageError(f'--chat {file} must hold a list: [{{"role": "user", "content": "..."}}]')
    return tuple(messages)


def _token_ids(tokens: str) -> tuple[int, ...]:
    try:
        return tuple(int(t) for t in tokens.replace(",", " ").split())
    except ValueError:
        raise UsageError('--tokens takes whole numbers: --tokens "1,2,3"') from None


def _stage_row(model: Model, plan: Plan, stage: int) -> dict[str, Any]:
    span, readout = plan.spans[stage], stage == plan.readout_stage
    tensors = model.stage_tensors(span.lo, span.hi, embedding=stage == 0, readout=readout)
    also = [*(["embedding"] if stage == 0 else []), *(["read-out"] if readout else [])]
    return {"stage": stage, "span": [span.lo, span.hi], "also": ", ".join(also), "tensors": len(tensors), "bytes": nbytes(tensors)}


def _closing_line(report: Mapping[str, Any]) -> str:
    timings, n = report["timings"], len(report["token_ids"])
    speed = f", {timings['tokens_per_s']:.1f} tok/s" if timings["tokens_per_s"] else ""
    return f"{n} tokens ({report['finish_reason']}), ready in {timings['ready_s']:.1f} s{speed}"


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _print_text(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
