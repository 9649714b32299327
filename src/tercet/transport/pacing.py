"""Threads of the transport, and their pace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

TURN_BYTES = 1024 * 1024
# Longest time that a receiver with a limit was idle, or slept too long, for which it may catch up.
BURST_SECONDS = 0.005


def start_thread(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a daemon thread; raises ``RuntimeError`` when the system has no more."""
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
        """Count copied bytes; after :data:`TURN_BYTES` others may run."""
        self._copied += nbytes
        if self._copied >= TURN_BYTES:
            self._copied = 0
            os.sched_yield()


class Pace:
    """Limit of the receiving threads of a rank together: ``limit`` bytes per second, 0 for no limit.

    If cores share the path to memory, receiving slows computing down, on whichever core it runs. Thread-safe.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def took(self, nbytes: int) -> None:
        """Count received bytes; returns once more may be received. Do not call this while a lease is held."""
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
