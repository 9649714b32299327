"""Threads of the transport."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

TURN_BYTES = 1024 * 1024
# What a receiver with a limit was idle for, or slept too long, it may make up for: up to here.
BURST_SECONDS = 0.005


def start_thread(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a daemon thread; raises ``RuntimeError`` when the system has no more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


class Turn:
    """One thread's turn on a core that it shares.

    vLLM's processes wait for one another by giving up their core and looking again. A thread that copies without end
    would keep it until the kernel takes it away, several milliseconds for each look; so it gives it up, too.
    """

    def __init__(self) -> None:
        self._copied = 0

    def took(self, nbytes: int) -> None:
        """Count what was copied; after :data:`TURN_BYTES` others may run."""
        self._copied += nbytes
        if self._copied >= TURN_BYTES:
            self._copied = 0
            os.sched_yield()


class Pace:
    """How fast the receiving threads of a rank may take KV in, together: ``limit`` bytes per second, 0 for any speed.

    Where cores share the way to memory, what is taken in slows down what is computed, on whichever core that is.
    Thread-safe.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def took(self, nbytes: int) -> None:
        """Count what was taken in; returns once more may be. Not to be called while a lease is held."""
        if not self._limit:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_SECONDS) + nbytes / self._limit
            wait = self._free_at - now
        if wait > 0:
            self._over.wait(wait)

    def close(self) -> None:
        """Nobody waits any more."""
        self._over.set()
