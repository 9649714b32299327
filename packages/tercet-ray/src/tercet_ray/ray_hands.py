"""Start and stop of single engines of a fleet on Ray, by changes of the file that describes the wanted fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from tercet.aio.files import read_whole, write_whole
from tercet.cluster.running_fleet import LOADING, READY_SECONDS, OnEvent, RouterAdmin
from tercet.fleet.discovery.roster import MOST_BYTES, read_roster
from tercet.protocol import EngineError, Role, UnknownEngine
from tercet_ray.wanted import WantedEngine, WantedFleet

LOOK_SECONDS = 0.5
GONE_SECONDS = 60.0


class RayHands:
    """The hands of a fleet on Ray.

    ``file`` describes the wanted fleet, which the follower passes to the keeper; ``roster`` lists the present engines,
    and the router follows it.
    """

    def __init__(self, file: Path, roster: Path, wanted: WantedFleet, router: RouterAdmin, on_event: OnEvent) -> None:
        self.router = router
        self._file = file
        self._roster = roster
        self._wanted = wanted
        self._used = [each.spec.name for each in wanted.engines]
        self._on_event = on_event
        self._lock = asyncio.Lock()

    @property
    def engines(self) -> Sequence[str]:
        """Names of the wanted engines."""
        return [each.spec.name for each in self._wanted.engines]

    @property
    def used(self) -> Sequence[str]:
        """All names of present and past engines."""
        return self._used

    def require_room(self, count: int) -> None:
        """Do nothing: Ray decides about room, and may add machines; :meth:`start` has a timeout."""

    async def wanted(self) -> WantedFleet:
        """Return the wanted fleet: the command's, or the newer one of a fleet that was taken over."""
        content = await asyncio.to_thread(read_whole, self._file)
        self._wanted = msgspec.json.decode(content, type=WantedFleet)
        self._used = list(dict.fromkeys([*self._used, *self.engines]))
        return self._wanted

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when the router has added it."""
        self._used.append(name)
        await self._change(lambda engines: (*engines, _like(engines[0], name, role)))
        self._on_event(name, LOADING)
        try:
            async with asyncio.timeout(READY_SECONDS):
                await _until(lambda: self._is_well(name))
        except TimeoutError:
            await self._without(name)
            raise EngineError(
                f"the engine does not serve after {READY_SECONDS:.0f} s; check that Ray has room for it"
            ) from None
        except BaseException:
            await asyncio.shield(self._without(name))
            raise
        self._on_event(name, "ready")

    async def set_role(self, name: str, role: Role) -> None:
        """Change the role of a member."""
        await self.router.set_role(name, role)
        await self._change(
            lambda engines: tuple(
                msgspec.structs.replace(each, role=role) if each.spec.name == name else each for each in engines
            )
        )

    async def stop(self, name: str) -> None:
        """Stop an engine on Ray, and return when the router has removed it."""
        await self._without(name)
        try:
            async with asyncio.timeout(GONE_SECONDS):
                await _until(lambda: self._is_gone(name))
        except TimeoutError:
            raise EngineError(
                f"the engine is still a member after {GONE_SECONDS:.0f} s; check that the follower runs"
            ) from None

    async def _without(self, name: str) -> None:
        await self._change(lambda engines: tuple(each for each in engines if each.spec.name != name))

    async def _change(self, change: Callable[[tuple[WantedEngine, ...]], tuple[WantedEngine, ...]]) -> None:
        async with self._lock:
            before = await self.wanted()
            after = msgspec.structs.replace(before, engines=change(before.engines), version=before.version + 1)
            await asyncio.to_thread(write_whole, self._file, msgspec.json.encode(after))
            self._wanted = after

    async def _is_well(self, name: str) -> bool:
        return await self._serves(name) and await self._is_member(name)

    async def _serves(self, name: str) -> bool:
        content = await asyncio.to_thread(read_whole, self._roster, MOST_BYTES)
        return any(each.address.name == name and each.serves for each in read_roster(content))

    async def _is_member(self, name: str) -> bool:
        return any(each["name"] == name and each["reachable"] for each in await self.router.engines())

    async def _is_gone(self, name: str) -> bool:
        try:
            await self.router.engine(name)
        except UnknownEngine:
            return True
        return False


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(LOOK_SECONDS)


def _like(engine: WantedEngine, name: str, role: Role) -> WantedEngine:
    return msgspec.structs.replace(engine, spec=msgspec.structs.replace(engine.spec, name=name), role=role)
