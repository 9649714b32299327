"""Changes of a fleet's LoRA adapters: one at a time, first on all engines, then in the shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tercet.fleet import EngineFleet
from tercet.fleet.membership import Membership
from tercet.protocol import UnknownAdapter
from tercet.router.state.fleet_adapters import load_everywhere, replace_everywhere, unload_everywhere
from tercet.router.state.fleet_state import AdapterState
from tercet.router.state.state_changes import ASKED

if TYPE_CHECKING:
    from tercet.router.state.shared_state import SharedState


class AdapterChanges:
    """Loading, replacing and unloading of adapters for all processes that follow ``shared``.

    Each method returns a text for each process that has not applied the change.
    """

    def __init__(self, shared: SharedState, fleet: EngineFleet, membership: Membership) -> None:
        self._shared = shared
        self._fleet = fleet
        self._membership = membership
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str, reason: str = ASKED) -> Sequence[str]:
        """Serve a LoRA adapter after every engine that answers and takes adapters has loaded it."""
        async with self._turn:
            return await self._load(name, path, reason)

    async def _load(self, name: str, path: str, reason: str) -> Sequence[str]:
        self._shared.state.with_adapter(AdapterState(name, path))
        report = await load_everywhere(self._fleet, self._membership, name, path)
        adapter = AdapterState(name, path, report.digest)
        return await self._shared.change(lambda state: state.with_adapter(adapter), reason)

    async def replace(self, name: str, path: str, reason: str = ASKED) -> Sequence[str]:
        """Replace an adapter by the files at ``path``; a new name is loaded.

        Raises :class:`~tercet.protocol.Conflict` while requests use the adapter.
        """
        async with self._turn:
            before = self._fleet.adapters.get(name)
            if before is None:
                return await self._load(name, path, reason)
            report = await replace_everywhere(self._fleet, self._membership, before, path)
            adapter = AdapterState(name, path, report.digest)
            return await self._shared.change(lambda state: state.without_adapter(name).with_adapter(adapter), reason)

    async def unload(self, name: str, reason: str = ASKED) -> Sequence[str]:
        """Stop accepting requests for a LoRA adapter; running sequences that use it continue."""
        async with self._turn:
            if name not in self._fleet.adapters:
                raise UnknownAdapter(f"name: this fleet has no adapter {name!r}", "name")
            behind = await self._shared.change(lambda state: state.without_adapter(name), reason)
            return [*behind, *await unload_everywhere(self._fleet, self._membership, name)]
