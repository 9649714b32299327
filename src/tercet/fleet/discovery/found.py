"""Engines that were found, in pods or in a roster, and what finds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from tercet.settings import EngineAddress


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine. ``uid`` is its pod's, or its start's: a later one may have the same name.

    ``serves``: it is ready and stays. ``withheld`` is the reason why nothing new may begin there, or empty.
    """

    address: EngineAddress
    uid: str
    serves: bool
    withheld: str = ""


class Discovery(Protocol):
    """Finds engines. One reader at a time."""

    @property
    def source(self) -> str:
        """Description of the source of engines."""
        ...

    def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once they are known, and again at each change. The caller closes the generator."""
        ...
