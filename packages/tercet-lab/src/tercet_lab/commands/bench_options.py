"""Commands of ``tercet bench``: their flags are the settings of a benchmark, and some have special parsers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tercet.cli.setting_flags import flags_given, flags_of, given_as, optional, parameters_of, taking
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_lab.bench.bench_config import OUTPUT, REQUESTS, BenchConfig, load_config

SEVERAL = ("request_rate", "concurrency")
BY_HAND: dict[str, Any] = {
    "extra_body": Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Extra fields of every request's body, as a JSON object.", rich_help_panel=REQUESTS
        ),
    ],
    "goodput": Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS[,...]",
            help="SLO in milliseconds, as in `ttft:500,tpot:50,e2el:5000`.",
            rich_help_panel=OUTPUT,
        ),
    ],
    "result_filename": Annotated[
        Path | None,
        typer.Option(help="JSON file for the results.", show_default="bench-<time>.json", rich_help_panel=OUTPUT),
    ],
    "config": Annotated[
        Path | None,
        typer.Option("--config", help="YAML file with the same keys; flags override it.", rich_help_panel=OUTPUT),
    ],
}


def bench_command(kind: type[BenchConfig]) -> Callable[[Callable[[Any, Path | None], None]], Callable[..., None]]:
    """Return a decorator for a command that takes a configuration of ``kind`` and the path of its result file.

    Flags override the file. ``TERCET_URL`` is the only environment variable that is read: the command line and the file
    determine a measurement.
    """

    def decorate(command: Callable[[Any, Path | None], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(result_filename: Path | None = None, config: Path | None = None, **given: Any) -> None:
            for name in SEVERAL:
                given[name] = [part.strip() for item in given[name] or () for part in item.split(",")]
            if given["extra_body"] is not None:
                given["extra_body"] = _json_object(given["extra_body"])
            if given["goodput"] is not None:
                given["goodput"] = limits_of(given["goodput"])
            with given_as({**flags_of(kind), "goodput": "--goodput"}):
                found = load_config(kind, config, flags_given(kind, given))
            command(found, result_filename)

        return taking(run, optional({**parameters_of(kind, by_variable=("base-url",)), **BY_HAND}))

    return decorate


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise BadRequest(f"--extra-body: must be a JSON object: {error}", "extra-body") from error


def limits_of(texts: Sequence[str]) -> dict[str, str]:
    """Return ``NAME:MS[,...]`` items as a mapping; raise :class:`~tercet.protocol.BadRequest`."""
    found: dict[str, str] = {}
    for item in (item for text in texts for item in text.replace(" ", ",").split(",") if item):
        name, colon, value = item.partition(":")
        if not colon:
            raise BadRequest(f"--goodput: {item!r} is not NAME:MILLISECONDS, as in ttft:500", "goodput")
        found[name] = value
    return found
