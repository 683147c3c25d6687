"""What people read of an answer, and of an error."""

import sys

import click

from pptasks import shown
from pptasks.errors import PPError, StageFailed


def print_text(text: str) -> None:
    """On stdout. Whoever wrote the text must not rule a terminal; a pipe or a file gets every byte of it."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    click.echo(shown.plain(text) if is_terminal else text, nl=False, color=True)  # else click leaves some bytes out


def tell(error: PPError) -> None:
    """On stderr, one line, and below it the last ones that a stage wrote."""
    click.echo(f"error: {shown.plain(str(error))}", err=True)
    for line in error.log if isinstance(error, StageFailed) else ():
        click.echo(f"  | {shown.line(line)}", err=True)
