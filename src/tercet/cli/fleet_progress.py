"""Progress of a fleet's processes while they load: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rich.live import Live
from rich.table import Table

from tercet.cli.terminal import announce, console
from tercet.cluster.running_fleet import LOADING

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
        now = time.monotonic()
        word, _, stage = state.partition(": ")
        if word != LOADING:
            self._loading.pop(name, None)
            announce(f"  {name}: {state}")
        elif stage:
            self._enter(name, stage, now)
        else:
            self._loading[name] = _Loading(now, "starting", now)
            if self._live is None:
                announce(f"  {name}: {state}")
        self._draw()

    def _enter(self, name: str, stage: str, now: float) -> None:
        process = self._loading.setdefault(name, _Loading(now, stage, now))
        process.stage, process.since = stage, now
        if self._live is None:
            announce(f"  {name}: {stage} ({now - process.began:.0f} s)")

    def _draw(self) -> None:
        if self._live is None:
            return
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
