"""The forecast of the next minutes' load from the last minutes: level, trend, and a season if one was seen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.decisions.planning import ObservedRequest

BIN_S = 5.0
"""Seconds of one sample of the load."""
NEWEST_S = 60.0
"""Seconds of arrivals that give the level of the load."""
FEWEST_SAMPLED = 500
"""Fewest requests that give the level, over a longer time if they come slowly."""
SMOOTH_BINS = 12
"""Samples in a mean of the load, to find a season: one minute."""
TREND_BINS = 24
"""Samples through which the line of a trend is fitted: two minutes."""
SEASON_BINS = 1440
"""Samples that are kept to find a season: two hours."""
SHORTEST_SEASON = 48
"""Samples of the shortest season: four minutes."""
SEASON_SEEN = 0.8
"""Correlation of the load with itself one season earlier, above which a season counts as seen."""
CHANGE = 0.35
"""Relative change of the load between an older and a newer part, from which on the older part is not used."""
LEAST_SEASON = 0.25
"""Standard deviation of a load, as a share of its mean, below which it has no season worth a forecast."""
NO_TRAFFIC_S = 60.0
"""Seconds without a request after which the forecast is 0 requests per second."""
MOST_GROWTH = 2.0
"""Largest factor between the next minutes' load and the last minutes': a line through a minute shows no more."""
LEARNT_BINS = 3
"""Samples that a forecast is compared with."""
LEARNT_SHARE = 0.2
"""Power of the error, beyond :data:`LEARNT_BEYOND` standard deviations, by which the next forecast is corrected."""
LEARNT_BEYOND = 1.5
"""Standard deviations of an error that count as chance: a busy quarter of a minute already raises the level."""
FORGOTTEN = 0.95
"""Power of the correction that the next comparison keeps."""
SIGNIFICANT = 4.0
"""Standard deviations of a steady load by which a trend must exceed chance."""
CHANGED = 5.0
"""Standard deviations by which a change must exceed chance: more, since it is tested often and in several measures."""
SETTLED_S = 15.0
"""Seconds of traffic that are enough for a plan."""
FEWEST_FIRST = 200
"""Requests that a plan needs before that, with most answers ended: the length of a running answer is not known."""


@dataclass(frozen=True)
class Forecast:
    """An expected load: requests like ``sample`` come at ``rate`` per second; ``why`` names the parts of the rate."""

    rate: float
    sample: tuple[ObservedRequest, ...]
    why: str


class Forecasting(Protocol):
    """A source of forecasts; :class:`Forecaster` describes the arguments."""

    def look(
        self, now: float, since: float, arrivals: Sequence[ObservedRequest], ahead_s: float
    ) -> Forecast | None: ...


def is_enough(now: float, since: float, arrivals: Sequence[ObservedRequest]) -> bool:
    """True if the traffic is enough for a plan: :data:`SETTLED_S` seconds, or many requests and most answers.

    For the latter, :data:`FEWEST_FIRST` requests came, and of those in the earlier half of the time most have ended.
    """
    if now - since >= SETTLED_S:
        return True
    earlier = [each for each in arrivals if each.at < (since + now) / 2]
    return len(arrivals) >= FEWEST_FIRST and 2 * sum(each.ended for each in earlier) > len(earlier)


class Forecaster:
    """A forecaster that looks at the arrivals repeatedly, and learns from the errors of its forecasts."""

    def __init__(self) -> None:
        self._bins: deque[float] = deque(maxlen=SEASON_BINS)
        self._counted_to: float | None = None
        self._expected: tuple[float, float, int] | None = None
        self._changed_at: float | None = None
        self.correction = 1.0
        """Factor by which forecasts were too low, learned from the load that came; between 0.8 and 1.25."""

    def look(self, now: float, since: float, arrivals: Sequence[ObservedRequest], ahead_s: float) -> Forecast | None:
        """Return the forecast for ``ahead_s`` seconds after ``now``; None while too little traffic was seen.

        ``arrivals`` are all since ``since``, or those of the last minutes. Without traffic the rate is 0.
        """
        self._count(now, since, arrivals)
        begin = max(since, min((each.at for each in arrivals), default=now))
        recent, changed = _since_change(arrivals, begin, now)
        if self._changed_at is None or changed > begin:
            self._changed_at = changed
        recent, begin = _newest(recent, changed, now)
        watched = now - begin
        silent = now - max(since, recent[-1].at if recent else since)
        if silent >= NO_TRAFFIC_S:
            return Forecast(0.0, (), "no traffic")
        if not recent or watched < BIN_S:
            return None
        level = len(recent) / watched
        self._learn(now)
        slope = self._trend(now - self._changed_at)
        season = self._season(ahead_s)
        rate, why = level, f"level {level:.1f}/s"
        if season is not None:
            rate, why = season, f"{why}, one season ago {season:.1f}/s"
        elif slope:
            rate += slope * (watched + ahead_s) / 2
            why += f", trend {slope * 60:+.1f}/s per minute"
        rate = min(max(rate * self.correction, level / MOST_GROWTH), level * MOST_GROWTH)
        self._expected = (now + ahead_s / 2, rate, len(recent))
        return Forecast(rate, tuple(recent), why)

    def _count(self, now: float, since: float, arrivals: Sequence[ObservedRequest]) -> None:
        """Add the samples of the load that are complete at ``now``."""
        begin = since if self._counted_to is None else self._counted_to
        if begin + BIN_S > now:
            return
        times = np.array([each.at for each in arrivals])
        while begin + BIN_S <= now:
            self._bins.append(np.count_nonzero((begin <= times) & (times < begin + BIN_S)) / BIN_S)
            begin += BIN_S
        self._counted_to = begin

    def _learn(self, now: float) -> None:
        """Correct later forecasts by the error of the forecast for about ``now``; ignore a load that fell to zero."""
        if self._expected is None or now < self._expected[0]:
            return
        _, rate, sampled = self._expected
        self._expected = None
        came = float(np.mean(list(self._bins)[-LEARNT_BINS:])) if self._bins else 0.0
        if rate > 0 and came > 0:
            wrong = math.log(min(max(came / rate, 0.5), 2.0))
            # The forecast came from a sample that varies by chance, as the requests do that it is compared with.
            by_chance = math.sqrt(1 / (rate * BIN_S * LEARNT_BINS) + 1 / sampled)
            beyond = math.copysign(max(0.0, abs(wrong) - LEARNT_BEYOND * by_chance), wrong)
            learned = FORGOTTEN * math.log(self.correction) + LEARNT_SHARE * beyond
            self.correction = min(max(math.exp(learned), 0.8), 1.25)

    def _trend(self, watched: float) -> float:
        """Return the slope of the load, in requests per second per second; 0 unless it exceeds chance."""
        count = min(TREND_BINS, len(self._bins), int(watched / BIN_S))
        if count < 4:
            return 0.0
        loads = np.array(list(self._bins)[-count:])
        times = (np.arange(count) - (count - 1) / 2) * BIN_S
        slope = float(times @ loads / (times @ times))
        # Counts of a steady Poisson load vary by their root; those of bursty loads vary by their distance to the line.
        rest = loads - loads.mean() - slope * times
        deviation = math.sqrt(max(loads.mean() / BIN_S, float(rest @ rest) / (count - 2)))
        return slope if abs(slope) > SIGNIFICANT * deviation / math.sqrt(float(times @ times)) else 0.0

    def _season(self, ahead_s: float) -> float | None:
        """Return the load of the time ahead by the last season, scaled to the present level; None without a season."""
        loads = np.array(self._bins)
        if len(loads) < 2 * SHORTEST_SEASON:
            return None
        smooth = np.convolve(loads, np.ones(SMOOTH_BINS) / SMOOTH_BINS, mode="valid")
        centred = smooth - smooth.mean()
        power = float(centred @ centred)
        if power <= 0 or smooth.std() < LEAST_SEASON * smooth.mean():
            return None
        period = _period(centred)
        if not period:
            return None
        ahead = round(ahead_s / 2 / BIN_S)
        then = smooth[len(smooth) - period - 1]
        later = smooth[min(len(smooth) - 1, len(smooth) - period - 1 + ahead)]
        return float(smooth[-1] * later / then) if then > 0 else None


def _period(centred: NDArray[np.float64]) -> int:
    """Return the lag, in samples, at which the load correlates most with itself; 0 if no correlation is high enough."""
    count = len(centred)
    lags = np.arange(SHORTEST_SEASON, count // 2)
    if not len(lags):
        return 0
    products = np.correlate(centred, centred, "full")[count - 1 :][lags]
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    scale = np.sqrt((squares[-1] - squares[lags]) * squares[count - lags])
    alike = np.divide(products, scale, out=np.zeros(len(lags)), where=scale > 0)
    best = int(np.argmax(alike))
    return int(lags[best]) if alike[best] > SEASON_SEEN else 0


def _since_change(arrivals: Sequence[ObservedRequest], begin: float, now: float) -> tuple[list[ObservedRequest], float]:
    """Return the arrivals since the last change of the load, and its time; all arrivals and ``begin`` without one.

    The load changed if rate, prompts or answers of the newest part differ from those of the part before it.
    """
    found = list(arrivals)
    lengths = [length for length in (2 * BIN_S, 4 * BIN_S, 6 * BIN_S) if now - length - begin >= BIN_S]
    if not lengths:
        return found, begin
    totals = _running_totals(found)
    for length in lengths:
        cut = now - length
        at = next((index for index, each in enumerate(found) if each.at >= cut), len(found))
        if _differ(totals, at, cut - begin, length):
            return found[at:], cut
    return found, begin


def _newest(arrivals: list[ObservedRequest], begin: float, now: float) -> tuple[list[ObservedRequest], float]:
    """Return the arrivals of the last minute, or the last :data:`FEWEST_SAMPLED` if it has fewer, and their begin."""
    first = next((index for index, each in enumerate(arrivals) if each.at >= now - NEWEST_S), len(arrivals))
    first = min(first, max(0, len(arrivals) - FEWEST_SAMPLED))
    return (arrivals, begin) if first == 0 else (arrivals[first:], min(now - NEWEST_S, arrivals[first].at))


def _running_totals(arrivals: Sequence[ObservedRequest]) -> NDArray[np.float64]:
    """Return six rows of sums over the first 0, 1, ... arrivals: requests, prompt and output tokens, their squares."""
    lengths = np.array([(1, each.prompt_tokens, each.output_tokens) for each in arrivals], float).reshape(-1, 3).T
    totals = np.zeros((6, len(arrivals) + 1))
    np.cumsum(np.vstack((lengths, lengths**2)), axis=1, out=totals[:, 1:])
    return totals


def _differ(totals: NDArray[np.float64], at: int, before_s: float, after_s: float) -> bool:
    """True if the arrivals from index ``at`` on, of ``after_s`` seconds, differ in load from those before it."""
    before, after = totals[:, at], totals[:, -1] - totals[:, at]
    if after[0] < 8:
        return False
    per_second = before / before_s, after / after_s
    for measure in range(3):
        was, now = (float(side[measure]) for side in per_second)
        if was <= 0 and now <= 0:
            continue
        # The deviation by chance is that of the side with the larger one: a lull has few requests, and looks certain.
        chance = math.sqrt(max(float(side[measure + 3]) for side in per_second) / after_s)
        if abs(now - was) > max(CHANGE * max(was, now), CHANGED * chance):
            return True
    return False
