"""Threads of the transport, and limits on their speed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

TURN_BYTES = 1024 * 1024
# Maximum time, in seconds, for which a receiver with a limit may catch up after it was idle or slept too long.
BURST_SECONDS = 0.005


def start_thread(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a daemon thread; raise ``RuntimeError`` if the system cannot start more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


class Turn:
    """One thread's turn on a core that it shares.

    vLLM's processes wait for one another by yielding their core and polling. A thread that copies without a pause would
    keep the core until the kernel preempts it, several milliseconds per poll; so it yields, too.
    """

    def __init__(self) -> None:
        self._copied = 0

    def took(self, nbytes: int) -> None:
        """Count copied bytes; after :data:`TURN_BYTES`, let other threads run."""
        self._copied += nbytes
        if self._copied >= TURN_BYTES:
            self._copied = 0
            os.sched_yield()


class Pace:
    """Common limit of a rank's receiving threads: ``limit`` bytes per second, 0 for no limit.

    If cores share the path to memory, receiving slows down computing on any core. Thread-safe.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def took(self, nbytes: int) -> None:
        """Count received bytes; return once more may be received. Do not call this while a lease is held."""
        if not self._limit:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_SECONDS) + nbytes / self._limit
            wait = self._free_at - now
        if wait > 0:
            self._over.wait(wait)

    def close(self) -> None:
        """Release all waiting threads."""
        self._over.set()
