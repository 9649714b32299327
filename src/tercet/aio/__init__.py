"""What asynchronous code of every room needs, from the standard library alone."""

from tercet.aio.tasks import TaskSet, is_cancelled, repeat
from tercet.aio.threads import run_in_thread

__all__ = ["TaskSet", "is_cancelled", "repeat", "run_in_thread"]
