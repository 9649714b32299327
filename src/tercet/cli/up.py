"""``tercet up``: run a whole fleet on this machine, with progress and signals; ``tercet router``: only its router.

Settings are checked here, before anything is started or imported for long: processes that are started believe them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tercet.cli.setting_flags import VLLM_FLAGS, settings_command
from tercet.cli.terminal import announce, note
from tercet.cluster.up_config import UpConfig
from tercet.logs import saying_while
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings import RouterConfig, settings_from_parent

if TYPE_CHECKING:
    from tercet.cluster.running_fleet import StartedFleet

# Interval, without a terminal, of the line that lists loading processes.
STILL_SECONDS = 10.0


@dataclass
class _Loading:
    """A process that loads; times are of the monotonic clock, in seconds."""

    began: float
    stage: str
    since: float


class FleetProgress:
    """Display of the states of processes; it is called as a :data:`~tercet.cluster.running_fleet.OnEvent`."""

    def __init__(self) -> None:
        from rich.live import Live

        from tercet.cli.terminal import console

        self._loading: dict[str, _Loading] = {}
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    async def __aenter__(self) -> FleetProgress:
        self._ticking = asyncio.create_task(self._tick())
        if self._live is not None:
            self._live.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live table; later states are printed as lines. A second call has no effect."""
        self._ticking.cancel()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, name: str, state: str) -> None:
        """Show that the process ``name`` reached ``state``."""
        from tercet.cluster.running_fleet import LOADING

        now = time.monotonic()
        word, _, stage = state.partition(": ")
        # The process has become ready, or has ended.
        if word != LOADING:
            self._loading.pop(name, None)
            announce(f"  {name}: {state}")
        elif stage:
            process = self._loading.setdefault(name, _Loading(now, stage, now))
            process.stage, process.since = stage, now
            if self._live is None:
                announce(f"  {name}: {stage} ({now - process.began:.0f} s)")
        else:
            self._loading[name] = _Loading(now, "starting", now)
            if self._live is None:
                announce(f"  {name}: {state}")
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        from rich.table import Table

        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        for name, process in self._loading.items():
            table.add_row(
                "", name, process.stage, f"{now - process.since:.0f} s", f"[dim]of {now - process.began:.0f} s"
            )
        self._live.update(table, refresh=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1 if self._live is not None else STILL_SECONDS)
            if self._live is not None:
                self._draw()
            elif self._loading:
                now = time.monotonic()
                parts = [f"{name} ({each.stage}, {now - each.since:.0f} s)" for name, each in self._loading.items()]
                announce(f"  still loading: {', '.join(parts)}")


JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets in the environment of a job's command."""


def run_fleet(config: UpConfig, then: Callable[[StartedFleet], Awaitable[None]]) -> None:
    """Start the fleet, run ``then``, and stop the fleet. Ctrl-C and SIGTERM stop it; a second signal stops it at once.

    ``config`` has passed :func:`require_usable`. Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143
    after a signal before the end of ``then``.
    """
    from tercet.cluster.model import resolve_model, resolve_tokenizer

    # This runs in the main thread, which a signal can interrupt: a first conversion takes half a minute.
    # Then only the tokenizer is needed, so no weights are converted.
    if config.serves_without_vllm:
        model = resolve_tokenizer(config.model)
    else:
        model = resolve_model(config.model, lambda line: announce(f"  model: {line}"))
    asyncio.run(_run(config, model, then))


def require_usable(config: UpConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for what this machine shows to be unusable, before a model loads."""
    from tercet.cluster.detached_fleets import log_directory
    from tercet.cluster.model import known_model
    from tercet.cluster.ports import require_free
    from tercet.cluster.up_config import require_usable_router

    if config.simulate is not None:
        from tercet.cluster.engine_command import simulated_engine

        simulated_engine().require_usable(config.simulate, config.options)
    if config.on is not None:
        _ray("ray-access")()
    require_usable_router(config)
    known_model(config.model)
    if config.log_dir is not None:
        log_directory(config.log_dir)
    if config.port:
        require_free(config.host, config.port)


async def _run(config: UpConfig, model: str, then: Callable[[StartedFleet], Awaitable[None]]) -> None:
    from tercet.aio.tasks import signals_to
    from tercet.cluster.local import local_fleet

    async def run() -> None:
        started = local_fleet if config.on is None else _ray("ray-fleet")
        async with FleetProgress() as progress, started(config, model, progress, hurried) as fleet:
            progress.close()
            await then(fleet)

    hurried = asyncio.Event()
    task = asyncio.ensure_future(run())

    def stop() -> None:
        announce("stopping")
        task.cancel()

    def hurry() -> None:
        announce("stopping at once: running requests end with an error")
        hurried.set()

    with signals_to(stop, hurry) as asked:
        try:
            await task
        except asyncio.CancelledError:
            sys.exit(128 + asked[0] if asked else 1)


@settings_command(UpConfig, rest="engine-args")
def up(config: UpConfig) -> None:
    """Start engines and a router, and stop all of them on Ctrl-C.

    Each CPU engine gets its own cores, and each GPU engine its own devices. Flags after `--` go to every vLLM engine.

    Examples:
    - `tercet up`
    - `tercet up --prefill 0 --decode 0 --both 2 --program data_parallel --port 9000`
    - `tercet up --program mine.py:split --program-arg share=0.8 -- --max-num-seqs 32`
    - `tercet up --program mine.py:split --dev`
    - `tercet up --simulate llama-3.1-8b-h100-tp1 --prefill 2 --decode 6`
    - `tercet up --on ray --max-instances 8 --pd-ratio 1:3 --engine-gpus 1 --host 10.0.0.9`
    - `tercet up --detach`, then `tercet status`, and in the end `tercet down`
    - `tercet up --config up.yaml`, with lines such as `prefill: 2` and `engine-args: [--max-num-seqs, 32]`
    """
    require_usable(config)
    if config.detach:
        from tercet.cli.detached import detach

        detach(config)
        return
    if JOB_VARIABLE in os.environ:
        sys.exit(_ray("ray-job")(config))
    run_fleet(config, lambda fleet: stay(config, fleet))


def _ray(part: str) -> Any:
    return provided(PARTS, part, "ray", "on")


async def stay(config: UpConfig, fleet: StartedFleet) -> None:
    """Print the fleet's address, and wait until the fleet breaks."""
    from tercet.cli.detached import until_broken

    messages = [{"role": "user", "content": "Say hello."}]
    body = json.dumps({"model": config.public_name, "messages": messages, "max_tokens": 50})
    width = max(len(engine.name) for engine in fleet.engines)
    announce(f"\nready at {fleet.url}, model {config.public_name}, program {config.program}")
    for engine in fleet.engines:
        announce(f"  {engine.name:{width}}  {engine.role:7}  {engine.url}")
    announce(f"  logs: {fleet.log_dir}\n")
    announce(f"  curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    announce("Ctrl-C finishes running requests and stops the fleet; a second Ctrl-C stops it at once.")
    await until_broken(config, fleet, detached=False)


@settings_command(RouterConfig, rest="router-args")
def router(config: RouterConfig) -> None:
    """Run the router: one OpenAI endpoint for running engines.

    The router waits for engines that are still loading. Flags after `--` go to vLLM's OpenAI layer (chat template, tool
    parsers, API keys, ...).

    Examples:
    - `tercet router --engine http://127.0.0.1:8001,role=prefill --engine http://127.0.0.1:8002,role=decode`
    - `tercet router --engine http://10.0.0.5:8001,name=a --program data_parallel -- --api-key KEY`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --program mine.py:split --dev`
    - `tercet router --engine http://127.0.0.1:8001,label.zone=a --scheduling my.yaml --program-arg pick=scheduled`
    - `tercet router --engine http://127.0.0.1:8001 --max-in-flight-per-engine 64 --max-queued 200 --queue-timeout 10`
    - `tercet router --endpoint-selector app=vllm`, in a pod of Kubernetes
    - `tercet router --config router.yaml`, with lines such as `engines: [http://127.0.0.1:8001]`
    """
    from tercet.cluster.model import known_model, resolve_model, resolve_tokenizer
    from tercet.cluster.ports import require_free
    from tercet.cluster.up_config import require_usable_router
    from tercet.cluster.vllm_flags import check_flags
    from tercet.wire.client import engine_tls

    check_flags(config.vllm_args, VLLM_FLAGS)
    require_usable_router(config)
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    known = known_model(config.model)
    require_free(config.host, config.port)
    model = resolve_tokenizer(known) if config.serves_without_vllm else resolve_model(known, note)
    raise typer.Exit(_serve(msgspec.structs.replace(config, model=model, served_model_name=config.public_name)))


def serve_router() -> None:
    """Run the router whose settings are in the file of the command line, where `tercet up` has written them."""
    from tercet.cli.app import exit_code_of, exit_on_signal

    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(exit_code_of(lambda: _serve(settings_from_parent(RouterConfig, Path(sys.argv[1])))))


def _serve(config: RouterConfig) -> int:
    if config.workers > 1:
        from tercet.router.workers import supervise

        return supervise(config)
    with saying_while("importing the router", note):
        from tercet.router.server import serve
    serve(config)
    return 0
