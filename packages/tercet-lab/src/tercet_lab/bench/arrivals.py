"""Arrival processes. They use no I/O and no clock: each is a list of times in seconds that begins with 0.

The gaps of a renewal process with ``rate`` requests per second and ``burstiness`` b are gamma distributed with shape b
and scale 1 / (rate * b): their mean is 1 / rate, their coefficient of variation 1 / sqrt(b). ``vllm bench serve`` has
the same parameter. b = 1 is a Poisson process, b < 1 is bursty, b = infinity is a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Literal

from tercet.protocol import BadRequest

LONGEST_S = 1e7
"""Longest time over which requests may arrive, in seconds. (A simulated fleet polls its engines each second of it.)"""
Arrival = Literal["poisson", "gamma", "constant", "closed", "trace"]


def gaps(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """Return ``count`` gaps between requests, in seconds; all are 0 if ``rate`` is infinite."""
    _require(rate > 0 and not math.isnan(rate), "request-rate", rate)
    _require(burstiness > 0 and not math.isnan(burstiness), "burstiness", burstiness)
    if math.isinf(rate):
        return [0.0] * count
    _require_short(count / rate)
    if math.isinf(burstiness):
        return [1.0 / rate] * count
    scale = 1.0 / (rate * burstiness)
    return [rng.gammavariate(burstiness, scale) for _ in range(count)]


def arrival_times(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """Return the time at which each of ``count`` requests is due, in seconds."""
    if count == 0:
        return []
    return list(accumulate(gaps(count - 1, rate, burstiness, rng), initial=0.0))


def replayed(recorded: Sequence[float], rate: float | None = None) -> list[float]:
    """Return a trace's times from 0 on, in seconds; with ``rate``, scaled so that their mean rate is ``rate``.

    Only time is scaled: bursts stay bursts. Raise :class:`~tercet.protocol.BadRequest` for a trace whose times are all
    equal: it cannot be scaled.
    """
    if not recorded:
        return []
    first = min(recorded)
    times = [at - first for at in sorted(recorded)]
    _require_short(times[-1])
    if rate is None:
        return times
    _require(rate > 0 and not math.isnan(rate), "request-rate", rate)
    if math.isinf(rate):
        return [0.0] * len(times)
    if times[-1] <= 0:
        raise BadRequest(
            "request-rate: all requests of the trace have the same time; it cannot be scaled to a rate", "request-rate"
        )
    _require_short((len(times) - 1) / rate)
    factor = (len(times) - 1) / rate / times[-1]
    return [at * factor for at in times]


def burstiness_of(arrival: Arrival, burstiness: float) -> float:
    """Return the shape of the gamma process for an arrival process given by name."""
    if arrival == "gamma":
        return burstiness
    return math.inf if arrival == "constant" else 1.0


def _require_short(seconds: float) -> None:
    if not seconds <= LONGEST_S:
        raise BadRequest(
            f"request-rate: the last request would arrive after {seconds:.3g} s, and the limit is {LONGEST_S:.0e} s; "
            "give a higher rate or fewer requests",
            "request-rate",
        )


def _require(fine: bool, field: str, value: float) -> None:
    if not fine:
        raise BadRequest(f"{field}: is {value}, and must be more than 0", field)
