"""Progress of a starting server: the stages in its log, and the time of each."""

from __future__ import annotations

import time
from pathlib import Path

from tercet.vllm_plugin.start.loading_stages import MARK

STARTING = "starting"
# Shorter stages are not reported.
SHORT_SECONDS = 1.0


class StartProgress:
    """Progress of one start, whose output goes to ``log`` from byte ``begin`` on; time counts from the construction."""

    def __init__(self, log: Path, begin: int = 0) -> None:
        self.stage = STARTING
        self._log = log
        self._read = begin
        self._began = self._since = time.monotonic()
        self._took: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the start began."""
        return time.monotonic() - self._began

    def look(self) -> bool:
        """Read new lines of the log; return True if there is a new stage."""
        found = [line.partition(MARK)[2].strip() for line in self._new_lines() if MARK in line]
        for stage in found:
            self._enter(stage)
        return bool(found)

    def summary(self) -> str:
        """Return the total time and the times of long stages: ``31 s (starting 22 s, weights 3 s)``."""
        self._enter(self.stage)
        slow = [f"{stage} {took:.0f} s" for stage, took in self._took.items() if took >= SHORT_SECONDS]
        return f"{self.seconds:.0f} s" + (f" ({', '.join(slow)})" if len(self._took) > 1 and slow else "")

    def _enter(self, stage: str) -> None:
        now = time.monotonic()
        self._took[self.stage] = self._took.get(self.stage, 0.0) + now - self._since
        self.stage, self._since = stage, now

    def _new_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._read)
                written = log.read()
        except OSError:
            return []
        whole = written[: written.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()
