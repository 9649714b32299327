"""A correction of CPython's task groups before version 3.13."""

from __future__ import annotations

import asyncio
import sys
from functools import wraps
from typing import Any

FIXED = (3, 13)
_MENDED = "_tercet_mended"


def keep_cancellation_counts() -> None:
    """Correct :class:`asyncio.TaskGroup` in this process: it takes back each cancellation that it has requested itself.

    Before CPython 3.13, a group whose task fails cancels the task that waits for the group, and does not take that
    back. The waiting task continues, but counts as cancelled from then on (:meth:`asyncio.Task.cancelling`). Users'
    programs run in tasks in which this count distinguishes a client's disconnect from any other failure.
    """
    group: Any = asyncio.TaskGroup
    if sys.version_info >= FIXED or hasattr(group, _MENDED):
        return
    leave = group.__aexit__

    @wraps(leave)
    async def leave_and_take_back(self: Any, *failure: Any) -> Any:
        asked_before = self._parent_cancel_requested  # requests that the group takes back by itself
        try:
            return await leave(self, *failure)
        finally:
            if self._parent_cancel_requested and not asked_before:
                self._parent_task.uncancel()

    group.__aexit__ = leave_and_take_back
    setattr(group, _MENDED, True)
