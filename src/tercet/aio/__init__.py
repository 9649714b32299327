"""What asynchronous code of every room needs, from the standard library alone."""

from tercet.aio.tasks import TaskSet

__all__ = ["TaskSet"]
