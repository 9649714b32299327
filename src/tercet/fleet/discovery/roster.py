"""A roster: a JSON list of a fleet's engines, which Ray's follower, a Slurm job or an operator writes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.fleet.discovery.found import FoundEngine
from tercet.protocol import BadRequest, Role
from tercet.settings import EngineAddress

MOST_BYTES = 4 * 1024 * 1024
DRAINING = "the roster says that it is draining"
Text = Annotated[str, Meta(max_length=256)]


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine. ``uid`` differs for each start of it, so that a replacement under its name is another engine.

    ``draining``: nothing new begins there, and what runs there moves. ``withheld`` is a reason for the same, such as a
    start that is not over: an engine that was not a member before does not become one until it is empty.
    """

    name: Annotated[str, Meta(pattern=r"^[^/\s]+$", max_length=256)]
    url: Annotated[str, Meta(max_length=2048)]
    uid: Annotated[str, Meta(min_length=1, max_length=256)]
    role: Role = "both"
    draining: bool = False
    withheld: Text = ""
    labels: Mapping[str, str] = {}

    def found(self) -> FoundEngine:
        """The same, as a fleet takes it. Raises :class:`~tercet.protocol.BadRequest` for a URL that is none."""
        address = EngineAddress(self.name, self.url.rstrip("/"), self.role, self.labels)
        return FoundEngine(address, self.uid, not self.withheld, self.withheld or (DRAINING if self.draining else ""))


def read_roster(content: bytes) -> Sequence[FoundEngine]:
    """The engines of a roster; an empty list is a roster of none.

    Raises :class:`~tercet.protocol.BadRequest` for what is not a roster, and for two engines of one name or URL.
    """
    try:
        entries = msgspec.json.decode(content, type=list[RosterEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"it is not a list of engines: {error}") from error
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
    """A roster of these engines, one a line, in the order of their names."""
    lines = [msgspec.json.encode(each) for each in sorted(entries, key=lambda each: each.name)]
    return b"[" + b",\n ".join(lines) + b"]\n"
