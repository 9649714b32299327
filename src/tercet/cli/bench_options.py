"""The flags that ``tercet bench serve`` and ``tercet bench compare`` share, and how their values are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tercet.bench.arrivals import Arrival
from tercet.bench.openai_client import Endpoint, PromptAs
from tercet.protocol import BadRequest
from tercet.settings import key_values

TARGET, LOAD, WORK, REQUESTS, OUTPUT = "Target", "Load", "Workload", "Requests", "Output"

BaseUrl = Annotated[
    str | None,
    typer.Option(help="The server, without /v1.", show_default="http://127.0.0.1:8000", rich_help_panel=TARGET),
]
EndpointFlag = Annotated[
    Endpoint | None,
    typer.Option("--endpoint", help="The API to use.", show_default="completions", rich_help_panel=TARGET),
]
Model = Annotated[
    str | None, typer.Option(help="The model's name there.", show_default="its first", rich_help_panel=TARGET)
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="`smollm2`, a checkpoint's directory or a hub id.", show_default="the model's", rich_help_panel=TARGET
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="A header of every request. OPENAI_API_KEY is sent if set.", rich_help_panel=TARGET
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds until a request counts as failed.", show_default="600", rich_help_panel=TARGET),
]
ArrivalFlag = Annotated[
    Arrival | None,
    typer.Option(
        "--arrival",
        help="`closed`: as many users as --concurrency says. `trace`: at the times of the workload's trace.",
        show_default="poisson",
        rich_help_panel=LOAD,
    ),
]
RequestRate = Annotated[
    str | None,
    typer.Option(
        metavar="R[,R...]", help="Requests per second; `inf` for all at once. Each is a point.", rich_help_panel=LOAD
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(
        help="Of --arrival gamma: its shape. Below 1 is bursty, 1 is Poisson.", show_default="1", rich_help_panel=LOAD
    ),
]
Concurrency = Annotated[
    str | None, typer.Option(metavar="N[,N...]", help="Users of a closed loop. Each is a point.", rich_help_panel=LOAD)
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Cap on requests in flight of an open loop.", rich_help_panel=LOAD)
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        help="Requests per point, later turns of sessions included.",
        show_default="100; all of a trace",
        rich_help_panel=LOAD,
    ),
]
Duration = Annotated[
    float | None, typer.Option(help="Instead of --num-prompts: seconds of arrivals per point.", rich_help_panel=LOAD)
]
NumWarmups = Annotated[
    int | None,
    typer.Option(
        help="Requests before those that are measured, at the same load.", show_default="0", rich_help_panel=LOAD
    ),
]
WorkloadFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="KIND[,KEY=VALUE...]",
        help="`sonnet`, `random`, `shared_prefix`, `sessions`, `sharegpt`, `mooncake`, `azure`; `+` mixes kinds. "
        "Given again, it takes over half-way.",
        show_default="sonnet",
        rich_help_panel=WORK,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Of arrivals, lengths and words.", show_default="0", rich_help_panel=WORK)
]
PromptAsFlag = Annotated[
    PromptAs | None,
    typer.Option(
        "--prompt-as",
        help="Whether prompts are sent as token ids or as text.",
        show_default="tokens; text in a chat",
        rich_help_panel=WORK,
    ),
]
CacheSalt = Annotated[
    str | None,
    typer.Option(
        help="`always`, `never`, `auto`: whether points are kept from finding each other's prefixes.",
        show_default="auto: for texts from a file",
        rich_help_panel=WORK,
    ),
]
Temperature = Annotated[float | None, typer.Option(help="Of sampling.", show_default="0", rich_help_panel=REQUESTS)]
TopP = Annotated[float | None, typer.Option(help="Of sampling.", rich_help_panel=REQUESTS)]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Whether answers have exactly the length asked for (vLLM).",
        show_default="yes",
        rich_help_panel=REQUESTS,
    ),
]
ExtraBody = Annotated[
    str | None, typer.Option(metavar="JSON", help="More fields of every request's body.", rich_help_panel=REQUESTS)
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS[,...]",
        help="The SLO, as in `ttft:500,tpot:50,e2el:5000`.",
        rich_help_panel=OUTPUT,
    ),
]
Result = Annotated[
    Path | None,
    typer.Option(help="The JSON file to write.", show_default="bench-<time>.json", rich_help_panel=OUTPUT),
]
SaveRecords = Annotated[
    bool | None,
    typer.Option(
        "--save-records/--no-save-records",
        help="Whether the file has every request's times.",
        show_default="yes",
        rich_help_panel=OUTPUT,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A YAML file with the same keys; flags win.", rich_help_panel=OUTPUT)
]

LISTS = ("request_rate", "concurrency")


def given_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, under the configuration's keys; raises :class:`~tercet.protocol.BadRequest`."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in LISTS:
        if name in given:
            given[name] = [item.strip() for item in given[name].split(",")]
    for name, flag in (("header", "--header"), ("also", "--also")):
        if name in given:
            given[name] = key_values(given[name], flag)
    if "extra_body" in given:
        given["extra_body"] = _json_object(given["extra_body"])
    if "goodput" in given:
        given["goodput"] = _limits(given["goodput"])
    return {name.replace("_", "-"): value for name, value in given.items()}


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadRequest(f"--extra-body: is no JSON object: {error}", "extra-body") from error


def _limits(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in (item for text in texts for item in text.replace(" ", ",").split(",") if item):
        name, colon, value = item.partition(":")
        if not colon:
            raise BadRequest(f"--goodput: {item!r} is not NAME:MILLISECONDS, as in ttft:500", "goodput")
        found[name] = value
    return found
