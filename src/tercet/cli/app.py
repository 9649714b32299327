"""The ``tercet`` command and how its errors look: one line, exit code 2 for bad input, 1 for what failed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tercet import __version__
from tercet.cli.demo import demo
from tercet.cli.engine import engine
from tercet.cli.router import router
from tercet.cli.up import up
from tercet.protocol import BadRequest, TercetError

app = typer.Typer(
    name="tercet",
    help="Programmable orchestration for LLM serving: three verbs per engine, a few lines per serving pattern.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(engine)
app.command()(router)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tercet {__version__}")
        raise typer.Exit


@app.callback()
def tercet(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Programmable orchestration for LLM serving."""


def main() -> None:
    """Run the command line; this is the ``tercet`` script."""
    try:
        app()
    except BadRequest as error:
        _exit(error, 2)
    except TercetError as error:
        _exit(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _exit(error: TercetError, code: int) -> None:
    typer.echo(f"tercet: {error.message}", err=True)
    sys.exit(code)
