"""`pp serve`: a cluster, here or held by `pp up`, behind HTTP until Ctrl-C."""

import json
import re
from typing import Any

import click
from rich.console import Console

from orchestrator import launch, options
from orchestrator.flower import flower_for
from orchestrator.serve.address import bind, is_loopback, url_of
from orchestrator.serve.state import Access, Limits
from pptasks import shown
from pptasks.errors import UsageError

_KEY = re.compile(r"[!-~]{1,256}", re.ASCII)
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]{1,255}")


@click.command(context_settings=options.HELP)
@options.model
@options.cluster
@options.named
@options.option("--host", "Address to listen on.", default="127.0.0.1", metavar="ADDRESS")
@options.option("--port", "0: a free one.", type=click.IntRange(0, 65535), default=8080)
@options.option(
    "--api-key",
    "What clients must send as Authorization: Bearer KEY. Others see arguments: better give it as PP_API_KEY.",
    envvar="PP_API_KEY",
    default=None,
)
@click.option("--no-auth", is_flag=True, help="Let anybody who reaches it use it.")
@options.option(
    "--cors", "A web page from there may use it, such as https://chat.example.org; may be given again.",
    multiple=True, metavar="ORIGIN",
)  # fmt: skip
@options.option(
    "--max-queue",
    "Answers under way or waiting at once; more are refused (429).",
    type=click.IntRange(1, 65536),
    default=Limits.queue,
)
@options.flower
@options.as_json
def serve(as_json: bool, host: str, port: int, cors: tuple[str, ...], max_queue: int, **given: Any) -> None:
    """Serve the model to OpenAI's clients, with a page at / that shows the pipeline. Until Ctrl-C.

    The base URL for a client is http://127.0.0.1:8080/v1. Only this machine reaches it, unless --host says otherwise;
    then it needs an --api-key.
    """
    key, no_auth = given.pop("api_key"), given.pop("no_auth")
    _check(host, key, no_auth, cors)
    access = Access(key, local_only=key is None and not no_auth, origins=cors)
    limits = Limits(queue=max_queue, silence_s=given["timeout"])
    with (
        bind(host, port) as bound,
        launch.cluster(given, Console(stderr=True)) as (cluster, model),
        flower_for(given, cluster),
    ):
        from orchestrator.serve.serving import hold  # loads what no other command needs

        url = url_of(bound, host)
        hold(cluster, model, bound, access, limits, on_ready=lambda: _announce(url, model.name, as_json))


def _check(host: str, key: str | None, no_auth: bool, origins: tuple[str, ...]) -> None:
    """Raises UsageError for what would serve strangers without anybody having said so."""
    if key is not None and no_auth:
        raise UsageError("--api-key and --no-auth: give one of them (PP_API_KEY may be set)")
    if key is not None and not _KEY.fullmatch(key):
        raise UsageError("--api-key: give up to 256 letters, digits and signs of ASCII, without spaces")
    if key is None and not no_auth and not is_loopback(host):
        raise UsageError(f"--host {host} lets other machines in: give an --api-key, or --no-auth to let anybody use it")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors {shown.line(origin, 100)}: give an origin such as https://chat.example.org, or *")


def _announce(url: str, model: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"url": url, "model": model}))
    else:
        click.echo(f"{shown.line(model)} is served at {url}, to OpenAI's clients at {url}/v1; Ctrl-C ends it")
