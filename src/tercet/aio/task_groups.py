"""What CPython's task groups leave behind, before 3.13."""

from __future__ import annotations

import asyncio
import sys
from functools import wraps
from typing import Any

FIXED = (3, 13)
_MENDED = "_tercet_mended"


def keep_cancellation_counts() -> None:
    """Have :class:`asyncio.TaskGroup` take back each cancellation that it has asked for itself, in this process.

    Before CPython 3.13 a group cancels the task that waits for it at its end when one of its tasks fails, and does not
    take that back: the task counts as cancelled by somebody ever after (:meth:`asyncio.Task.cancelling`), though it
    goes on. Programs of users run in tasks in which that count tells a client that has left from any other failure.
    """
    group: Any = asyncio.TaskGroup
    if sys.version_info >= FIXED or hasattr(group, _MENDED):
        return
    leave = group.__aexit__

    @wraps(leave)
    async def leave_and_take_back(self: Any, *failure: Any) -> Any:
        asked_before = self._parent_cancel_requested  # those the group takes back by itself
        try:
            return await leave(self, *failure)
        finally:
            if self._parent_cancel_requested and not asked_before:
                self._parent_task.uncancel()

    group.__aexit__ = leave_and_take_back
    setattr(group, _MENDED, True)
