"""``tercet up``: run a whole fleet on this machine in the foreground, with progress and signals."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet.cli.setting_flags import settings_command
from tercet.cli.terminal import announce
from tercet.cluster.up_config import UpConfig
from tercet.protocol.entry_points import PARTS, provided

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

    Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143 after a signal before the end of ``then``.
    """
    from tercet.cluster.model import resolve_model, resolve_tokenizer
    from tercet.cluster.ports import require_free

    known = require_usable(config)
    if config.port:
        require_free(config.host, config.port)
    # This runs in the main thread, which a signal can interrupt: a first conversion takes half a minute.
    # Then only the tokenizer is needed, so no weights are converted.
    if config.serves_without_vllm:
        model = resolve_tokenizer(known)
    else:
        model = resolve_model(known, lambda line: announce(f"  model: {line}"))
    asyncio.run(_run(config, model, then))


def require_usable(config: UpConfig) -> str:
    """Raise :class:`~tercet.protocol.BadRequest` for unusable settings, free ports apart; return the model to load.

    The built-in model may need a conversion first.
    """
    from tercet.cluster.detached_fleets import log_directory
    from tercet.cluster.model import known_model
    from tercet.cluster.up_config import require_usable_router

    require_usable_router(config)
    model = known_model(config.model)
    if config.log_dir is not None:
        log_directory(config.log_dir)
    return model


async def _run(config: UpConfig, model: str, then: Callable[[StartedFleet], Awaitable[None]]) -> None:
    from tercet.aio import signals_to

    hurried = asyncio.Event()
    task = asyncio.ensure_future(_fleet(config, model, then, hurried))

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


async def _fleet(
    config: UpConfig, model: str, then: Callable[[StartedFleet], Awaitable[None]], hurry: asyncio.Event
) -> None:
    from tercet.cluster.local import local_fleet

    started = local_fleet if config.on is None else _ray("ray-fleet")
    async with FleetProgress() as progress, started(config, model, progress, hurry) as fleet:
        progress.close()
        await then(fleet)


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
    if config.simulate is not None:
        from tercet.cluster.engine_command import simulated_engine

        simulated_engine().require_usable(config.simulate, config.options)
    if config.on is not None:
        _ray("ray-access")()
    # The settings are checked here first, where errors are read; the fleet checks them again.
    if config.detach:
        from tercet.cli.detached import detach

        require_usable(config)
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
