"""Processes that only their parent ends: they ignore Ctrl-C and SIGTERM, which a terminal sends to all."""

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

    A child that sets them to be ignored, once it runs, could be hit before. A signal in the meantime is handled here
    when the child has all data for its start.
    """
    resource_tracker.ensure_running()  # otherwise the start does that, which unblocks them
    with _signals_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_later() -> Generator[None]:
    """Delay signals that arrive while entered; a mask does not keep them from threads of libraries."""
    if threading.current_thread() is not threading.main_thread():
        yield  # in Python only the main thread handles them
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
