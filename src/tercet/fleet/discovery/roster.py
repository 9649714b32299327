"""A roster: a JSON list of a fleet's engines, written by Ray's follower, a Slurm job or an operator; and its reader.

Others replace the file. While it is missing or invalid, the engines stay as they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tercet import logs
from tercet.aio.files import FileThread, read_whole, stamp_of
from tercet.fleet.discovery.found import FoundEngine
from tercet.fleet.member_state import JOINED
from tercet.protocol import BadRequest, Role
from tercet.protocol.names import require_uid
from tercet.settings import EngineAddress

MOST_BYTES = 4 * 1024 * 1024
DRAINING = "the roster says that it is draining"
Text = Annotated[str, Meta(max_length=256)]
POLL_INTERVAL_S = 0.5


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine. Each start of it has another ``uid``, so that a replacement with the same name is another engine.

    ``draining`` is true if it gets no new requests and its sequences move elsewhere. ``withheld`` is a reason for the
    same, such as a start that is not complete: until it is empty, an engine that was not a member does not become one.
    """

    name: str
    url: str
    uid: str
    role: Role = "both"
    draining: bool = False
    withheld: Text = ""
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        require_uid(self.uid)
        if self.uid.startswith(JOINED):
            raise BadRequest(f"uid: must not begin with {JOINED}, as those of engines that join do", "uid")

    def found(self) -> FoundEngine:
        """Return the engine as a fleet uses it; raise :class:`~tercet.protocol.BadRequest` for a wrong name or URL."""
        address = EngineAddress(self.name, self.url.rstrip("/"), self.role, self.labels)
        return FoundEngine(address, self.uid, not self.withheld, self.withheld or (DRAINING if self.draining else ""))


def read_roster(content: bytes) -> Sequence[FoundEngine]:
    """Return the engines of a roster; an empty list is a valid roster without engines.

    Raises :class:`~tercet.protocol.BadRequest` for other content, and for two engines with one name or one URL.
    """
    try:
        entries = msgspec.json.decode(content, type=list[RosterEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the content is not a list of engines: {error}") from error
    found = [entry.found() for entry in entries]
    for what, values in (
        ("name", [each.address.name for each in found]),
        ("URL", [each.address.url for each in found]),
    ):
        twice = [value for value, times in Counter(values).items() if times > 1]
        if twice:
            raise BadRequest(f"two engines have the {what} {twice[0]}")
    return found


def write_roster(entries: Sequence[RosterEntry]) -> bytes:
    """Return a roster of these engines in the order of their names, one per line."""
    lines = [msgspec.json.encode(each) for each in sorted(entries, key=lambda each: each.name)]
    return b"[" + b",\n ".join(lines) + b"]\n"


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
                logs.DISCOVERY_BACK.tell(path=self._path, reason="the file can be read")
                self._failure = ""
            return found
        return None

    def _refuse(self, reason: str) -> None:
        """Log the ``reason`` why the file cannot be used, unless it was logged last."""
        if self._failure != reason:
            self._failure = reason
            logs.DISCOVERY_LOST.tell(path=self._path, reason=reason)
