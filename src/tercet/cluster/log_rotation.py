"""Logs of processes that run for long: each has a bound, and the part before is kept next to it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)
LARGEST = 64 * 1024 * 1024
"""Bytes of a log; with the part before there are at most twice as many."""
LOOK_SECONDS = 5.0
BEFORE = ".1"


def rotate(log: Path, largest: int = LARGEST) -> bool:
    """Move what a log has to ``LOG.1`` if it is larger than this; returns whether it was.

    Its writer goes on: it appends, and so at the new end. Lines that it writes while the log is copied may be lost.
    """
    try:
        if log.stat().st_size <= largest:
            return False
        before = log.with_name(log.name + BEFORE)
        with log.open("rb") as found, before.open("wb") as kept:
            found.seek(-largest, os.SEEK_END)  # it may have grown by more than that
            shutil.copyfileobj(found, kept)
        os.truncate(log, 0)
    except OSError as error:
        logger.warning("%s is not rotated: %s", log, error)
        return False
    return True


async def rotate_logs(logs: Callable[[], Iterable[Path]]) -> None:
    """Look at ``logs`` until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for log in list(logs()):
            await asyncio.to_thread(rotate, log)
