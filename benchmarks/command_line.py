"""The command lines of benchmarks. A wrong argument gives a message of one line and exit code 2, as in ``tercet``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

import typer
import typer.main

from tercet.cli.app import exit_code_of, exit_on_signal
from tercet.protocol import BadRequest


def run(command: Callable[..., None], name: str) -> None:
    """Run a command that was started as ``python -m NAME``, and exit."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(run_with(command, name, sys.argv[1:]))


def run_with(command: Callable[..., None], name: str, arguments: list[str]) -> int:
    """Run a command with these arguments, and return its exit code."""
    app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    app.command(name)(command)
    built: Any = typer.main.get_command(app)
    return exit_code_of(lambda: built.main(arguments, prog_name=f"python -m {name}", standalone_mode=False))


def names_in(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names of a comma-separated list. Raise :class:`~tercet.protocol.BadRequest` for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise BadRequest(f"{flag}: {unknown!r} is unknown; choose from {', '.join(known)}", flag)
    return names


def numbers_in(flag: str, text: str, unit: int = 1) -> list[int]:
    """Return the numbers of a comma-separated list, multiplied by ``unit``.

    Raise :class:`~tercet.protocol.BadRequest` unless each product is a whole number of at least 1.
    """
    try:
        found = [float(item) * unit for item in text.split(",")]
    except ValueError:
        raise BadRequest(f"{flag}: {text!r} is not a comma-separated list of numbers", flag) from None
    if not all(number >= 1 and number.is_integer() for number in found):
        raise BadRequest(f"{flag}: {text!r} has a number that is 0 or less, or not whole", flag)
    return [int(number) for number in found]
