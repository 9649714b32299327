"""Child processes that ignore Ctrl-C and SIGTERM, which a terminal sends to all processes; their parent ends them."""

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
    """Start a process that has SIGINT and SIGTERM blocked from its first instruction on.

    (A signal could end a child that begins to ignore them only when it runs.) A signal to this process in the meantime
    is handled when the child has all data for its start.
    """
    resource_tracker.ensure_running()  # otherwise the start of the child does this, and unblocks the signals
    with _signals_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_later() -> Generator[None]:
    """Delay signals until the end of the context; a signal mask would not stop them in threads of libraries."""
    if threading.current_thread() is not threading.main_thread():
        yield  # in Python only the main thread handles signals
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
