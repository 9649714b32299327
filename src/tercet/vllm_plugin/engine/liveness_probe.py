"""Whether the engine's processes make progress, as its API server's process finds out: by asking each of them.

It asks whether or not there is work. A core answers between two steps, so one whose workers hang does not; workers and
agents answer from a thread of their own. A step may take longer than anybody's patience, on a machine that is busy with
other things: as long as it gets from layer to layer, its core makes progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tercet.aio import TaskSet
from tercet.protocol import EngineError, TercetError

logger = logging.getLogger(__name__)
Question = Callable[[], Awaitable[Any]]
PROBE_SECONDS = 0.5
"""Between an answer and the next question."""
NEWS_SECONDS = 0.25
"""So long, at most, waits who wants to know how things are now."""
FIRST_SECONDS = 60.0
CORE = "core"
# Silence that is worth a line in the log.
LOGGED_SECONDS = 5.0
# Whoever looks less often than this has stood still himself.
LOOK_SECONDS = 2 * PROBE_SECONDS


class StallClock:
    """Decides without I/O since when each part owes an answer. Times are seconds of one clock that never goes back.

    Time in which nobody looked does not count: then it was this process that stood still, and read no answers.
    """

    def __init__(self) -> None:
        self._owes_since: dict[str, float] = {}
        self._looked_at: float | None = None

    def asked(self, part: str, now: float) -> None:
        """The part was asked; it owes an answer from now on, or since it has owed one."""
        self._owes_since.setdefault(part, now)

    def progressed(self, part: str, now: float) -> None:
        """The part has not answered, but has shown otherwise that it goes on."""
        if part in self._owes_since:
            self._owes_since[part] = now

    def answered(self, part: str) -> None:
        """The part has answered what it was asked."""
        self._owes_since.pop(part, None)

    def stalled(self, now: float) -> dict[str, float]:
        """For how many seconds each part that owes an answer has shown no progress. To be called often."""
        unseen = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if unseen > LOOK_SECONDS:
            self._owes_since = {part: min(now, since + unseen) for part, since in self._owes_since.items()}
        return {part: now - since for part, since in self._owes_since.items()}


class LivenessProbe:
    """Asks every part of an engine again and again, and never one twice at a time.

    ``core`` asks for fields of :class:`~tercet.protocol.EngineStatus`, each of ``agents`` for a rank's counters, and
    each of ``workers`` for the number of ``layers`` that it has run.
    """

    def __init__(self, core: Question, agents: Sequence[Question], workers: Sequence[Question]) -> None:
        self._clock = StallClock()
        self._core = _Part(CORE, core, self._clock)
        self._agents = [_Part(f"agent of rank {rank}", ask, self._clock) for rank, ask in enumerate(agents)]
        self._layers: dict[int, Any] = {}
        others = [
            _Part(f"worker of rank {rank}", partial(self._layers_of, rank, ask), self._clock)
            for rank, ask in enumerate(workers)
        ]
        self._parts = [self._core, *self._agents, *others]
        self._tasks = TaskSet()
        self._silent: set[str] = set()

    async def start(self) -> None:
        """Ask from now on; returns once every part has answered.

        Raises :class:`~tercet.protocol.EngineError` if one does not.
        """
        for part in self._parts:
            self._tasks.spawn(part.ask_again_and_again())
        await self.news(FIRST_SECONDS)
        silent = [part.name for part in self._parts if part.answer is None]
        if silent:
            raise EngineError(f"the engine's {', '.join(silent)} did not answer within {FIRST_SECONDS:.0f} s")
        self._tasks.spawn(self._watch())

    async def news(self, seconds: float = NEWS_SECONDS) -> None:
        """Have every part asked anew, from now on, and wait for the answers, for at most ``seconds``."""
        await asyncio.wait([part.asked_anew() for part in self._parts], timeout=seconds)

    @property
    def core_status(self) -> dict[str, Any]:
        """What the core answered last."""
        return self._core.answer

    @property
    def agent_counters(self) -> list[dict[str, int]]:
        """What each agent answered last, by rank."""
        return [part.answer for part in self._agents]

    @property
    def counters(self) -> dict[str, int]:
        """Their sums."""
        per_rank = self.agent_counters
        return {name: sum(counters.get(name, 0) for counters in per_rank) for name in per_rank[0]}

    def core_progressed(self) -> None:
        """The core has shown, unasked, that it goes on."""
        self._clock.progressed(CORE, time.monotonic())

    async def core_stands_still(self, seconds: float) -> float:
        """Ask the core, and return once it has shown no progress for so long; for how long it has not, in seconds."""
        self._core.asked_anew()
        while True:
            silent = self._clock.stalled(time.monotonic()).get(CORE, 0.0)
            if silent >= seconds:
                return silent
            await asyncio.sleep(seconds - silent)

    async def _layers_of(self, rank: int, ask: Question) -> Any:
        answer = await ask()
        layers = answer.get("layers")
        if self._layers.get(rank) != layers:
            self._layers[rank] = layers
            self.core_progressed()
        return answer

    @property
    def stalled_s(self) -> float:
        """For how many seconds at least one part has shown no progress; 0 if none owes an answer."""
        return max(self._clock.stalled(time.monotonic()).values(), default=0.0)

    async def close(self) -> None:
        """Ask no more."""
        await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            stalled = self._clock.stalled(time.monotonic())
            silent = {name for name, seconds in stalled.items() if seconds > LOGGED_SECONDS}
            for name in silent - self._silent:
                logger.warning("the engine's %s has shown no progress for %.0f s", name, stalled[name])
            for name in self._silent - silent:
                logger.warning("the engine's %s goes on", name)
            self._silent = silent


class _Part:
    """One process, and what it answered last."""

    def __init__(self, name: str, question: Question, clock: StallClock) -> None:
        self.answer: Any = None
        self.name = name
        self._question = question
        self._clock = clock
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def asked_anew(self) -> asyncio.Future[None]:
        """Done with the answer to a question that is still to be asked."""
        self._wanted.set()
        return self._next

    async def ask_again_and_again(self) -> None:
        while True:
            current, self._next = self._next, asyncio.get_running_loop().create_future()
            self._wanted.clear()
            self._clock.asked(self.name, time.monotonic())
            try:
                self.answer = await self._question()
                self._clock.answered(self.name)
            except TercetError as error:  # an answer, too
                self._clock.answered(self.name)
                logger.debug("the engine's %s: %s", self.name, error)
            except Exception as error:  # it cannot be asked: vLLM says so of a core that has ended
                logger.debug("the engine's %s cannot be asked: %s", self.name, error)
            if not current.done():
                current.set_result(None)
            with suppress(TimeoutError):
                # wait_for would lose a cancellation that comes as somebody asks (CPython 3.11).
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._wanted.wait()
