"""Threads of the transport."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import Any

logger = logging.getLogger(__name__)


def start_thread(
    name: str, target: Callable[..., Any], *args: Any, cpus: Collection[int] | None = None
) -> threading.Thread:
    """Start a daemon thread; on ``cpus`` if given and to be had.

    A thread inherits the CPUs of the one that starts it. An inference worker is pinned to the cores that it computes
    on, and moving bytes there would slow the forward pass down while other cores are idle.
    """

    def run() -> None:
        if cpus:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:  # slower there, but no reason not to run
                logger.warning("%s cannot run on CPUs %s: %s", name, sorted(cpus), error)
        target(*args)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
