"""What asynchronous code of every room needs, from the standard library alone."""

from tercet.aio.tasks import TaskSet
from tercet.aio.threads import run_in_thread

__all__ = ["TaskSet", "run_in_thread"]
