"""Rotates the logs of long-running processes: each has a size limit, and the previous part is kept next to it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)
LARGEST = 64 * 1024 * 1024
"""Largest size of a log in bytes; with the previous part there is at most twice as much."""
POLL_INTERVAL_S = 5.0
BEFORE = ".1"


def rotate(log: Path, largest: int = LARGEST) -> bool:
    """Move a log's content to ``LOG.1`` if it is larger than ``largest``; returns whether it was.

    Its writer continues: it appends, and so writes at the new end. Lines that it writes during the copy may be lost.
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
    """Check ``logs`` at intervals until cancelled."""
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        for log in list(logs()):
            await asyncio.to_thread(rotate, log)
