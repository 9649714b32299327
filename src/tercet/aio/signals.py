"""Signals that ask a process to end: the first asks it to finish its work, the second to stop at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_to(first: Callable[[], object], second: Callable[[], object]) -> Generator[list[int]]:
    """Call ``first`` on the event loop at the first signal to end, and ``second`` at the second, while entered.

    Later signals change nothing. Yield the list of the signals received so far. On exit the default handlers return, so
    a signal ends the process. A signal that is ignored on entry stays ignored: ``nohup`` relies on this to keep a
    process alive when its terminal closes.
    """
    loop = asyncio.get_running_loop()
    handled = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    asked: list[int] = []

    def take(number: int) -> None:
        asked.append(number)
        if len(asked) <= 2:
            (first if len(asked) == 1 else second)()

    for number in handled:
        loop.add_signal_handler(number, take, number)
    try:
        yield asked
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
