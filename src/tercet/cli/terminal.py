"""Output of commands to the terminal and to files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tercet.protocol import BadRequest

if TYPE_CHECKING:
    from rich.console import Console

    console: Console

# Characters of tables that are not written to a terminal: wide enough for every column.
PIPE_WIDTH = 1000
# Headings of first columns that hold numbers and are therefore aligned to the right.
NUMBERS = ("rate", "chunk, KiB")


class NobodyReads(Exception):
    """Raised if the reader of standard output closes it, as ``head`` does: the command ends without an error message.

    The class is not an ``OSError``, so that it is not mistaken for an error of a connection.
    """


# Characters that move a terminal's cursor, change colours, title or reading direction; not line ends and tabs.
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


def printable(text: str) -> str:
    """Return ``text`` with control characters as escapes, so that text of others cannot control the terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def __getattr__(name: str) -> Any:
    """Make ``console`` at its first use: most commands print lines only, and rich takes a tenth of a second."""
    if name != "console":
        raise AttributeError(name)
    return globals().setdefault(name, _terminal(stderr=False, highlight=False, soft_wrap=True))


def _terminal(**options: Any) -> Console:
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise NobodyReads

    return Terminal(**options)


def write(text: str) -> None:
    """Write to standard output and flush it. Raises :class:`NobodyReads`."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        raise NobodyReads from None


def say(text: str) -> None:
    """Print a line, and flush it. Raises :class:`NobodyReads`."""
    write(f"{text}\n")


def announce(text: str) -> None:
    """Print the progress of a fleet; a closed standard output does not stop the fleet."""
    try:
        say(text)
    except NobodyReads:
        forget_stdout()


def forget_stdout() -> None:
    """Redirect standard output to the null device, including text that is not flushed yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # The interpreter flushes standard output at its exit, and would print an error about the closed pipe.
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def note(line: str) -> None:
    """Print a line about the progress on standard error."""
    typer.echo(printable(line), err=True)


@contextmanager
def progress(first: str) -> Generator[Callable[[str], None]]:
    """Yield a function that shows progress: it updates one line of a terminal, or prints lines on standard error."""
    if sys.stdout.isatty():
        from tercet.cli.terminal import console

        with console.status(first) as status:
            yield status.update
    else:
        note(first)
        yield note


def show_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table on standard output."""
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index or heading in NUMBERS else "left")
    for row in rows:
        drawn.add_row(*row)
    _terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(drawn)


def require_folder(path: Path | None, flag: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if ``path`` cannot be a file: its folder does not exist, or it is one.

    Call it before the work.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise BadRequest(f"{flag}: {path.parent} is not a folder; give an existing one", flag)
    if path is not None and path.is_dir():
        raise BadRequest(f"{flag}: {path} is a folder; name a file", flag)


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Write the file of ``flag``; raise :class:`~tercet.protocol.BadRequest` if it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"{flag}: {path} cannot be written: {error.strerror}", flag) from error
