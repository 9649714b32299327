"""Discovery by a roster file, which others replace. While it is missing or invalid, the engines stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from tercet.aio.file_thread import FileThread
from tercet.aio.whole_files import read_whole, stamp_of
from tercet.fleet.discovery.found import FoundEngine
from tercet.fleet.discovery.roster import MOST_BYTES, read_roster
from tercet.protocol import BadRequest
from tercet.settings import log_events

POLL_INTERVAL_S = 0.5


class RosterFile:
    """The engines in the roster at ``path``, which is polled every ``interval`` seconds."""

    def __init__(self, path: Path, interval: float = POLL_INTERVAL_S) -> None:
        self._path = path
        self._interval = interval
        self._files: FileThread
        self._failure = ""
        self._stamp: object = None
        self._last: Sequence[FoundEngine] | None = None

    @property
    def source(self) -> str:
        """Description of the source of engines, for messages."""
        return f"the lines of the roster {self._path}"

    async def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once a roster was read, and again at each change."""
        self._files, self._stamp, self._last = FileThread(), None, None
        try:
            while True:
                found = await self._look()
                if found is not None and found != self._last:
                    self._last = found
                    yield found
                await asyncio.sleep(self._interval)
        finally:
            self._files.close()

    async def _look(self) -> Sequence[FoundEngine] | None:
        """Return the engines if the file has changed; None for an unchanged file and for one that cannot be used."""
        stamp: object = None
        try:
            stamp = await self._files.run(stamp_of, self._path)
            if stamp is not None and stamp == self._stamp:
                return None
            found = read_roster(await self._files.run(read_whole, self._path, MOST_BYTES))
        except TimeoutError:  # before OSError, its base class
            self._refuse("its file system does not answer")
        except OSError as error:
            self._refuse(error.strerror or str(error))
        except BadRequest as error:
            self._refuse(error.message)
            self._stamp = stamp
        else:
            self._stamp = stamp
            if self._failure:
                log_events.DISCOVERY_BACK.tell(path=self._path, reason="the file can be read")
                self._failure = ""
            return found
        return None

    def _refuse(self, reason: str) -> None:
        """Log the ``reason`` why the file cannot be used, unless it was logged last."""
        if self._failure != reason:
            self._failure = reason
            log_events.DISCOVERY_LOST.tell(path=self._path, reason=reason)
