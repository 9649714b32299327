"""Comments in a silent stream, so that proxies keep its connection open.

Relies on the text of vLLM's ``SSE_KEEP_ALIVE_COMMENT``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT

from tercet.vllm_plugin.fast_path.sse_chunks import framed

COMMENT = framed(SSE_KEEP_ALIVE_COMMENT.encode())


class KeepAlive:
    """Passes frames to ``write``, and writes a comment after ``interval`` seconds without a frame."""

    def __init__(self, write: Callable[[bytes], None], interval: float) -> None:
        self._write = write
        self._interval = interval
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, frame: bytes) -> None:
        """Write a frame."""
        self._last = asyncio.get_running_loop().time()
        self._write(frame)

    @contextmanager
    def running(self) -> Generator[None]:
        """Write comments as needed while entered."""
        self._last = asyncio.get_running_loop().time()
        self._wait()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._last + self._interval, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._last + self._interval:
            self.write(COMMENT)
        self._wait()
