"""A probe that detects whether the engine's processes make progress: the API server's process polls each of them.

It also polls an idle engine. A core answers between two steps, so a core whose workers hang does not answer; workers
and agents answer from a separate thread. A step may take longer than any timeout, on a machine that is busy with other
work: while its workers get from layer to layer, the core counts as making progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tercet.aio.tasks import Failures, TaskSet
from tercet.protocol import EngineError, TercetError

logger = logging.getLogger(__name__)
Question = Callable[[], Awaitable[Any]]
PROBE_SECONDS = 0.5
"""Pause between an answer and the next poll, in seconds."""
NEWS_SECONDS = 0.25
"""Longest wait of callers that need the present state, in seconds."""
FIRST_SECONDS = 60.0
CORE = "core"
# Seconds without progress after which a line is logged.
LOGGED_SECONDS = 5.0
# If checks are further apart than this, this process itself was stopped.
POLL_INTERVAL_S = 2 * PROBE_SECONDS


class StallClock:
    """A clock that records since when each part owes an answer, without I/O. Times are seconds of one monotonic clock.

    Time without checks does not count: then this process itself was stopped, and read no answers.
    """

    def __init__(self) -> None:
        self._owes_since: dict[str, float] = {}
        self._looked_at: float | None = None

    def asked(self, part: str, now: float) -> None:
        """Record a poll of the part; the part owes an answer from now on, or since an earlier unanswered poll."""
        self._owes_since.setdefault(part, now)

    def progressed(self, part: str, now: float) -> None:
        """Record that the part has not answered, but has made progress otherwise."""
        if part in self._owes_since:
            self._owes_since[part] = now

    def answered(self, part: str) -> None:
        self._owes_since.pop(part, None)

    def stalled(self, now: float) -> dict[str, float]:
        """Return the seconds without progress of each part that owes an answer. Call this often."""
        unseen = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if unseen > POLL_INTERVAL_S:
            self._owes_since = {part: min(now, since + unseen) for part, since in self._owes_since.items()}
        return {part: now - since for part, since in self._owes_since.items()}


class LivenessProbe:
    """A probe that polls every part of an engine repeatedly, with one poll of each part at a time.

    ``core`` polls for fields of :class:`~tercet.protocol.EngineStatus`, each of ``agents`` for a rank's counters, and
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
        """Start to poll; return once every part has answered. Raises ``EngineError`` if one part does not answer."""
        for part in self._parts:
            self._tasks.keep(part.ask_again_and_again, f"probe of the {part.name}")
        end = time.monotonic() + FIRST_SECONDS
        await self.news(FIRST_SECONDS)
        while silent := [part.name for part in self._parts if part.answer is None]:
            left = end - time.monotonic()
            if left > 0:
                await asyncio.wait([part.next for part in self._parts if part.answer is None], timeout=left)
                continue
            raise EngineError(f"the engine's {', '.join(silent)} did not answer within {FIRST_SECONDS:.0f} s")
        self._tasks.keep(self._watch, "watch of stalls")

    async def news(self, seconds: float = NEWS_SECONDS) -> None:
        """Poll every part again now, and wait for the answers, at most ``seconds``."""
        await asyncio.wait([part.asked_again() for part in self._parts], timeout=seconds)

    @property
    def core_status(self) -> dict[str, Any]:
        return self._core.answer

    @property
    def agent_counters(self) -> list[dict[str, int]]:
        return [part.answer for part in self._agents]

    @property
    def counters(self) -> dict[str, int]:
        per_rank = self.agent_counters
        return {name: sum(counters.get(name, 0) for counters in per_rank) for name in per_rank[0]}

    def core_progressed(self) -> None:
        self._clock.progressed(CORE, time.monotonic())

    async def core_stands_still(self, seconds: float) -> float:
        """Poll the core; return, once it has made no progress for ``seconds``, the time without progress."""
        # At once: without a poll in progress, silence would say nothing.
        self._core.asked_again()
        while True:
            silent = self._clock.stalled(time.monotonic()).get(CORE, 0.0)
            if silent >= seconds:
                return silent
            await asyncio.sleep(seconds - silent)

    async def _layers_of(self, rank: int, ask: Question) -> Any:
        answer = await ask()
        layers = answer.get("layers")
        # A long prefill is one step of the core, and progress all the same: its layers show it.
        if self._layers.get(rank) != layers:
            self._layers[rank] = layers
            self.core_progressed()
        return answer

    @property
    def stalled_s(self) -> float:
        """Seconds without progress of the slowest part; 0 if none owes an answer."""
        return max(self._clock.stalled(time.monotonic()).values(), default=0.0)

    async def close(self) -> None:
        await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            stalled = self._clock.stalled(time.monotonic())
            silent = {name for name, seconds in stalled.items() if seconds > LOGGED_SECONDS}
            for name in silent - self._silent:
                logger.warning("the engine's %s has shown no progress for %.0f s", name, stalled[name])
            for name in self._silent - silent:
                logger.warning("the engine's %s makes progress again", name)
            self._silent = silent


class _Part:
    """One process, and its last answer."""

    def __init__(self, name: str, question: Question, clock: StallClock) -> None:
        self.answer: Any = None
        self.name = name
        self._question = question
        self._clock = clock
        self._failures = Failures(f"poll of the engine's {name}")
        self._wanted = asyncio.Event()
        self.next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def asked_again(self) -> asyncio.Future[None]:
        """Return the future of the answer to a poll that is still to be sent."""
        self._wanted.set()
        return self.next

    async def ask_again_and_again(self) -> None:
        while True:
            current, self.next = self.next, asyncio.get_running_loop().create_future()
            self._wanted.clear()
            self._clock.asked(self.name, time.monotonic())
            try:
                self.answer = await self._question()
                self._clock.answered(self.name)
                self._failures.works()
            except TercetError as error:  # an error is also an answer
                self._clock.answered(self.name)
                logger.debug("the engine's %s: %s", self.name, error)
            except Exception as error:  # vLLM raises this for a core that has ended
                self._failures.log(error)
            if not current.done():
                current.set_result(None)
            with suppress(TimeoutError):
                # wait_for would lose a cancellation that comes together with a request (CPython 3.11).
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._wanted.wait()
