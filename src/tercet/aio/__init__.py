"""Helpers for asynchronous code in every package. They use only the standard library."""

from tercet.aio.tasks import (
    Failures,
    TaskSet,
    is_cancelled,
    keep_cancellation_counts,
    keep_running,
    repeat,
    run_in_thread,
    signals_to,
)

__all__ = [
    "Failures",
    "TaskSet",
    "is_cancelled",
    "keep_cancellation_counts",
    "keep_running",
    "repeat",
    "run_in_thread",
    "signals_to",
]
