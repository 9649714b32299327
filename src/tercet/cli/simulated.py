"""Simulated engines, which the package of the extra ``lab`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tercet.cluster.engine_command import EngineSpec
from tercet.protocol.entry_points import PARTS
from tercet.settings.extras import provided


class SimulatedEnginePart(Protocol):
    """The part ``simulated-engine``."""

    def require_usable(self, profile: str, options: Mapping[str, str]) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a profile that cannot be loaded, or wrong options."""
        ...

    def serve(self, spec: EngineSpec) -> None:
        """Serve a simulated engine until a signal."""
        ...


def simulated_engine() -> SimulatedEnginePart:
    """Import and return the part; raise :class:`~tercet.protocol.BadRequest` if its package is missing."""
    found: SimulatedEnginePart = provided(PARTS, "simulated-engine", "lab", "--simulate")
    return found
