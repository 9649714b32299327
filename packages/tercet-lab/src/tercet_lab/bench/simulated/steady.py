"""The steady part of a run: how many of its first requests see a fleet that still fills."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tercet_lab.bench.results import Summary, summarize
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests

BATCH = 5
FEWEST = 100
"""Fewest requests in which a warm-up is searched: 20 batches."""


@dataclass(frozen=True)
class Steady:
    """The requests of a run without its warm-up: those that were due in the half-open window ``[begin, end)``.

    ``left_out`` requests were due before it, of ``total``; ``why`` says what was found, in one sentence.
    """

    begin: float
    end: float
    left_out: int
    total: int
    why: str
    requests: Requests
    slo: Slo | None

    @cached_property
    def summary(self) -> Summary:
        """Rates and distributions of these requests."""
        return summarize(self.requests, self.slo)

    def __str__(self) -> str:
        return self.why


def steady_of(requests: Requests, about: Mapping[str, Any], slo: Slo | None) -> Steady:
    """Return the steady part of a run; ``about`` is what was simulated, as :class:`Run` has it.

    Requests in order of arrival are cut by MSER-5 (White, Cobb, Spratt, "A comparison of five steady-state truncation
    heuristics for simulation", 2000), for TTFT and for JCT; the later cut counts. All are kept of a replay, whose load
    is as it was recorded; of requests that come all at once; of fewer than :data:`FEWEST`; and if no cut in the first
    half is the best one, since the run then has no steady part.
    """
    due = requests["scheduled"]
    order, total = np.argsort(due, kind="stable"), len(due)
    work, cut = about.get("workload"), 0
    if isinstance(work, dict) and work.get("arrivals") == "trace":  # pyright: ignore[reportUnknownMemberType]
        why = "all requests of a replay are kept"
    elif about.get("rate") == math.inf:
        why = "all requests are kept, since they came at once"
    elif total < FEWEST:
        why = f"all requests are kept: {total} are too few to find a warm-up"
    else:
        cuts = [truncation(values[order]) for values in (requests.ttft_scheduled, requests.e2el_scheduled)]
        cut = 0 if None in cuts else max(each or 0 for each in cuts)
        began = float(due[order[cut]] - due[order[0]])
        why = f"warm-up: the first {cut} of {total} requests ({began:.1f} s) are left out of means (MSER-5)"
        if None in cuts:
            why = "all requests are kept: the run has no steady part (MSER-5); simulate longer, or at less load"
        elif not cut:
            why = f"no warm-up was found in {total} requests (MSER-5)"
    if not total:
        return Steady(0.0, 0.0, 0, 0, why, requests, slo)
    begin, end = float(due[order[cut]]), math.nextafter(float(due[order[-1]]), math.inf)
    kept = requests.where(due >= begin) if cut else requests
    return Steady(begin, end, total - len(kept), total, why, kept, slo)


def truncation(values: NDArray[np.float64]) -> int | None:
    """Return how many first values MSER-5 leaves out; None if the best cut is not in the first half.

    Values are averaged in batches of five. The best cut has the least squared standard error of the mean of the
    batches behind it. Unknown values are left out of their batch.
    """
    known = np.isfinite(values)
    size = len(values) // BATCH * BATCH
    counts = known[:size].reshape(-1, BATCH).sum(axis=1)
    sums = np.where(known, values, 0.0)[:size].reshape(-1, BATCH).sum(axis=1)
    which = np.flatnonzero(counts)
    batches = sums[which] / counts[which]
    number = len(batches)
    if number < 2:
        return 0
    # Sums from each batch to the end, of values near 0 so that the difference of squares keeps its digits.
    near = (batches - batches.mean())[::-1]
    left = np.arange(1, number + 1)
    spread = np.maximum(0.0, np.cumsum(near**2) - np.cumsum(near) ** 2 / left)
    error = (spread / left**2)[::-1]
    best = int(np.argmin(error[: number - BATCH])) if number > BATCH else 0  # the last batches have no spread by chance
    return None if best > number // 2 else int(which[best]) * BATCH
