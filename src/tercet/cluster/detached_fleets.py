"""Fleets of ``tercet up`` that run here: a small file for each in the cache identifies its process, while it runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tercet.cluster.model import cache_root
from tercet.cluster.process_start import ProcessStart
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE


class DetachedFleet(msgspec.Struct, frozen=True):
    """A fleet of one ``process``, whose router has ``port``; ``stop_seconds`` is the longest time of a stop.

    ``control`` is the socket at which its process listens, see :mod:`tercet.cluster.scaling.control`. ``detached``:
    it runs in the background.
    """

    process: ProcessStart
    port: int
    url: str
    log_dir: str
    stop_seconds: float
    control: str = ""
    detached: bool = True

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether its process lives."""
        return self.process.runs


@contextmanager
def announced(fleet: DetachedFleet) -> Generator[None]:
    """Announce the fleet while entered, so that other commands find it."""
    file = _directory() / f"{fleet.port}-{fleet.pid}.json"  # at another address the port may be another fleet's
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = file.with_suffix(".new")
        partial.write_bytes(msgspec.json.encode(fleet))
        partial.rename(file)
    except OSError as error:
        raise BadRequest(f"--detach: {file} cannot be written: {error.strerror}", "--detach") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def detached_fleets() -> list[DetachedFleet]:
    """Fleets that run in the background, by port."""
    return [fleet for fleet in running_fleets() if fleet.detached]


def running_fleets() -> list[DetachedFleet]:
    """All fleets, by port; files of killed ones are removed."""
    found: list[DetachedFleet] = []
    for file in _directory().glob("*.json"):
        fleet = _read(file)
        if fleet is None:
            continue  # of another version, or removed
        if fleet.runs:
            found.append(fleet)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda fleet: fleet.port)


def _directory() -> Path:
    return cache_root() / "fleets"


def _read(file: Path) -> DetachedFleet | None:
    with suppress(FileNotFoundError, *UNREADABLE):
        return msgspec.json.decode(file.read_bytes(), type=DetachedFleet)
    return None
