"""The largest rate at which a fleet meets its objectives, by bisection, with an interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.experiment import Experiment, Note, Run
from tercet_lab.bench.simulated.grid import Estimate
from tercet_lab.bench.simulated.run_metrics import metric_of
from tercet_lab.bench.workloads.conversations import refuse
from tercet_lab.tables import Kind, Table

MOST_STEPS = 20
"""Most doublings, or halvings, of the first rate."""
CAPACITY_COLUMNS: Mapping[str, Kind] = {
    "seed": "count", "rate": "time", "attainment": "time", "goodput": "time", "throughput": "time",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The largest rate at which at least the share ``attainment`` of the requests meets the objectives.

    ``rate`` is the mean over seeds, in requests per second, ``interval`` Student's 95% interval of that mean (None for
    a single seed). ``by_seed`` has the rate of each seed: settings with the same seeds can be compared seed by seed.
    ``runs`` are all runs behind it, and ``table`` has a row for each.
    """

    attainment: float
    rate: float
    interval: tuple[float, float] | None
    by_seed: Mapping[int, float]
    runs: tuple[Run, ...]

    @property
    def table(self) -> Table:
        """A row for each run, in the order of the search: seed, rate, attainment, goodput and throughput."""
        found = Table(CAPACITY_COLUMNS)
        for run in self.runs:
            experiment = run.experiment
            assert experiment is not None
            values = (metric_of(name).value(run) for name in ("attainment", "goodput", "throughput"))
            found.append(experiment.seed, experiment.work.rate, *values)
        return found

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" (95% interval {self.interval[0]:.3g} to {self.interval[1]:.3g})"
        return f"{self.rate:.3g} requests/s{interval} at an attainment of {self.attainment:g}, {len(self.runs)} runs"


def capacity_of(
    experiment: Experiment, attainment: float = 0.9, *, seeds: int = 3, low: float | None = None,
    high: float | None = None, tolerance: float = 0.02, note: Note = lambda _: None,
) -> Capacity:  # fmt: skip
    """Search the largest rate between ``low`` and ``high`` at which ``attainment`` of the requests meet the objectives.

    Each of ``seeds`` seeds is searched by itself, with the same requests at every rate, only closer together: the rate
    is doubled or halved until two rates bracket the crossing, bisected until they are within the share ``tolerance``,
    and interpolated between them. Later seeds begin around the result of those before.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid argument, or if no crossing is found.
    """
    if experiment.limits is None:
        raise BadRequest("slo: is missing; a maximum rate needs limits, such as Slo(ttft=0.4, tpot=0.02)", "slo")
    for name, value, fine, rule in (
        ("attainment", attainment, 0 < attainment < 1, "between 0 and 1"),
        ("seeds", seeds, seeds >= 1, "at least 1"),
        ("low", low, low is None or 0 < low < math.inf, "a positive rate"),
        ("high", high, high is None or (low or 0) < high < math.inf, "a rate above low"),
        ("tolerance", tolerance, 0 < tolerance < 1, "between 0 and 1"),
    ):
        refuse(not fine, name, f"is {value}, and must be {rule}")
    found, runs = dict[int, float](), list[Run]()
    for seed in range(experiment.seed, experiment.seed + seeds):
        search = _Search(msgspec.structs.replace(experiment, seed=seed), attainment, (low, high), runs, note)
        first = low or experiment.work.rate or high or 1.0
        if found:
            mean = sum(found.values()) / len(found)
            bracket = search.around(mean * (1 - 4 * tolerance), mean * (1 + 4 * tolerance))
        else:
            bracket = search.around(first, high if low and high else first)
        found[seed] = search.crossing(*bracket, tolerance)
        note(f"seed {seed}: {found[seed]:.4g} requests/s")
    estimate = Estimate.of(list(found.values()))
    half = estimate.half
    interval = None if half is None else (max(0.0, estimate.mean - half), estimate.mean + half)
    return Capacity(attainment=attainment, rate=estimate.mean, interval=interval, by_seed=found, runs=tuple(runs))


class _Search:
    """The search for one seed, whose runs are added to ``runs``."""

    def __init__(
        self, experiment: Experiment, wanted: float, limits: tuple[float | None, float | None], runs: list[Run],
        note: Note,
    ) -> None:  # fmt: skip
        self._experiment, self._wanted, self._limits = experiment, wanted, limits
        self._runs, self._note = runs, note
        self._shares = dict[float, float]()

    def _above(self, rate: float) -> float:
        """Return how far the attainment at a rate is above the wanted one; negative below it."""
        if rate not in self._shares:
            run = self._experiment.at(rate).run()
            self._runs.append(run)
            self._shares[rate] = (run.attainment or 0.0) - self._wanted
            self._note(f"seed {self._experiment.seed}: {self._share_at(rate)}")
        return self._shares[rate]

    def around(self, low: float, high: float) -> tuple[float, float]:
        """Return two rates, the wanted attainment being met at the first and missed at the second."""
        least, most = self._limits
        low, high = max(low, least or 0.0), min(high, most or math.inf)
        for _ in range(MOST_STEPS):
            if self._above(low) >= 0:
                break
            refuse(low == least, "low", f"{self._share_at(low)}; give a lower one, or looser limits")
            low, high = max(low / 2, least or 0.0), low
        else:
            raise BadRequest(f"slo: {self._share_at(low)}; give looser limits", "slo")
        high = max(low, high)
        for _ in range(MOST_STEPS):
            if self._above(high) < 0:
                return low, high
            refuse(high == most, "high", f"{self._share_at(high)}; give a higher one, or tighter limits")
            low, high = high, min(high * 2, most or math.inf)
        raise BadRequest(f"work: {self._share_at(high)}; give more requests, or tighter limits", "work")

    def _share_at(self, rate: float) -> str:
        share = self._above(rate) + self._wanted
        return f"{share:.1%} of the requests meet the limits at {rate:.4g} requests/s"

    def crossing(self, low: float, high: float, tolerance: float) -> float:
        """Return the rate between the two at which the attainment crosses the wanted one."""
        while high > low * (1 + tolerance):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._above(middle) >= 0 else (low, middle)
        above, below = self._above(low), -self._above(high)
        return low + (high - low) * above / (above + below)
