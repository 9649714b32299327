"""Processes that only their parent ends: Ctrl-C and SIGTERM, which a terminal or a supervisor sends to all, pass by."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


def start_unsignalled(process: BaseProcess) -> None:
    """Start it with those signals blocked from its first instruction on, for good.

    A child that were told to ignore them, once it runs, could be hit before. One that comes meanwhile is heard here
    when the child has all that it needs to begin.
    """
    resource_tracker.ensure_running()  # else the start does that, which unblocks them
    with _signals_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_later() -> Generator[None]:
    """What comes while entered is handled when it is left; a mask does not keep it from threads of libraries."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python has only the main thread handle them
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
