"""Helpers for asynchronous code in every package. They use only the standard library."""

from tercet.aio.signals import signals_to
from tercet.aio.task_groups import keep_cancellation_counts
from tercet.aio.tasks import Failures, TaskSet, is_cancelled, keep_running, repeat
from tercet.aio.threads import run_in_thread

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
