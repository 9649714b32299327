"""Threads of the transport."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

TURN_BYTES = 1024 * 1024


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
