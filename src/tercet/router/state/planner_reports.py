"""The last report of a planner, in a small file that all processes of the router share."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from tercet.aio.files import FileThread, read_whole, write_whole
from tercet.decisions.planning.observed import PlannerReport
from tercet.protocol import EngineError
from tercet.protocol.wire import UNREADABLE


class PlannerReports:
    """The report's file, next to the state at ``path``; ``files`` does the I/O."""

    def __init__(self, path: Path, files: FileThread) -> None:
        self._path = Path(f"{path}.planner")
        self._files = files

    async def tell(self, report: PlannerReport) -> None:
        """Store the newest report; raise :class:`~tercet.protocol.EngineError` if it cannot be written."""
        try:
            await self._files.run(write_whole, self._path, msgspec.json.encode(report))
        except (OSError, TimeoutError) as error:
            raise EngineError(f"planner: {self._path} cannot be written: {error}") from error

    async def newest(self) -> PlannerReport | None:
        """Return the last report; None if no planner has reported or the file cannot be read."""
        with suppress(OSError, *UNREADABLE):
            content = await self._files.run(read_whole, self._path)
            return msgspec.json.decode(content, type=PlannerReport)
        return None
