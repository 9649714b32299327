"""What commands say on the terminal, and the files that they write."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from tercet.protocol import BadRequest

console = Console(stderr=False, highlight=False, soft_wrap=True)
PIPE_WIDTH = 140
# Of first columns: those that hold numbers, as all other columns do.
NUMBERS = ("rate", "chunk, KiB")


def say(text: str) -> None:
    """Print a line as it is: no markup, and at once, also into a pipe. A reader that is gone is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        console.print(text, markup=False)
        console.file.flush()


def note(line: str) -> None:
    """Say something about the progress, on standard error."""
    typer.echo(line, err=True)


def show_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on standard output."""
    drawn = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index or heading in NUMBERS else "left")
    for row in rows:
        drawn.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(drawn)


def require_folder(path: Path | None, flag: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if a file there could not be written; before the work is done."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadRequest(f"{flag}: {path.parent} is no folder", flag)


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Write what ``flag`` asked for; raises :class:`~tercet.protocol.BadRequest` if that is impossible."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"{flag}: {path} cannot be written: {error.strerror}", flag) from error
