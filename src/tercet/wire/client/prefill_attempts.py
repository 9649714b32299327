"""Attempts to prefill a request's prompt on other engines, one after another, until one succeeds, or until a timeout.

An engine that fails, refuses or is silent is skipped; a lost engine is not used again before it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from tercet.protocol import DeadlineExceeded, EngineUnreachable, TercetError
from tercet.protocol.trace import FALLBACK, TraceEvent, VerbTrace
from tercet.settings import log_events
from tercet.settings.prefill_settings import PrefillBudget
from tercet.wire.client import prefill_metrics

logger = logging.getLogger(__name__)
T = TypeVar("T")
REMOTE, HERE = "disaggregated", "data_parallel"
POLL_INTERVAL_S = 0.5
PROBE_SECONDS = 1.0
REST_SECONDS = 2.0
"""Seconds for which a lost engine is not used; after that it first has to answer a poll."""
MOST_LOST = 256
Look = Callable[[], Awaitable[object]]
"""A function that polls an engine; it raises :class:`~tercet.protocol.TercetError` if the engine is not healthy."""


class _Lost(NamedTuple):
    at: float
    why: str


class PrefillAttempts:
    """Calls of engines that requests name, and a memory of lost engines. ``clock`` is monotonic, in seconds."""

    def __init__(self, budget: PrefillBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.clock = clock
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    async def first_of(
        self,
        hosts: Sequence[str],
        seq_id: str,
        trace: VerbTrace,
        ask: Callable[[str], Awaitable[T]],
    ) -> T:
        """Return the result of the first of ``hosts`` that does not fail; raise the error of the last one.

        ``ask`` calls one host, by :meth:`watched`; it is cancelled at the timeout.
        """
        began = self.clock()
        failure: TercetError = DeadlineExceeded("no engine was called")
        for host in hosts:
            left = began + self.budget.timeout_s - self.clock()
            if left <= 0:
                break
            patience = asyncio.timeout(left)
            try:
                async with patience:
                    return await ask(host)
            except TimeoutError:
                if not patience.expired():
                    raise
                failure = DeadlineExceeded(f"{host} has not prefilled within {self.budget.timeout_s:g} s")
            except TercetError as error:
                failure = error
            prefill_metrics.failures.labels(failure.code).inc()
            log_events.PREFILL_FAILED.tell(seq_id=seq_id, engine=host, code=failure.code, reason=failure.message)
            trace.events.append(TraceEvent(FALLBACK, host, code=failure.code, reason=f"{REMOTE}: {failure.message}"))
        raise failure

    async def watched(self, host: str, work: Callable[[], Coroutine[Any, Any, T]], look: Look) -> T:
        """Return the result of ``work`` at ``host``, which ``look`` polls in the meantime.

        Raises the errors of both. In any case, the work has ended, or was cancelled, when this returns.
        """
        self._require_rested(host)
        tasks = set[asyncio.Future[Any]]()
        try:
            if host in self._lost:
                await _answered(host, look, PROBE_SECONDS)
                self._lost.pop(host, None)
            working = asyncio.ensure_future(work())
            watching = asyncio.ensure_future(self._until_lost(host, look))
            tasks.update((working, watching))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watching.result()
            return await working
        except EngineUnreachable as error:
            self._lost[host] = _Lost(self.clock(), error.message)
            while len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the other task's exception is not needed

    def _require_rested(self, host: str) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` for an engine that was lost within ``REST_SECONDS``."""
        lost = self._lost.get(host)
        if lost is not None and self.clock() < lost.at + REST_SECONDS:
            raise EngineUnreachable(f"{host} was lost a moment ago: {lost.why}")

    async def _until_lost(self, host: str, look: Look) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await _answered(host, look, self.budget.stuck_after_s)


async def _answered(host: str, look: Look, patience: float) -> None:
    try:
        async with asyncio.timeout(patience):
            await look()
    except EngineUnreachable:
        raise
    except TercetError as error:  # an engine that answers is alive
        logger.debug("%s answers: %s", host, error)
    except TimeoutError:
        raise EngineUnreachable(f"{host} has sent nothing for {patience:g} s") from None


def prefill_here(decode: str, seq_id: str, error: TercetError, trace: VerbTrace) -> None:
    """Record why a request that named engines to prefill is prefilled on this engine."""
    prefill_metrics.prefills.labels(prefill_metrics.LOCAL, error.code).inc()
    said = {"seq_id": seq_id, "engine": decode, "code": error.code, "reason": error.message}
    log_events.FALLBACK.tell(program=REMOTE, to=HERE, tokens=0, **said)
    trace.program = f"{REMOTE} -> {HERE}"
    trace.events.append(TraceEvent(FALLBACK, decode, code=error.code, reason=f"{trace.program}: {error.message}"))
