"""Calls of a running router by commands: their options, the call, and the printed answer.

A command makes one call and ends, so it calls with the standard library: asyncio and aiohttp take a third of a second.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
import typer

from tercet.cli.terminal import say
from tercet.cli.which_fleet import WhichFleet, others_in_words
from tercet.protocol import BadRequest, EngineNotReached, EngineUnreachable
from tercet.protocol.access import given_key
from tercet.protocol.wire import API_PREFIX, answer_of_router, network_reason
from tercet.settings.process_settings import ADMIN_KEY_FILE_VARIABLE, ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, KeyFile
from tercet.wire.callers import bearer

ApiKey = Annotated[str | None, typer.Option(envvar=CLIENT_KEY_VARIABLE, help="Client key, if the router requires one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the router's answer as JSON.")]
CONNECT_SECONDS = 5.0
# Adding an engine waits for the engine's answer, and loading a program for the user's module.
READ_SECONDS, CHANGE_SECONDS = 20.0, 60.0
LONGEST = 16 * 1024 * 1024
_PART = 1 << 16


@dataclass(frozen=True)
class RunningRouter(WhichFleet):
    """The router that a command calls, and the admin key of the calls."""

    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_KEY_VARIABLE,
            help=f"Admin key of the router. Without it the first key of the file `{ADMIN_KEY_FILE_VARIABLE}` is used.",
        ),
    ] = None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Call the router and return its answer; raise :class:`~tercet.protocol.TercetError`."""
        try:
            return ask_router(self.at, method, path, body, _key(self.admin_key))
        except EngineNotReached as error:
            raise EngineNotReached(error.message + others_in_words(self.at), "url") from error

    @cached_property
    def at(self) -> str:
        """The router's URL, found once: a command that calls often calls the same router."""
        return self.router_url()


def ask_router(url: str, method: str, path: str, body: Any, admin_key: str) -> Any:
    """Return the router's JSON answer to ``method`` on ``/tercet/v1`` + ``path``.

    Raises the :class:`~tercet.protocol.TercetError` in the answer, and :class:`~tercet.protocol.EngineUnreachable` if
    no router answers there: :class:`~tercet.protocol.EngineNotReached` if the call was certainly not sent.
    """
    at = urlsplit(url.rstrip("/"))
    assert at.hostname is not None
    if at.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(at.hostname, at.port, timeout=CONNECT_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=CONNECT_SECONDS)
    # This reader does not decompress.
    headers = {"content-type": "application/json", "accept-encoding": "identity", **bearer(admin_key)}
    try:
        # By itself: only an error before the first byte says that the call had no effect.
        connection.connect()
    except OSError as error:
        raise EngineNotReached(f"no router answers at {url}: {network_reason(error)}", "url") from error
    try:
        data = None if body is None else msgspec.json.encode(body)
        deadline = time.monotonic() + (READ_SECONDS if method == "GET" else CHANGE_SECONDS)
        sock = connection.sock  # http.client drops it at once if the server will close the connection
        sock.settimeout(deadline - time.monotonic())
        connection.request(method, quote(at.path + API_PREFIX + path, safe="/?&=%:@!$'()*+,;~"), data, headers)
        response = connection.getresponse()
        # http.client's timeout is for each read: a server that sends a byte now and then would hold the command
        # forever.
        content = _bounded(response, lambda: sock.settimeout(max(1e-3, deadline - time.monotonic())))
    except http.client.RemoteDisconnected as error:
        raise EngineUnreachable(f"no router answers at {url}: it closed the connection", "url") from error
    except (http.client.HTTPException, OSError) as error:
        raise EngineUnreachable(f"no router answers at {url}: {network_reason(error)}", "url") from error
    finally:
        connection.close()
    return answer_of_router(url, response.status, content)


def _bounded(response: http.client.HTTPResponse, wait: Callable[[], None]) -> bytes:
    """Return the whole body; ``wait`` limits each read. Raises ``HTTPException`` for an answer that is not read."""
    encoding = (response.getheader("content-encoding") or "identity").strip().lower()
    if 300 <= response.status < 400:
        raise http.client.HTTPException(f"it redirects (HTTP {response.status}), which is not followed")
    if encoding != "identity":
        raise http.client.HTTPException(f"it answers in {encoding[:20]!r}, which was not requested")
    content = bytearray()
    wait()
    while part := response.read1(_PART):
        content += part
        wait()
        if len(content) > LONGEST:
            raise http.client.HTTPException(f"its answer has more than {LONGEST} bytes")
    return bytes(content)


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
    from tercet.aio.files import read_named  # imports asyncio

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
