"""An engine of a fleet as state that routers store and share: its address, and whether it may be picked."""

from __future__ import annotations

import msgspec

from tercet.protocol.names import require_uid
from tercet.settings import EngineAddress

JOINED = "joined:"
"""Prefix of the uid of an engine that has joined by itself."""


class MemberState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine of a fleet, and whether it may be picked.

    ``draining`` is set by its operator. ``uid`` is that of the pod or roster entry as which the engine was found, or of
    the start that joined by itself; empty for an engine that was named in settings. ``withheld`` is the reason why it
    gets no new requests, or empty.
    """

    address: EngineAddress
    draining: bool = False
    uid: str = msgspec.field(default="", name="pod")
    withheld: str = ""

    def __post_init__(self) -> None:
        if self.uid:
            require_uid(self.uid)

    @property
    def leaving(self) -> bool:
        """True if the engine gets no new requests and its sequences should move to other engines."""
        return self.draining or bool(self.withheld)

    @property
    def joined(self) -> bool:
        """True if the engine joined by itself, and leaves by itself."""
        return self.uid.startswith(JOINED)
