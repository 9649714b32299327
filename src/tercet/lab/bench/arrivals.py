"""When requests are due. No I/O, and no clock: each process is a list of times in seconds, the first one 0.

The gaps of a renewal process with ``rate`` requests per second and ``burstiness`` b are gamma distributed with shape b
and scale 1 / (rate * b), the parameter that ``vllm bench serve`` calls by the same name: mean 1 / rate, coefficient of
variation 1 / sqrt(b). b = 1 is a Poisson process, b < 1 comes in bursts, b = infinity is a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Literal

from tercet.protocol import BadRequest

LONGEST_S = 1e7
"""Longest time in which requests arrive, in seconds: a fleet polls its engines each second, in virtual time too."""
Arrival = Literal["poisson", "gamma", "constant", "closed", "trace"]


def gaps(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """``count`` gaps between requests, in seconds; all 0 when ``rate`` is infinite."""
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
    """When each of ``count`` requests is due."""
    if count == 0:
        return []
    return list(accumulate(gaps(count - 1, rate, burstiness, rng), initial=0.0))


def replayed(recorded: Sequence[float], rate: float | None = None) -> list[float]:
    """A trace's own times, from 0 on; with ``rate``, stretched so that their mean rate becomes that.

    Only time is stretched: bursts stay bursts. A trace without extent cannot be stretched and is refused.
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
        raise BadRequest("request-rate: every request of the trace has the same time, no rate fits it", "request-rate")
    _require_short((len(times) - 1) / rate)
    factor = (len(times) - 1) / rate / times[-1]
    return [at * factor for at in times]


def burstiness_of(arrival: Arrival, burstiness: float) -> float:
    """The gamma process's parameter for an arrival process by name."""
    if arrival == "gamma":
        return burstiness
    return math.inf if arrival == "constant" else 1.0


def _require_short(seconds: float) -> None:
    if not seconds <= LONGEST_S:
        raise BadRequest(
            f"request-rate: the last request would arrive after {seconds:.3g} s, and at most {LONGEST_S:.0e} s are "
            "taken; give a higher rate or fewer requests",
            "request-rate",
        )


def _require(fine: bool, field: str, value: float) -> None:
    if not fine:
        raise BadRequest(f"{field}: is {value}, and must be more than 0", field)
