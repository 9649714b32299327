"""What commands say on the terminal, and the files that they write."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from tercet.protocol import BadRequest

# Of tables that go elsewhere than to a terminal: wide enough for every column's words.
PIPE_WIDTH = 1000
# Of first columns: those that hold numbers, as all other columns do.
NUMBERS = ("rate", "chunk, KiB")


class NobodyReads(Exception):
    """The reader of standard output has left, as ``head`` does: the command ends without an error message.

    No ``OSError``, so that it is not taken for one of the connection that an answer comes from.
    """


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise NobodyReads


# What moves a terminal's cursor, changes its colours or its title, or the order of what is read; not lines and tabs.
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


def printable(text: str) -> str:
    """``text`` with its control characters as escapes: models, engines and clients do not write to the terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


console = _Terminal(stderr=False, highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Write to standard output, at once, also into a pipe. Raises :class:`NobodyReads`, as the others here do."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        raise NobodyReads from None


def say(text: str) -> None:
    """Print a line as it is: no markup, and at once, also into a pipe."""
    console.print(printable(text), markup=False)
    try:
        console.file.flush()
    except BrokenPipeError:
        raise NobodyReads from None


def announce(text: str) -> None:
    """Print the progress of a fleet; a closed standard output does not stop it."""
    try:
        say(text)
    except NobodyReads:
        forget_stdout()


def forget_stdout() -> None:
    """What is left to write to standard output, and what is still to come, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def note(line: str) -> None:
    """Say something about the progress, on standard error."""
    typer.echo(printable(line), err=True)


@contextmanager
def progress(first: str) -> Generator[Callable[[str], None]]:
    """While entered, tells how it gets on: in one place on a terminal, else by a line on standard error each time."""
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:
        note(first)
        yield note


def show_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on standard output."""
    drawn = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index or heading in NUMBERS else "left")
    for row in rows:
        drawn.add_row(*row)
    _Terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(drawn)


def require_folder(path: Path | None, flag: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if a file there could not be written; before the work is done."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadRequest(f"{flag}: {path.parent} is not a folder", flag)


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Write what ``flag`` asked for; raises :class:`~tercet.protocol.BadRequest` if that is impossible."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"{flag}: {path} cannot be written: {error.strerror}", flag) from error
