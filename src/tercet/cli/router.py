"""``tercet router``: the front door."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tercet.cli.options import (
    Dev,
    Host,
    Model,
    Program,
    ProgramArg,
    ReturnAfter,
    VLLMArgs,
    engine_address,
    key_values,
    vllm_flags,
)
from tercet.cluster.addresses import require_free
from tercet.cluster.model import resolve_model
from tercet.programs import load_program
from tercet.router import RouterConfig, serve


def router(
    engine: Annotated[
        list[str],
        typer.Option(metavar="URL[,role=R][,name=N]", help="An engine; role is prefill, decode or both. Repeatable."),
    ],
    model: Model = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI API.")] = 8000,
    host: Host = "127.0.0.1",
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in the OpenAI API.")] = None,
    model_alias: Annotated[
        list[str] | None, typer.Option(help="One more name of the model, that rules may go by; repeatable.")
    ] = None,
    program: Program = "disaggregated",
    program_arg: ProgramArg = None,
    return_after: ReturnAfter = 5,
    dev: Dev = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Of its log.")] = "info",
    vllm_args: VLLMArgs = None,
) -> None:
    """Run the front door: one OpenAI endpoint over engines that run already.

    It waits for engines that are still loading. Flags after `--` go to vLLM's OpenAI layer (chat template, tool
    parsers, API keys, ...).

    Examples:
    - `tercet router --engine http://127.0.0.1:8001,role=prefill --engine http://127.0.0.1:8002,role=decode`
    - `tercet router --engine http://10.0.0.5:8001,name=a --program data_parallel -- --api-key secret`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --program mine.py:split --dev`
    """
    config = RouterConfig(
        model=resolve_model(model, lambda line: typer.echo(line, err=True)),
        served_model_name=served_model_name or model,
        model_aliases=tuple(model_alias or ()),
        host=host,
        port=port,
        engines=tuple(engine_address(given, index) for index, given in enumerate(engine)),
        program=program,
        program_args=key_values(program_arg, "--program-arg"),
        return_after=return_after,
        dev=dev,
        log_level=log_level,
        vllm_args=vllm_flags(vllm_args),
    )
    load_program(config.program, config.program_args)
    require_free(host, port)
    serve(config)
