"""The metrics of the reference page, and queries that use only these metrics and their labels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

OF_TARGETS = ("instance", "job")
"""Labels that Prometheus adds to every series."""

INTERVAL = "$__rate_interval"
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
RATES = {"bytes": "Bps"}
_ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.MULTILINE)


class Metric(NamedTuple):
    """A metric of the page."""

    name: str
    kind: str
    labels: frozenset[str]
    meaning: str

    @property
    def measures(self) -> str:
        """Unit in the metric's name, such as ``seconds``."""
        return self.name.removesuffix("_total").rpartition("_")[2]


class Query(NamedTuple):
    """A query: PromQL, the legend of its series, their unit in Grafana, and the meaning of the metric."""

    expr: str
    legend: str
    unit: str
    meaning: str


class Declared:
    """The metrics of the page, and queries of them.

    Each method raises :class:`ValueError` for a metric or a label that does not exist. ``by`` are the labels that
    distinguish series; ``where`` are matchers by label, such as ``=~"$engine"``.
    """

    def __init__(self, page: str) -> None:
        rows = (Metric(name, kind, _labels(labels), meaning) for name, kind, labels, meaning in _ROW.findall(page))
        self.metrics: dict[str, Metric] = {}
        for row in rows:
            known = self.metrics.setdefault(row.name, row)
            self.metrics[row.name] = known._replace(labels=known.labels | row.labels)

    def now(self, name: str, *by: str, how: str = "sum", legend: str = "", **where: str) -> Query:
        """Return the query of a gauge. ``how`` aggregates series; use ``max`` if several routers report an engine."""
        metric = self._metric(name, "gauge", by, where)
        return Query(
            f"{how}{_by(by)} ({name}{_where(where)})", legend or _legend(by, name), _unit(metric), metric.meaning
        )

    def rate(self, name: str, *by: str, legend: str = "", **where: str) -> Query:
        """Return the query of a counter's increase per second."""
        metric = self._metric(name, "counter", by, where)
        expr = f"sum{_by(by)} (rate({name}{_where(where)}[{INTERVAL}]))"
        return Query(expr, legend or _legend(by, name), RATES.get(metric.measures, "short"), metric.meaning)

    def quantile(self, quantile: float, name: str, *by: str, **where: str) -> Query:
        """Return the query of a quantile of a histogram."""
        metric = self._metric(name, "histogram", by, where)
        inner = f"sum{_by(('le', *by))} (rate({name}_bucket{_where(where)}[{INTERVAL}]))"
        legend = " ".join(filter(None, (f"P{quantile * 100:g}", _legend(by, ""))))
        return Query(f"histogram_quantile({quantile:g}, {inner})", legend, _unit(metric), metric.meaning)

    def mean(self, name: str, *by: str, **where: str) -> Query:
        """Return the query of the mean of a histogram or a summary."""
        known = self.metrics.get(name)
        kind = "summary" if known is not None and known.kind == "summary" else "histogram"
        metric = self._metric(name, kind, by, where)
        sums = (f"sum{_by(by)} (rate({name}_{part}{_where(where)}[{INTERVAL}]))" for part in ("sum", "count"))
        return Query(" / ".join(sums), " ".join(filter(None, ("mean", _legend(by, "")))), _unit(metric), metric.meaning)

    def share(self, part: str, whole: str, *by: str, **where: str) -> Query:
        """Return the query of the ratio of two counters' increases."""
        parts = [self.rate(name, *by, **where) for name in (part, whole)]
        meaning = " Over: ".join(each.meaning for each in parts)
        return Query(" / ".join(each.expr for each in parts), parts[0].legend, "percentunit", meaning)

    def values_of(self, label: str, name: str) -> str:
        """Return the query of a variable: the values of a label."""
        self._metric(name, self.metrics[name].kind if name in self.metrics else "", (label,), {})
        return f"label_values({name}, {label})"

    def _metric(self, name: str, kind: str, by: Sequence[str], where: Mapping[str, str]) -> Metric:
        found = self.metrics.get(name)
        if found is None or found.kind != kind:
            raise ValueError(f"{name}: {'is not a metric' if found is None else f'is a {found.kind}, not a {kind}'}")
        unknown = {*by, *where} - {*found.labels, *OF_TARGETS}
        if unknown:
            raise ValueError(
                f"{name}: has no label {', '.join(sorted(unknown))}; it has {', '.join(sorted(found.labels))}"
            )
        return found


def _labels(cell: str) -> frozenset[str]:
    return frozenset(label for label in re.split(r",\s*", cell.strip()) if label)


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _where(matchers: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{label}{matcher}" for label, matcher in matchers.items()) + "}" if matchers else ""


def _legend(by: Sequence[str], otherwise: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by) or otherwise


def _unit(metric: Metric) -> str:
    return UNITS.get(metric.measures, "short")
