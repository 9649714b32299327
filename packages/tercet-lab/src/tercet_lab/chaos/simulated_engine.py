"""The place of one simulated engine in virtual time: a server process that can be frozen, killed and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tercet.aio import TaskSet
from tercet_lab.chaos.fault_schedule import ProcessKind
from tercet_lab.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tercet_lab.sim import SimEngine
from tercet_lab.sim.prompts import VOCABULARY, Prompt
from tercet_lab.sim.sim_server import ServerConfig, serving

# Virtual seconds for the clean-up code of killed processes. (Real killed processes do not run any.)
ENDS_WITHIN = 60.0


class OtherPrompt(Prompt):
    """A prompt with the answer of another model."""

    __slots__ = ()

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """Do as :meth:`tercet_lab.sim.prompts.Prompt.output`; every token differs."""
        return tuple((token + 1) % VOCABULARY for token in super().output(begin, end))


class SimulatedEngine:
    """A simulated engine as :class:`~tercet_lab.chaos.arena.BreakableEngine`.

    ``process`` and ``engine`` are those of the last start. One engine is one process, whose core can be frozen
    separately.
    """

    process: VirtualProcess
    engine: SimEngine

    def __init__(self, loop: NetworkedLoop, config: ServerConfig) -> None:
        self.name, self.url = config.name, config.url
        self.is_up = False
        self._loop = loop
        self._config = config
        self._serving = TaskSet()

    def has(self, process: ProcessKind) -> bool:
        return process in ("engine", "api", "core")

    async def start(self, is_impostor: bool = False) -> None:
        config = _other_model(self._config) if is_impostor else self._config
        self.process, self._killed = VirtualProcess(self._loop, config.host), asyncio.Event()
        started: asyncio.Future[SimEngine] = self._loop.create_future()
        with self.process.enter():
            serving = self._serving.spawn(self._serve(config, started, self._killed))
        await asyncio.wait([serving, started], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        self.engine, self.is_up = started.result(), not is_impostor
        if is_impostor:
            self.engine.network.prompt = OtherPrompt

    async def _serve(self, config: ServerConfig, started: asyncio.Future[SimEngine], killed: asyncio.Event) -> None:
        async with serving(config) as engine:
            started.set_result(engine)
            await killed.wait()

    async def terminate(self) -> Sequence[str]:
        return await self.kill()

    async def kill(self, process: ProcessKind = "engine") -> Sequence[str]:
        self.is_up = False
        self.process.kill()
        self.engine.fail()
        self._killed.set()
        return ()

    def freeze(self, process: ProcessKind) -> None:
        if process in ("engine", "api"):
            self.process.freeze()
        if process in ("engine", "core"):
            self.engine.freeze()

    def thaw(self) -> None:
        self.engine.thaw()
        self.process.freeze(False)

    def cut_off(self, is_cut: bool) -> None:
        self.process.cut_off(is_cut)

    def step_clock(self, seconds: float) -> None:
        raise ValueError("a simulated fleet does not read the wall clock; leave out the fault clock")

    async def ended(self) -> None:
        """Return when the clean-up code of killed processes has ended. Other processes saw their end long before."""
        await self._serving.wait(ENDS_WITHIN)


def _other_model(config: ServerConfig) -> ServerConfig:
    model = msgspec.structs.replace(config.profile.model, name="another-model")
    profile = msgspec.structs.replace(config.profile, model=model)
    return msgspec.structs.replace(config, profile=profile, model=model.name)
