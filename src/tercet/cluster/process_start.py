"""Identity of a process: its id, and its start by a monotonic clock, which is never set."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

PROC = Path("/proc")
_BOOT = PROC / "sys/kernel/random/boot_id"
# Fields of /proc/PID/stat, counted from the one after the command's name.
_STATE, _START = 0, 19
_ENDED = frozenset("ZX")


class ProcessStart(msgspec.Struct, frozen=True):
    """A process: ``ticks`` are from the machine's start ``boot`` to its own."""

    pid: int
    boot: str
    ticks: int

    @property
    def runs(self) -> bool:
        """Whether it lives; another process with its id, now or after a restart of the machine, does not count."""
        fields = _fields_of(self.pid)
        return (
            fields is not None
            and fields[_STATE] not in _ENDED
            and int(fields[_START]) == self.ticks
            and boot_id() == self.boot
        )


def own_start() -> ProcessStart:
    """This process."""
    fields = _fields_of(os.getpid())
    return ProcessStart(os.getpid(), boot_id(), 0 if fields is None else int(fields[_START]))


def boot_id() -> str:
    """Differs at each start of the machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _fields_of(pid: int) -> list[str] | None:
    """Fields, or None if the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()  # the name before it may contain anything
