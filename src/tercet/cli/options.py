"""Flags that several commands have, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from tercet.cluster.vllm_flags import check_flags
from tercet.protocol import BadRequest
from tercet.router import EngineAddress

Model = Annotated[
    str, typer.Option(help="`smollm2` (built in), a checkpoint's directory, or any hub id that vLLM takes.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Program = Annotated[
    str, typer.Option(help="A built-in program (such as `disaggregated`), or your own: `file.py:function`.")
]
ProgramArg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A parameter of the program; repeatable.")
]
Dev = Annotated[bool, typer.Option("--dev", help="Load the program anew when its file changes.")]
ReturnAfter = Annotated[
    int, typer.Option(min=0, help="Failures of a program in a row before the one before it is used again; 0: never.")
]
VLLMArgs = Annotated[list[str] | None, typer.Argument(metavar="-- VLLM FLAGS", help="Passed on to vLLM as they are.")]


def key_values(given: Sequence[str] | None, flag: str) -> dict[str, str]:
    """``KEY=VALUE`` items as a mapping; raises :class:`~tercet.protocol.BadRequest` naming the flag."""
    found: dict[str, str] = {}
    for item in given or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise BadRequest(f"{flag}: {item!r} is not KEY=VALUE", flag)
        found[key] = value
    return found


def engine_address(given: str, index: int) -> EngineAddress:
    """``URL[,role=...][,name=...]`` as an engine's address; raises :class:`~tercet.protocol.BadRequest`."""
    url, *rest = given.split(",")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"--engine: {url!r} is not a URL such as http://127.0.0.1:8001", "--engine")
    fields: dict[str, Any] = {"name": f"engine-{index}", "url": url.rstrip("/"), **key_values(rest, "--engine")}
    try:
        return msgspec.convert(fields, EngineAddress)
    except msgspec.ValidationError as error:
        raise BadRequest(f"--engine: {given!r}: {error}", "--engine") from error


def vllm_flags(given: Sequence[str] | None) -> tuple[str, ...]:
    """What stood after ``--``; raises :class:`~tercet.protocol.BadRequest` for what cannot be passed on."""
    flags = tuple(given or ())
    check_flags(flags, "vLLM flags after --")
    return flags
