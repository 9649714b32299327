"""What the commands that talk to a running front door have in common."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from tercet.client.ask_front_door import ask_front_door
from tercet.protocol import BadRequest

Url = Annotated[str, typer.Option(help="The front door's base URL.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="TERCET_API_KEY", help="Its API key, if it was started with `-- --api-key`.")
]
Json = Annotated[bool, typer.Option("--json", help="The front door's answer as it is.")]
HERE = "http://127.0.0.1:8000"


def ask(url: str, api_key: str | None, method: str, path: str, body: Any = None) -> Any:
    """The front door's answer; raises :class:`~tercet.protocol.TercetError`."""
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"--url: {url!r} is not a URL such as {HERE}", "--url")
    return asyncio.run(ask_front_door(url, method, path, body, api_key))


def say(text: str) -> None:
    """A line on standard output."""
    typer.echo(text)
