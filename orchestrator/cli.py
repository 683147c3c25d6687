"""`pp`: parse, call, echo. Text goes to stdout as it is sampled; everything else to stderr. Exit codes: 0 done, 1
failed, 2 wrong use."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator import asked, launch, options, tables
from orchestrator.bench import bench
from orchestrator.chat import chat
from orchestrator.given import open_here, settings_from
from orchestrator.hire import DryRun
from orchestrator.job import Job, describe
from orchestrator.manage import down, ps, sweep
from orchestrator.progress import Display
from orchestrator.serve.command import serve
from orchestrator.signals import interrupt_once, interruptible
from orchestrator.terminal import print_text, tell
from orchestrator.up import join, up
from pptasks.errors import PPError, RequestFailed, StillBilling, UsageError, VerifyFailed
from pptasks.plan import make_plan
from pptasks.request import MAX_TOKENS, Request

FAILED = 1
SMOKE_S, SMOKE_USD = 300.0, 1.0


class CLI(click.Group):
    """Every PPError becomes one line on stderr and its exit code; a stage's own last lines follow it."""

    def invoke(self, ctx: click.Context) -> Any:
        with _errors():
            return super().invoke(ctx)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except DryRun:
        return
    except PPError as e:
        if isinstance(e, StillBilling) and isinstance(e.__context__, PPError):
            tell(e.__context__)  # what failed first
        tell(e)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        click.echo("cancelled", err=True)
        sys.exit(FAILED)
    except BrokenPipeError:
        raise  # click's own way: whoever read our output has gone
    except OSError as e:
        click.echo(f"error: {e.strerror or e}{f': {e.filename}' if e.filename else ''}", err=True)
        if sys.stdout is not None:  # what it could not write must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


@click.group(cls=CLI, context_settings=options.HELP)
@click.version_option(package_name="pptasks")
def main() -> None:
    """Run one large language model across several machines, cut by layers.

    Each stage is a Celery worker that holds its own layers only; the hidden state travels from queue to queue. Try: pp
    run "Say hello"
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    interrupt_once()


@main.command()
@options.prompt
@options.model
@options.max_tokens
@options.sampling
@options.answer
@options.logprobs
@options.cluster
@options.named
@options.as_json
def run(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, as_json: bool, **given: Any) -> None:
    """Start the stages here, answer PROMPT (or what is piped in), and leave nothing behind."""
    if given["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs: only --json shows them; give it too")
    request = asked.request(prompt, chat, tokens, raw, given)
    console = Console(stderr=True)
    show = (lambda text: None) if as_json else print_text
    with launch.cluster(given, console) as (cluster, model):
        answer = Job(cluster, given["timeout"]).run(request, show)
        report = describe(cluster, model, answer)
        if as_json:
            click.echo(json.dumps(report))
        else:
            click.echo("" if report["text"].endswith("\n") else "\n", nl=False)
    if not given["quiet"]:
        console.print(tables.closing_line(report), markup=False, highlight=False, soft_wrap=True)
    if report["finish_reason"] == "cancelled":
        sys.exit(FAILED)


@main.command()
@options.model
@options.as_json
def plan(as_json: bool, **given: Any) -> None:
    """Show what each stage would hold; start nothing."""
    console = Console(stderr=True)
    settings = settings_from(given)
    with Display(console) as display:
        settings, model = open_here(settings, display)
    made = make_plan(model, settings)
    rows = tables.plan_rows(model, made)
    if as_json:
        click.echo(json.dumps({"model": model.name, "plan": made.to_json(), "stages": rows}))
    else:
        title = f"{model.name}: {made.n_blocks} blocks, {made.wire} on the wire"
        Console().print(tables.plan_table(rows, title))


@main.command()
@options.as_json
def models(as_json: bool) -> None:
    """List the known names for --model: files that anyone may download."""
    rows = tables.known_models()
    if as_json:
        click.echo(json.dumps(rows))
    else:
        Console().print(tables.models_table(rows))


@main.command()
@options.prompt
@options.model
@options.option("--max-tokens", "Tokens to generate and check.", type=click.IntRange(1, MAX_TOKENS), default=32)
@options.sampling
@options.cluster
@options.named
@options.as_json
def verify(prompt: str | None, chat: Path | None, tokens: str | None, raw: bool, as_json: bool, **given: Any) -> None:
    """Check that the stages compute what the model says. Exit 1 if anything differs.

    Answers PROMPT (or what is piped in, or "Say hello"), computes it again with every layer on the head alone, and
    compares tokens and what each stage's blocks gave for every position: bit by bit where the stages' processors round
    as the head's does, else within what rounding explains. The head fetches every layer for it, and holds only as many
    at a time as fit its memory.
    """
    if prompt is None and chat is None and tokens is None:
        prompt = asked.piped() or "Say hello"
    request = replace(asked.request(prompt, chat, tokens, raw, given), verify=True)
    with launch.cluster(given | {"verify": True}, Console(stderr=True)) as (cluster, model):
        answer = Job(cluster, given["timeout"]).run(request)
        report = describe(cluster, model, answer) | {"verification": answer.get("verification")}
    found = report["verification"]
    if as_json:
        click.echo(json.dumps(report))
    elif found is not None and not given["quiet"]:
        print_text(report["text"] + "\n")
        Console().print(tables.verification_table(report))
    if found is None:
        raise VerifyFailed("the request was cancelled before it could be verified")
    if not found["passed"]:
        raise VerifyFailed(found["reason"])
    how = "every bit of every hidden state is the same" if found["exact"] else "the same but for rounding"
    if not as_json:
        click.echo(f"verified: {len(found['token_ids'])} tokens; {how}")


@click.command(context_settings=options.HELP)
@options.model
@options.cluster
@options.rented
@options.as_json
def smoke_run(as_json: bool, **given: Any) -> None:
    """The main job with "Say hello" and 64 tokens; fails if the reply is empty.

    With --vastai it rents the machines, and ends them: within --deadline (5m by default) and --budget-usd (1).
    """
    with _errors():
        interrupt_once()
        given |= {"deadline": given["deadline"] or SMOKE_S, "budget_usd": given["budget_usd"] or SMOKE_USD}
        request = Request(prompt="Say hello", max_tokens=64)
        console = Console(stderr=True)
        with launch.cluster(given | {"as_json": as_json}, console) as (cluster, model), interruptible():
            answer = Job(cluster, given["timeout"]).run(request, (lambda text: None) if as_json else print_text)
            report = describe(cluster, model, answer)
            click.echo(json.dumps(report) if as_json else "")
        if report["finish_reason"] == "cancelled":
            raise KeyboardInterrupt
        if not report["text"].strip():
            raise RequestFailed("the reply is empty: `pp run --json` shows its token ids")
        if not given["quiet"]:
            console.print(tables.closing_line(report), markup=False, highlight=False, soft_wrap=True)


for command in (bench, chat, serve, up, join, ps, down, sweep):
    main.add_command(command)


if __name__ == "__main__":
    main()
