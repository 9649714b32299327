"""Threads of the transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def start_thread(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a daemon thread; raises ``RuntimeError`` when the system has no more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
