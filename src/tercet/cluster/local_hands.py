"""Start and stop of single engines of a fleet on this machine while the fleet serves."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from tercet.cluster.compute import devices_for_engines
from tercet.cluster.device_plan import pick_devices
from tercet.cluster.devices import Device
from tercet.cluster.engine_command import EngineSpec, gpu_memory_of, ranks_of
from tercet.cluster.foresight import require_memory
from tercet.cluster.ports import free_ports
from tercet.cluster.replicas import is_group
from tercet.cluster.running_fleet import LOADING, OnEvent, RunningEngine
from tercet.cluster.scaling.router_admin import RouterAdmin
from tercet.protocol import BadRequest, Role

LaunchEngine = Callable[[EngineSpec, Role], RunningEngine]


def next_spec(
    like: EngineSpec, name: str, port: int, taken: Sequence[EngineSpec], devices: Sequence[Device]
) -> EngineSpec:
    """Return the description of one more engine like ``like``, in addition to the engines ``taken``.

    On CPUs the engine gets the cores that the fewest engines use, on GPUs devices that no engine of this fleet uses.
    Raises :class:`~tercet.protocol.BadRequest` if there are too few devices.
    """
    spec = msgspec.structs.replace(like, name=name, port=port, cores=(), gpus=(), gpu_memory=None)
    if like.gpus:
        each = ranks_of(like.extra_args)
        used = {handle for other in taken for handle in other.gpus}
        free = [device for device in devices if device.handle not in used]
        if len(free) < each:
            raise BadRequest(
                f"COUNTS: one more engine needs {each} GPU{'s' if each > 1 else ''}, and {len(free)} of this machine "
                "are free; reduce another role in the same command, so that its engines change their role",
                "COUNTS",
            )
        share = pick_devices(free, each, gpu_memory_of(like.extra_args))
        return msgspec.structs.replace(spec, gpus=share.devices, gpu_memory=share.memory)
    if like.cores:
        groups = Counter(dict.fromkeys(_groups(taken), 0))
        groups.update(other.cores for other in taken if other.cores)
        return msgspec.structs.replace(spec, cores=min(groups, key=lambda cores: (groups[cores], cores)))
    return spec


def _groups(taken: Sequence[EngineSpec]) -> set[tuple[int, ...]]:
    """Return the groups of cores to choose from: free cores if there are enough, else the groups of running engines."""
    here = sorted(os.sched_getaffinity(0))
    size = max(len(spec.cores) for spec in taken)
    free = [core for core in here if not any(core in spec.cores for spec in taken)]
    return {tuple(free[:size])} if len(free) >= size else {spec.cores for spec in taken}


class LocalHands:
    """The hands of a fleet on this machine. They change the list ``engines``; a start also sets ``changed``.

    ``launch`` creates the process of an engine without starting it.
    """

    def __init__(
        self, engines: list[RunningEngine], changed: asyncio.Event, specs: Sequence[EngineSpec], launch: LaunchEngine,
        router: RouterAdmin, on_event: OnEvent,
    ) -> None:  # fmt: skip
        self.router = router
        self._engines = engines
        self._changed = changed
        self._specs = {spec.name: spec for spec in specs}
        self._like = specs[0]
        self._used = [spec.name for spec in specs]
        self._launch = launch
        self._on_event = on_event

    @property
    def engines(self) -> Sequence[str]:
        """Names of the engines that are restarted when they end."""
        return [engine.name for engine in self._engines if not engine.given_up]

    @property
    def used(self) -> Sequence[str]:
        """All names of present and past engines; each has its log."""
        return self._used

    def require_room(self, count: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if ``count`` more engines cannot be started."""
        if not count:
            return
        if is_group(self._like.extra_args):
            raise BadRequest(
                "COUNTS: the number of engines cannot change: they are the data-parallel ranks of one group", "COUNTS"
            )
        taken = list(self._specs.values())
        for index in range(count):
            taken.append(next_spec(self._like, f"more-{index}", 0, taken, self._devices()))
        require_memory(taken[len(self._specs) :])

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when the router has added it."""
        (port,) = free_ports(self._like.host, 1)
        spec = next_spec(self._like, name, port, list(self._specs.values()), self._devices())
        self._used.append(name)
        self._specs[name] = spec
        engine = self._launch(spec, role)
        engine.is_kept = False
        self._engines.append(engine)
        try:
            await engine.process.start()
            self._on_event(name, LOADING)
            await engine.until_ready(self._on_event)
            await self.router.add(name, engine.url, role)
        except BaseException:
            self._engines.remove(engine)
            del self._specs[name]
            await engine.process.stop()
            raise
        engine.is_kept = True
        self._changed.set()

    async def set_role(self, name: str, role: Role) -> None:
        """Change the role of a member."""
        await self.router.set_role(name, role)
        self._engine(name).role = role

    async def stop(self, name: str) -> None:
        """Remove an engine from the router, and stop it."""
        engine = self._engine(name)
        await self.router.remove(name)
        try:
            await engine.leave()
        finally:
            self._engines.remove(engine)
            del self._specs[name]

    def _engine(self, name: str) -> RunningEngine:
        return next(engine for engine in self._engines if engine.name == name)

    def _devices(self) -> Sequence[Device]:
        return devices_for_engines() if self._like.gpus else ()
