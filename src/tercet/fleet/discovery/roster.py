"""A roster: a JSON list of a fleet's engines, written by Ray's follower, a Slurm job or an operator. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.fleet.discovery.found import FoundEngine
from tercet.fleet.member_state import JOINED
from tercet.protocol import BadRequest, Role
from tercet.protocol.names import require_uid
from tercet.settings import EngineAddress

MOST_BYTES = 4 * 1024 * 1024
DRAINING = "the roster says that it is draining"
Text = Annotated[str, Meta(max_length=256)]


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
