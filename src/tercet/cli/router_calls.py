"""Calls of a running router by commands: their options, the call, and the printed answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.aio.files import read_named
from tercet.cli.terminal import say
from tercet.protocol import BadRequest, EngineUnreachable
from tercet.protocol.access import given_key
from tercet.settings import require_url
from tercet.settings.process_settings import (
    ADMIN_KEY_FILE_VARIABLE,
    ADMIN_KEY_VARIABLE,
    CLIENT_KEY_VARIABLE,
    URL_VARIABLE,
    KeyFile,
)
from tercet.wire.client.bounded_answers import ask_router

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Base URL of the router.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=CLIENT_KEY_VARIABLE, help="Client key, if the router requires one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the router's answer as JSON.")]
HERE = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class RunningRouter:
    """The router that a command calls, and the admin key of the calls."""

    url: Url = HERE
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_KEY_VARIABLE,
            help=f"Admin key of the router. Without it the first key of the file `{ADMIN_KEY_FILE_VARIABLE}` is used.",
        ),
    ] = None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Call the router and return its answer; raise :class:`~tercet.protocol.TercetError`."""
        require_url(self.url, "--url", HERE)
        return asyncio.run(ask_router(self.url, method, path, body, _key(self.admin_key)))


def _key(given: str | None) -> str:
    if given is not None:
        return given_key(given, "--admin-key")
    file = os.environ.get(ADMIN_KEY_FILE_VARIABLE, "")
    return KeyFile(file, ADMIN_KEY_FILE_VARIABLE).first()[0] if file else ""


@contextmanager
def understood() -> Generator[None]:
    """Raise :class:`~tercet.protocol.EngineUnreachable` if the block finds an answer of another shape."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise EngineUnreachable(
            f"the answer is not that of a router of this version: {type(error).__name__}: {error}", "url"
        ) from error


def text_of(file: Path, name: str) -> str:
    """Return the text of a file; raise :class:`~tercet.protocol.BadRequest` if it cannot be read."""
    try:
        return read_named(file).decode("utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"{name}: {file} cannot be read: {getattr(error, 'strerror', None) or error}", name) from error


def show_answer(answer: Any, as_json: bool, in_words: Callable[[Any], Iterable[str]]) -> None:
    """Print an answer as JSON, or as the lines of ``in_words``."""
    with understood():
        lines = [json.dumps(answer, indent=2)] if as_json else list(in_words(answer))
    for line in lines:
        say(line)
