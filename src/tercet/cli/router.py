"""``tercet router``: the front door."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from tercet.cli.setting_flags import settings_command
from tercet.cluster.addresses import require_free
from tercet.cluster.model import resolve_model
from tercet.cluster.vllm_flags import check_flags
from tercet.programs import load_program
from tercet.router import serve
from tercet.router.workers import supervise
from tercet.scheduling import load_scheduling
from tercet.settings import RouterConfig


@settings_command(RouterConfig, rest="router-args")
def router(config: RouterConfig) -> None:
    """Run the front door: one OpenAI endpoint over engines that run already.

    It waits for engines that are still loading. Flags after `--` go to vLLM's OpenAI layer (chat template, tool
    parsers, API keys, ...).

    Examples:
    - `tercet router --engine http://127.0.0.1:8001,role=prefill --engine http://127.0.0.1:8002,role=decode`
    - `tercet router --engine http://10.0.0.5:8001,name=a --program data_parallel -- --api-key secret`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --program mine.py:split --dev`
    - `tercet router --engine http://127.0.0.1:8001,label.zone=a --scheduling my.yaml --program-arg pick=scheduled`
    - `tercet router --engine http://127.0.0.1:8001 --max-in-flight-per-engine 64 --max-queued 200 --queue-timeout 10`
    - `tercet router --config router.yaml`, with lines such as `engines: [http://127.0.0.1:8001]`
    """
    check_flags(config.vllm_args, "vLLM flags after --")
    model = resolve_model(config.model, lambda line: typer.echo(line, err=True))
    config = msgspec.structs.replace(config, model=model, served_model_name=config.public_name)
    load_program(config.program, config.program_args)
    if config.scheduling is not None:
        load_scheduling(Path(config.scheduling).expanduser())
    require_free(config.host, config.port)
    if config.workers > 1:
        raise typer.Exit(supervise(config))
    serve(config)
