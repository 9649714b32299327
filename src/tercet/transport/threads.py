"""Threads of the transport."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Any


def start_thread(
    name: str, target: Callable[..., Any], *args: Any, cpus: Collection[int] | None = None
) -> threading.Thread:
    """Start a daemon thread; on ``cpus`` if given.

    A thread inherits the CPUs of the one that starts it. An inference worker is pinned to the cores that it computes
    on, and moving bytes there would slow the forward pass down while other cores are idle.
    """

    def run() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        target(*args)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
