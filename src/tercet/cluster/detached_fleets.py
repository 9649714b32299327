"""Records of the fleets of ``tercet up`` on this machine: a file in the cache for each running fleet."""

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
    """A fleet that ``process`` owns; its router listens on ``port``, and a stop takes at most ``stop_seconds``.

    ``control`` is the path of the process's socket, see :mod:`tercet.cluster.scaling.control`. ``detached`` is True if
    the fleet runs in the background.
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
        """Id of the fleet's process."""
        return self.process.pid

    @property
    def runs(self) -> bool:
        """True if the fleet's process runs."""
        return self.process.runs


@contextmanager
def announced(fleet: DetachedFleet) -> Generator[None]:
    """Record the fleet until the block ends, so that other commands find it."""
    file = _directory() / f"{fleet.port}-{fleet.pid}.json"  # another fleet may use the same port at another address
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
    """Return the fleets that run in the background, sorted by port."""
    return [fleet for fleet in running_fleets() if fleet.detached]


def running_fleets() -> list[DetachedFleet]:
    """Return all running fleets, sorted by port; remove the files of killed ones."""
    found: list[DetachedFleet] = []
    for file in _directory().glob("*.json"):
        fleet = _read(file)
        if fleet is None:
            continue  # the file has another version's format, or was removed
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
