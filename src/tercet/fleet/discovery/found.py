"""Records of engines that were found in pods or in a roster, and the interface of discoveries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from tercet.settings import EngineAddress


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine that was found. ``uid`` is that of its pod or of its start: a later engine may have the same name.

    ``serves`` is true if it is ready and not about to end. ``withheld`` is the reason why it gets no new requests, or
    empty.
    """

    address: EngineAddress
    uid: str
    serves: bool
    withheld: str = ""


class Discovery(Protocol):
    """A source of engines, for one reader at a time."""

    @property
    def source(self) -> str:
        """Description of the source of engines, for messages."""
        ...

    def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once they are known, and again at each change. The caller closes the generator."""
        ...
