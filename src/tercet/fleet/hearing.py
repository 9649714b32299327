"""What a fleet hears of one engine that runs in this process."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.fleet.engine_fleet import EngineFleet
from tercet.protocol import EngineLoad


class Hearing:
    """A simulated engine's observer that passes all it hears on to ``fleet``."""

    def __init__(self, fleet: EngineFleet, name: str, block_size: int) -> None:
        self._fleet = fleet
        self._name = name
        self._block_size = block_size

    def load(self, load: EngineLoad) -> None:
        """How busy the engine is."""
        self._fleet.report(self._name, load)

    def stored(self, hashes: Sequence[int]) -> None:
        """Blocks that it holds now."""
        self._fleet.knowledge.hold(self._name, self._block_size, hashes)

    def dropped(self, hashes: Sequence[int]) -> None:
        """Blocks that it holds no more."""
        self._fleet.knowledge.unstore(self._name, hashes)

    def cleared(self) -> None:
        """It holds nothing."""
        self._fleet.knowledge.cleared(self._name)
