"""One simulated engine's server as a process in virtual time: it can be frozen and killed."""

from __future__ import annotations

import asyncio

from tercet.chaos.fault_schedule import ProcessKind
from tercet.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tercet.sim import SimEngine
from tercet.sim.prompts import VOCABULARY, Prompt, Prompts
from tercet.sim.sim_server import ServerConfig, serving

# Virtual seconds for what a killed process would have done at its end, which no real one does: it holds up nothing.
ENDS_WITHIN = 60.0


class OtherPrompt(Prompt):
    """A prompt that another model answers."""

    __slots__ = ()

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """See :meth:`tercet.sim.prompts.Prompt.output`; no token is the same."""
        return tuple((token + 1) % VOCABULARY for token in super().output(begin, end))


class OtherAnswers(Prompts):
    """What another model says to the same prompts."""

    def get(self, tokens: tuple[int, ...], cache_salt: str | None) -> Prompt:
        """See :meth:`tercet.sim.prompts.Prompts.get`."""
        return OtherPrompt(tokens, cache_salt)


class SimulatedServer:
    """One incarnation of an engine, from :meth:`start` to :meth:`kill`."""

    def __init__(self, loop: NetworkedLoop, config: ServerConfig, is_impostor: bool) -> None:
        self.process = VirtualProcess(loop, config.host)
        self._loop = loop
        self._config = config
        self._is_impostor = is_impostor
        self._serving: asyncio.Task[None] | None = None
        self._engine: asyncio.Future[SimEngine] = loop.create_future()
        self._killed = asyncio.Event()

    @property
    def engine(self) -> SimEngine:
        """The engine, once it serves."""
        return self._engine.result()

    async def start(self) -> None:
        """Returns when it serves."""
        with self.process.enter():
            self._serving = self._loop.create_task(self._serve())
        await asyncio.wait([self._serving, self._engine], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def _serve(self) -> None:
        async with serving(self._config) as engine:
            if self._is_impostor:
                engine.network.prompts = OtherAnswers(kept=256)
            self._engine.set_result(engine)
            await self._killed.wait()

    def freeze(self, which: ProcessKind) -> None:
        """SIGSTOP for its server, its core, or both."""
        if which in ("engine", "api"):
            self.process.freeze()
        if which in ("engine", "core"):
            self.engine.freeze()

    def thaw(self) -> None:
        """SIGCONT for what was stopped."""
        self.engine.thaw()
        self.process.freeze(False)

    def kill(self) -> None:
        """SIGKILL for all of it."""
        self.process.kill()
        self.engine.fail()
        self._killed.set()

    async def ended(self) -> None:
        """Returns when nothing of its code runs any more; long after its process was gone, as far as others know."""
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=ENDS_WITHIN)
