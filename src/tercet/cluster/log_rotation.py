"""Rotation of the logs of long-running processes: each has a size limit, and its previous part is kept next to it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tercet.aio import repeat

logger = logging.getLogger(__name__)
LARGEST = 64 * 1024 * 1024
"""Largest size of a log in bytes; together with its previous part it has at most twice this size."""
POLL_INTERVAL_S = 5.0
BEFORE = ".1"


def rotate(log: Path, largest: int = LARGEST) -> bool:
    """Move a log's content to ``LOG.1`` if it is larger than ``largest`` bytes; return True if it was moved.

    The writer continues: it appends, and therefore writes at the new end. Lines written during the copy may be lost.
    """
    try:
        if log.stat().st_size <= largest:
            return False
        before = log.with_name(log.name + BEFORE)
        with log.open("rb") as found, before.open("wb") as kept:
            found.seek(-largest, os.SEEK_END)  # the log may have grown in the meantime
            shutil.copyfileobj(found, kept)
        os.truncate(log, 0)
    except OSError as error:
        logger.warning("%s is not rotated: %s", log, error)
        return False
    return True


async def rotate_logs(logs: Callable[[], Iterable[Path]]) -> None:
    """Check the logs every ``POLL_INTERVAL_S`` seconds, and rotate large ones, until cancelled."""

    async def look() -> None:
        for log in list(logs()):
            await asyncio.to_thread(rotate, log)

    await repeat(look, POLL_INTERVAL_S, "log rotation")
