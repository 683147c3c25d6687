"""What a command was given, as settings, a model and ways to put a run up."""

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import click

from orchestrator.progress import Display
from orchestrator.run import Options
from pptasks.config import Settings
from pptasks.errors import NeedsToken
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import split_sizes

Given = Mapping[str, Any]
RENTED_MODEL = "llama3.2:1b"
LINKED_GRACE_S = 25.0  # a link across the internet may take that long to come back
LONG_S = 365 * 86400.0  # how long what costs nothing may stay


def how(given: Given, *, rented: bool) -> Options:
    """With machines elsewhere the link is needed, and relays unless they are refused."""
    relay = given["relay"] or ("default" if rented else "none")
    return Options(given["broker"], given["broker_port"], "iroh" if rented else given["link"], relay, given["timeout"])


def settings_from(given: Given) -> Settings:
    names = tuple(field.name for field in fields(Settings) if field.name in given)
    chosen = {n: given[n] for n in names if given.get(n) is not None}
    chosen["model"] = given["model"] or (RENTED_MODEL if given.get("vastai") else Settings.model)
    stages = given["stages"] or (2 if given["split"] in ("even", "auto") else len(split_sizes(given["split"])))
    return replace(Settings.of_this_machine(), num_stages=stages, **chosen)


def open_here(settings: Settings, display: Display) -> tuple[Settings, Model]:
    """The model, and the settings that name exactly it to every stage.

    Where access is refused and a person sits at a terminal, a token is asked for, once. It stays in the memory of this
    process and of the stages on this machine.
    """
    try:
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    except NeedsToken as e:
        if not is_terminal():
            raise
        with display.paused():
            click.echo(f"{e}", err=True)
            token = click.prompt("Hugging Face token (not shown, not kept)", hide_input=True, err=True)
        settings = replace(settings, hf_token=token.strip())
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    return replace(settings, model=model.spec), model


def open_elsewhere(settings: Settings, token: str | None, display: Display) -> tuple[Settings, Model]:
    """The model as machines elsewhere can have it: with `token` alone, never with the user's own."""
    settings = replace(settings, hf_token=token or "", hf_home=None, broker_grace_s=LINKED_GRACE_S)
    try:
        model = open_model(settings.model, settings.cache, display.progress, settings.hub)
    except NeedsToken as e:
        raise NeedsToken(
            f"{e}; your own token is not sent to other machines: give one that may read this repository and no more "
            "as PP_WORKER_HF_TOKEN"
        ) from None
    return replace(settings, model=model.spec), model


def is_terminal() -> bool:
    """Whether a person can be asked."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stderr.isatty())
