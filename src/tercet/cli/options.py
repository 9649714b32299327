"""Flags that several commands have, and how their values are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from tercet.cluster.vllm_flags import check_flags
from tercet.protocol import BadRequest
from tercet.router import EngineAddress

T = TypeVar("T")

Model = Annotated[
    str, typer.Option(help="`smollm2` (built in), a checkpoint's directory, or any hub id that vLLM takes.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="As vLLM's. float32 for token-exact comparisons.",
        show_default="bfloat16; float32 on CPUs without instructions for that",
    ),
]
ServedModelName = Annotated[str | None, typer.Option(help="The model's name in the OpenAI API.")]
ModelAlias = Annotated[
    list[str] | None, typer.Option(help="One more name of the model, that rules may go by; repeatable.")
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
Scheduling = Annotated[
    str | None, typer.Option(metavar="FILE", help="A scheduling file (YAML), whose profiles picks may name.")
]
LIMITS = "Limits"
Retries = Annotated[
    int | None, typer.Option(min=0, help="Further attempts for a sequence that an engine fails.", show_default="2")
]
RetryWithin = Annotated[
    float | None,
    typer.Option(help="None begins later than so many seconds after the client's last token.", show_default="600"),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(min=1, help="Requests under way at once; more wait.", show_default="no limit", rich_help_panel=LIMITS),
]
MaxInFlightPerEngine = Annotated[
    int | None,
    typer.Option(
        min=1, help="The same, for each engine that decodes.", show_default="no limit", rich_help_panel=LIMITS
    ),
]
MaxInFlightTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Prompt tokens on engines from which on requests wait.", show_default="no limit",
        rich_help_panel=LIMITS,
    ),
]  # fmt: skip
MaxInFlightTokensPerEngine = Annotated[
    int | None,
    typer.Option(
        min=1, help="The same, for each engine that decodes.", show_default="no limit", rich_help_panel=LIMITS
    ),
]
MaxQueued = Annotated[
    int | None,
    typer.Option(min=0, help="Requests that may wait; more get 429.", show_default="1000", rich_help_panel=LIMITS),
]
QueueTimeout = Annotated[
    float | None, typer.Option(help="Seconds of waiting, then 429.", show_default="30", rich_help_panel=LIMITS)
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds that a request may take, then 504.", show_default="no limit", rich_help_panel=LIMITS),
]
MaxRequestBytes = Annotated[
    int | None,
    typer.Option(min=1, help="Size of a request's body; larger: 413.", show_default="64 MiB", rich_help_panel=LIMITS),
]
Workers = Annotated[
    int | None, typer.Option(min=1, max=256, help="Front-door processes that share the port.", show_default="1")
]
StreamPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Where engines connect their token streams; one port more for each further worker.",
        show_default="any free one",
    ),
]  # fmt: skip
VLLMArgs = Annotated[list[str] | None, typer.Argument(metavar="-- VLLM FLAGS", help="Passed on to vLLM as they are.")]

LABEL = "label."


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
    """``URL[,role=...][,name=...][,label.KEY=...]`` as an engine's address.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    url, *rest = given.split(",")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"--engine: {url!r} is not a URL such as http://127.0.0.1:8001", "--engine")
    told = key_values(rest, "--engine")
    labels = {key.removeprefix(LABEL): value for key, value in told.items() if key.startswith(LABEL)}
    fields: dict[str, Any] = {key: value for key, value in told.items() if not key.startswith(LABEL)}
    fields = {"name": f"engine-{index}", "url": url.rstrip("/"), "labels": labels, **fields}
    try:
        return msgspec.convert(fields, EngineAddress)
    except msgspec.ValidationError as error:
        raise BadRequest(f"--engine: {given!r}: {error}", "--engine") from error


def vllm_flags(given: Sequence[str] | None) -> tuple[str, ...]:
    """What stood after ``--``; raises :class:`~tercet.protocol.BadRequest` for what cannot be passed on."""
    flags = tuple(given or ())
    check_flags(flags, "vLLM flags after --")
    return flags


def checked(kind: type[T], flags: Mapping[str, tuple[str, Any]]) -> T:
    """A record out of flags: the field that each one stands for, and its value; None is the field's default.

    Raises :class:`~tercet.protocol.BadRequest` that names the flag.
    """
    fields = {field: value for field, value in flags.values() if value is not None}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        flag = next((flag for flag, (field, _) in flags.items() if field == path.rstrip("`")), "")
        raise BadRequest(f"{flag}: {reason[:1].lower()}{reason[1:]}", flag) from error
