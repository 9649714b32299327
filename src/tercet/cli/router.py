"""``tercet router``: the front door."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tercet.cli.options import (
    Dev,
    Host,
    MaxInFlight,
    MaxInFlightPerEngine,
    MaxInFlightTokens,
    MaxInFlightTokensPerEngine,
    MaxQueued,
    MaxRequestBytes,
    Model,
    ModelAlias,
    Program,
    ProgramArg,
    QueueTimeout,
    RequestTimeout,
    Retries,
    RetryWithin,
    ReturnAfter,
    Scheduling,
    ServedModelName,
    StreamPort,
    VLLMArgs,
    Workers,
    checked,
    engine_address,
    key_values,
    vllm_flags,
)
from tercet.cluster.addresses import require_free
from tercet.cluster.model import resolve_model
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.router import RouterConfig, serve
from tercet.router.admission import Limits
from tercet.router.config import MAX_REQUEST_BYTES
from tercet.router.recovery import RetryBudget
from tercet.router.workers import supervise
from tercet.scheduling import load_scheduling


def router(
    engine: Annotated[
        list[str],
        typer.Option(
            metavar="URL[,role=R][,name=N][,label.KEY=V]",
            help="An engine; role is prefill, decode or both, labels are for scheduling. Repeatable.",
        ),
    ],
    model: Model = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI API.")] = 8000,
    host: Host = "127.0.0.1",
    served_model_name: ServedModelName = None,
    model_alias: ModelAlias = None,
    program: Program = "disaggregated",
    program_arg: ProgramArg = None,
    return_after: ReturnAfter = 5,
    dev: Dev = False,
    scheduling: Scheduling = None,
    retries: Retries = None,
    retry_within: RetryWithin = None,
    max_in_flight: MaxInFlight = None,
    max_in_flight_per_engine: MaxInFlightPerEngine = None,
    max_in_flight_tokens: MaxInFlightTokens = None,
    max_in_flight_tokens_per_engine: MaxInFlightTokensPerEngine = None,
    max_queued: MaxQueued = None,
    queue_timeout: QueueTimeout = None,
    request_timeout: RequestTimeout = None,
    max_request_bytes: MaxRequestBytes = None,
    workers: Workers = None,
    stream_port: StreamPort = None,
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
    - `tercet router --engine http://127.0.0.1:8001,label.zone=a --scheduling my.yaml --program-arg pick=scheduled`
    - `tercet router --engine http://127.0.0.1:8001 --max-in-flight-per-engine 64 --max-queued 200 --queue-timeout 10`
    """
    budget = checked(RetryBudget, {"--retries": ("retries", retries), "--retry-within": ("within", retry_within)})
    limits = checked(
        Limits,
        {
            "--max-in-flight": ("in_flight", max_in_flight),
            "--max-in-flight-per-engine": ("in_flight_per_engine", max_in_flight_per_engine),
            "--max-in-flight-tokens": ("tokens", max_in_flight_tokens),
            "--max-in-flight-tokens-per-engine": ("tokens_per_engine", max_in_flight_tokens_per_engine),
            "--max-queued": ("queued", max_queued),
            "--queue-timeout": ("queue_seconds", queue_timeout),
        },
    )
    if request_timeout is not None and not request_timeout > 0:
        raise BadRequest(
            f"--request-timeout: {request_timeout} is not a number of seconds above 0", "--request-timeout"
        )
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
        scheduling=scheduling,
        retries=budget,
        limits=limits,
        request_timeout=request_timeout,
        max_request_bytes=MAX_REQUEST_BYTES if max_request_bytes is None else max_request_bytes,
        workers=workers or 1,
        stream_port=stream_port or 0,
        log_level=log_level,
        vllm_args=vllm_flags(vllm_args),
    )
    load_program(config.program, config.program_args)
    if scheduling is not None:
        load_scheduling(Path(scheduling).expanduser())
    require_free(host, port)
    if config.workers > 1:
        raise typer.Exit(supervise(config))
    serve(config)
