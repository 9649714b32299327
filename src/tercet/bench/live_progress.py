"""How a run gets on: one line that is rewritten on a terminal, plain lines elsewhere.

Written by hand, since every millisecond that this takes is one by which a token's time is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from typing import TextIO

from tercet.bench.results import RequestRecord

TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
BAR = 20
RECENT = 50


class LiveProgress:
    """Live numbers of one point; an observer of its traffic. Use as a context manager around the point."""

    def __init__(self, title: str, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._title = title
        self._total = total
        self._began = time.monotonic()
        self._due = self._over = self._failed = self._tokens = 0
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._tpot: deque[float] = deque(maxlen=RECENT)
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveProgress:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._terminal:
            self._write("\r\x1b[K")

    def due(self) -> None:
        """A request is due."""
        self._due += 1

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        self._over += 1
        self._failed += not record.ok
        self._tokens += record.output_tokens
        if record.ok and record.ttft is not None:
            self._ttft.append(record.ttft)
        if record.ok and record.tpot is not None:
            self._tpot.append(record.tpot)

    def line(self) -> str:
        """The state in one line; latencies are means of the last requests."""
        seconds = time.monotonic() - self._began
        parts = [f"{self._over}/{self._total}", f"{max(0, self._due - self._over)} in flight"]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"TTFT {_mean(self._ttft):.0f} ms"] if self._ttft else []
        parts += [f"TPOT {_mean(self._tpot):.1f} ms"] if self._tpot else []
        return f"{self._title}: " + ", ".join([*parts, f"{self._tokens / seconds:.0f} tokens/s", f"{seconds:.0f} s"])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)
            if self._terminal:
                filled = BAR * self._over // max(1, self._total)
                self._write(f"\r\x1b[K[{'#' * filled}{'.' * (BAR - filled)}] {self.line()}")
            else:
                self._write(f"{self.line()}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a reader that is gone is no reason to stop
            self._out.write(text)
            self._out.flush()


def _mean(seconds: deque[float]) -> float:
    return sum(seconds) / len(seconds) * 1000
