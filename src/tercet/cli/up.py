"""``tercet up``: a whole fleet on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.cli.fleet_run import run_fleet, say
from tercet.cli.options import (
    Dtype,
    MaxInFlight,
    MaxInFlightPerEngine,
    MaxInFlightTokens,
    MaxInFlightTokensPerEngine,
    MaxQueued,
    MaxRequestBytes,
    ModelAlias,
    ProgramArg,
    QueueTimeout,
    RequestTimeout,
    Retries,
    RetryWithin,
    Scheduling,
    ServedModelName,
    VLLMArgs,
    Workers,
    key_values,
    vllm_flags,
)
from tercet.cluster.local import RunningFleet
from tercet.cluster.spec import UpConfig, load_up_config
from tercet.scheduling import load_scheduling
from tercet.sim import load_profile


def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="`smollm2` (built in), a checkpoint's directory, or any hub id that vLLM takes.",
            show_default="smollm2",
        ),
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill engines.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode engines.", show_default="1")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="Engines for either role.", show_default="0")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The front door's port; 0: any.", show_default="8000")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    program: Annotated[
        str | None,
        typer.Option(
            help="`data_parallel`, `disaggregated`, or your own: `file.py:function`.", show_default="disaggregated"
        ),
    ] = None,
    program_arg: ProgramArg = None,
    dev: Annotated[
        bool | None, typer.Option("--dev", help="Load the program anew when its file changes.", show_default=False)
    ] = None,
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
    dtype: Dtype = None,
    served_model_name: ServedModelName = None,
    model_alias: ModelAlias = None,
    kv_cache_gib: Annotated[
        int | None, typer.Option(min=1, help="KV memory of each CPU engine.", show_default="1")
    ] = None,
    log_dir: Annotated[
        str | None, typer.Option(help="Where logs go; a new directory in the cache if not given.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with the same keys (log-dir, engine-args, ...); flags win.")
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="Simulated engines, at the pace of a profile; the front door is real."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="With --simulate: an option of the simulated engines; repeatable."),
    ] = None,
    vllm_args: VLLMArgs = None,
) -> None:
    """Start engines and a front door, and stop all of them on Ctrl-C.

    CPU engines get cores of their own, GPU engines devices of their own. Flags after `--` go to every vLLM engine.

    Examples:
    - `tercet up`
    - `tercet up --prefill 0 --decode 0 --both 2 --program data_parallel --port 9000`
    - `tercet up --program mine.py:split --program-arg share=0.8 -- --max-num-seqs 32`
    - `tercet up --program mine.py:split --dev`
    - `tercet up --simulate llama-3.1-8b-h100-tp1 --prefill 2 --decode 6`
    - `tercet up --config up.yaml`, with lines such as `prefill: 2` and `engine-args: [--max-num-seqs, 32]`
    """
    flags: dict[str, Any] = {
        "model": model, "prefill": prefill, "decode": decode, "both": both, "port": port, "host": host,
        "program": program, "dev": dev, "dtype": dtype,
        "scheduling": scheduling, "retries": retries, "retry-within": retry_within,
        "max-in-flight": max_in_flight, "max-in-flight-per-engine": max_in_flight_per_engine,
        "max-in-flight-tokens": max_in_flight_tokens,
        "max-in-flight-tokens-per-engine": max_in_flight_tokens_per_engine,
        "max-queued": max_queued, "queue-timeout": queue_timeout,
        "request-timeout": request_timeout, "max-request-bytes": max_request_bytes, "workers": workers,
        "model-aliases": model_alias or None,
        "served-model-name": served_model_name, "kv-cache-gib": kv_cache_gib, "log-dir": log_dir,
        "program-args": key_values(program_arg, "--program-arg") or None,
        "engine-args": vllm_flags(vllm_args) or None, "simulate": simulate,
        "options": key_values(option, "--option") or None,
    }  # fmt: skip
    parsed = load_up_config(config, {key: value for key, value in flags.items() if value is not None})
    if parsed.scheduling is not None:
        load_scheduling(Path(parsed.scheduling).expanduser())
    if parsed.simulate is not None:
        load_profile(parsed.simulate)
    run_fleet(parsed, lambda fleet: _stay(parsed, fleet))


async def _stay(config: UpConfig, fleet: RunningFleet) -> None:
    _announce(config, fleet)
    await fleet.until_broken(lambda name, state: say(f"{name} {state}"))


def _announce(config: UpConfig, fleet: RunningFleet) -> None:
    body = json.dumps({"model": config.public_name, "messages": [{"role": "user", "content": "Say hello."}]})
    width = max(len(engine.name) for engine in fleet.engines)
    say(f"\nready at {fleet.url}, model {config.public_name}, program {config.program}")
    for engine in fleet.engines:
        say(f"  {engine.name:{width}}  {engine.role:7}  {engine.url}")
    say(f"  logs: {fleet.log_dir}\n")
    say(f"  curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    say("Ctrl-C stops everything.")
