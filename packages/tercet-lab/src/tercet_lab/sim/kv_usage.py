"""The KV usage of simulated engines over time, exactly, from the changes of their used blocks.

An engine records a change when it happens, and the blocks of a run of decode steps as one entry when the run ends: the
steps that take a block are found later, for many runs at once. Means and percentiles weigh each state by its duration.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tercet_lab.sim.sim_engine import SimEngine

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SETTLED_AT = 5_000
"""Number of recorded entries at which they are evaluated, so that a long run needs no more memory."""
CHANGE, RUN = 3, 7  # lengths of the entry of a change, and of that of a run without its phases
CHUNK = 512
FINENESS = 2**16
"""Number of parts of the whole range of imbalances, in which the percentile is found."""


class KVImbalance(msgspec.Struct, frozen=True, kw_only=True):
    """The KV usage of the fullest engine minus the mean over all paid engines, as shares of a KV cache (0 to 1).

    ``mean`` and ``p95`` (to 0.00002) are over the time from the first arrival to the last one: the drain at the end is
    not a load to balance. ``usage`` is the mean KV usage of the paid engines over the same time.
    """

    mean: float
    p95: float
    usage: float

    def flat(self) -> dict[str, float]:
        """Return the values by name, for a report."""
        return {"mean_kv_imbalance": self.mean, "p95_kv_imbalance": self.p95, "mean_kv_usage": self.usage}


class EngineUsage:
    """The recorder of one engine; ``free`` is the number of free blocks after all entries so far."""

    __slots__ = ("_log", "_row", "free")

    def __init__(self, log: UsageLog, row: int, free: int) -> None:
        self._log, self._row, self.free = log, row, free

    def note(self, free: int) -> None:
        """Record that the engine has ``free`` free blocks from now on."""
        if free != self.free:
            log = self._log
            log.changes += (log.now(), self._row, self.free - free)
            self.free = free
            if len(log.changes) > SETTLED_AT * CHANGE:
                log.settle()

    def note_run(
        self, begin: float, first: float, growth: float, steps: tuple[int, int], tick: int, phases: list[int],
        taken: int,
    ) -> None:  # fmt: skip
        """Record the ``taken`` blocks of the ``steps`` (a range) of a run of decode steps.

        Step ``i`` takes ``phases[(tick + i) % len(phases)]`` blocks at its begin. Times are seconds of the loop: the
        run's begin, the length of its first step, and the growth of each step.
        """
        runs = self._log.runs[len(phases)]
        runs += (self._row, begin, first, growth, *steps, tick)
        runs += phases
        self.free -= taken
        if len(runs) > SETTLED_AT * (RUN + len(phases)):
            self._log.settle()


class UsageLog:
    """The usage of ``engines`` from now to :meth:`end`. Those in ``paid`` count; :meth:`settle` before it changes."""

    def __init__(self, engines: Mapping[str, SimEngine], paid: Container[str]) -> None:
        self._engines, self._paid = engines, paid
        self.now = asyncio.get_running_loop().time
        self._at = self.now()
        self._used = np.array([engine.pool.total - engine.free_blocks for engine in engines.values()], dtype=np.int64)
        self._totals = np.array([engine.pool.total for engine in engines.values()], dtype=np.float64)
        # Numbers one after the other, since an array of rows costs four times as much: time, engine, more used blocks.
        self.changes: list[float] = []
        self.runs: defaultdict[int, list[float]] = defaultdict(list)  # by block size; see taken_by
        self._seconds = self._imbalance = self._usage = 0.0
        self._spread = np.zeros(FINENESS + 1)
        for row, engine in enumerate(engines.values()):
            engine.record_usage(EngineUsage(self, row, engine.free_blocks))

    def end(self) -> KVImbalance | None:
        """Stop recording. Return the result, or None if no time has passed."""
        self.settle()
        for engine in self._engines.values():
            engine.record_usage(None)
        if not self._seconds:
            return None
        reached: Floats = np.cumsum(self._spread)
        p95 = int(reached.searchsorted(0.95 * float(reached[-1]))) / FINENESS
        return KVImbalance(mean=self._imbalance / self._seconds, p95=p95, usage=self._usage / self._seconds)

    def settle(self) -> None:
        """Evaluate all entries so far, with the engines that are paid now."""
        for engine in self._engines.values():
            engine.catch_up_usage()
        shares = np.array([name in self._paid for name in self._engines]) / self._totals
        at, rows, more = self._entries()
        for begin in range(0, len(at), CHUNK):
            part = slice(begin, begin + CHUNK)
            self._evaluate(at[part], rows[part], more[part], shares)
        # The present state, until now.
        none = np.empty(0, dtype=np.int64)
        self._add(self._used * shares, np.array([self.now()]), none, np.empty(0), shares)
        self._at = self.now()

    def _entries(self) -> tuple[Floats, Integers, Integers]:
        """Return time, engine and more blocks of each change in the order of time, and forget them."""
        parts = [np.fromiter(self.changes, np.float64).reshape(-1, CHANGE)]
        parts += [taken_by(np.fromiter(runs, np.float64).reshape(-1, RUN + size)) for size, runs in self.runs.items()]
        self.changes.clear()
        self.runs.clear()
        entries = np.concatenate(parts)
        entries = entries[entries[:, 0].argsort(kind="stable")]
        return entries[:, 0], entries[:, 1].astype(np.int64), entries[:, 2].astype(np.int64)

    def _evaluate(self, at: Floats, rows: Integers, more: Integers, shares: Floats) -> None:
        self._add(self._used * shares, at, rows[:-1], (more * shares[rows])[:-1], shares)
        np.add.at(self._used, rows, more)
        self._at = float(at[-1])

    def _add(self, usage: Floats, at: Floats, rows: Integers, more: Floats, shares: Floats) -> None:
        """Add the states that end at the times ``at``: the first is ``usage``, each next one has ``more`` in a row."""
        paid = int(np.count_nonzero(shares))
        seconds = np.diff(at, prepend=self._at)
        if not paid:
            return
        mean = (usage.sum() + np.cumsum(np.concatenate(([0.0], more)))) / paid
        # Few engines can be the fullest: those that may reach what one of them has at least, all the time.
        engines = len(usage)
        least = usage + np.bincount(rows, np.minimum(more, 0.0), engines)
        most = usage + np.bincount(rows, np.maximum(more, 0.0), engines)
        able = np.flatnonzero(most >= least.max())
        places = np.full(engines, -1)
        places[able] = np.arange(len(able))
        states = np.zeros((len(at), len(able)))
        states[0] = usage[able]
        among = np.flatnonzero(places[rows] >= 0)
        states[among + 1, places[rows[among]]] = more[among]
        imbalance = np.maximum(np.cumsum(states, axis=0).max(axis=1) - mean, 0.0)
        self._seconds += float(seconds.sum())
        self._imbalance += float(imbalance @ seconds)
        self._usage += float(mean @ seconds)
        np.add.at(self._spread, np.rint(imbalance * FINENESS).astype(np.int64), seconds)


def taken_by(runs: Floats) -> Floats:
    """Return time, engine and blocks of each step that takes blocks, given the entries of runs with equal block sizes.

    An entry has the engine, the run's begin, its first step, its growth, a range of steps, the tick of the first step
    of the run, and its phases.
    """
    size = runs.shape[1] - RUN
    run, phase = runs[:, RUN:].nonzero()
    begin, end, tick = (runs[run, column].astype(np.int64) for column in (4, 5, 6))
    step = begin + (phase - tick - begin) % size  # the first of the range in this phase
    count = np.maximum(0, (end - step + size - 1) // size)
    each = np.repeat(np.arange(len(run)), count)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
    steps, run = step[each] + size * nth, run[each]
    at = runs[run, 1] + steps * runs[run, 2] + runs[run, 3] * steps * (steps - 1) / 2
    return np.column_stack((at, runs[run, 0], runs[run, RUN + phase[each]]))
