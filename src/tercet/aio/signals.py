"""Signals that ask a process to end: the first one politely, the second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_to(first: Callable[[], object], second: Callable[[], object]) -> Generator[list[int]]:
    """Call ``first`` and ``second`` on the event loop at the first and second such signal while entered.

    Later signals change nothing. Yields the list of the signals received. Afterwards a signal ends the process as
    usual. A signal that is ignored when this is entered stays ignored: that is how ``nohup`` keeps a process from
    ending with its terminal.
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
