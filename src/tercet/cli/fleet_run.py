"""Running a local fleet in the foreground: progress, signals, and one clear end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable

from rich.console import Console

from tercet.cluster.local import RunningFleet, local_fleet
from tercet.cluster.model import resolve_model
from tercet.cluster.spec import UpConfig
from tercet.programs import load_program

console = Console(stderr=False, highlight=False, soft_wrap=True)
STILL_SECONDS = 10.0


class Progress:
    """Says how each process gets on: a live line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._loading: list[str] = []
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, name: str, state: str) -> None:
        """One process reached a state."""
        if state == "loading":
            self._loading.append(name)
        elif name in self._loading:
            self._loading.remove(name)
        console.print(f"  {name}: {state}")

    async def tick(self) -> None:
        """Show the time that passes, until cancelled."""
        while True:
            await asyncio.sleep(1 if self._status is not None else STILL_SECONDS)
            if not self._loading:
                continue
            line = f"loading {', '.join(self._loading)} ({time.monotonic() - self._began:.0f} s)"
            if self._status is not None:
                self._status.update(line)
            else:
                console.print(f"  {line}")


def run_fleet(config: UpConfig, then: Callable[[RunningFleet], Awaitable[None]]) -> None:
    """Start the fleet, run ``then``, stop the fleet; Ctrl-C and SIGTERM stop it at any moment.

    Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143 when told to stop before ``then`` was done.
    """
    load_program(config.program, config.program_args)
    asyncio.run(_run(config, then))


async def _run(config: UpConfig, then: Callable[[RunningFleet], Awaitable[None]]) -> None:
    stopped_by: list[int] = []
    task = asyncio.ensure_future(_fleet(config, then))

    def stop(number: int) -> None:
        if not stopped_by:
            console.print("stopping")
            task.cancel()
        stopped_by.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        sys.exit(128 + stopped_by[0] if stopped_by else 1)


async def _fleet(config: UpConfig, then: Callable[[RunningFleet], Awaitable[None]]) -> None:
    with Progress() as progress:
        ticking = asyncio.create_task(progress.tick())
        try:
            model = await asyncio.to_thread(resolve_model, config.model, lambda line: progress("model", line))
            async with local_fleet(config, model, progress) as fleet:
                ticking.cancel()
                progress.__exit__()
                await then(fleet)
        finally:
            ticking.cancel()
