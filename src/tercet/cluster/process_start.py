"""Identity of a process: its id, and its start time by a monotonic clock, which is never set."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

PROC = Path("/proc")
_BOOT = PROC / "sys/kernel/random/boot_id"
# Indices of fields in /proc/PID/stat; the field after the command's name has index 0.
_STATE, _START = 0, 19
_ENDED = frozenset("ZX")


class ProcessStart(msgspec.Struct, frozen=True):
    """A process: ``ticks`` is the time from the machine's start, whose id is ``boot``, to the process's start."""

    pid: int
    boot: str
    ticks: int

    @property
    def runs(self) -> bool:
        """True if the process runs; another process that got the same id, also after a restart, does not count."""
        fields = _fields_of(self.pid)
        return (
            fields is not None
            and fields[_STATE] not in _ENDED
            and int(fields[_START]) == self.ticks
            and boot_id() == self.boot
        )


def own_start() -> ProcessStart:
    """Return the identity of this process."""
    fields = _fields_of(os.getpid())
    return ProcessStart(os.getpid(), boot_id(), 0 if fields is None else int(fields[_START]))


def boot_id() -> str:
    """Return an id that differs at each start of the machine; empty if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _fields_of(pid: int) -> list[str] | None:
    """Return the fields of the process's ``stat``, or None if the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()  # the name before these fields may contain any character
