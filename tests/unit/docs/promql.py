"""What a query of Prometheus names that is neither declared nor recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import promql_parser
from scripts.dashboards.declared import OF_TARGETS, Declared, Metric
from scripts.reference.built import page

PARTS = {"bucket": {"le"}, "sum": set[str](), "count": set[str]()}
OF_GRAFANA = {"$__rate_interval": "5m"}


@cache
def declared() -> Mapping[str, Metric]:
    """The metrics of the reference."""
    return Declared(page("metrics.md")).metrics


def wrong_in(query: str, recorded: dict[str, set[str]] | None = None) -> list[str]:
    """Metrics and labels that do not exist; raises :class:`ValueError` for what is no PromQL.

    ``recorded`` are the labels of recording rules by their names.
    """
    for variable, value in OF_GRAFANA.items():
        query = query.replace(variable, value)
    parsed = promql_parser.parse(query)
    known = _labels_of_all(recorded or {})
    found: list[str] = []
    names = list(_selectors(parsed))
    if not names:
        found.append("names no metric")
    labels = {"le"} if any(name.endswith("_bucket") for name, _ in names) else set[str]()
    for name, matched in names:
        if name not in known:
            found.append(f"{name} is no metric")
            continue
        found += [f"{name} has no label {label}" for label in matched if label not in known[name]]
        labels |= known[name]
    return [*found, *(f"no metric has the label {label}" for label in _grouped(parsed) if label not in labels)]


def labels_by(query: str) -> set[str]:
    """The labels that remain of a query: those of its groups, without ``le``."""
    return set(_grouped(promql_parser.parse(query))) - {"le"}


def _labels_of_all(recorded: dict[str, set[str]]) -> dict[str, set[str]]:
    known = {name: {*labels, *OF_TARGETS} for name, labels in recorded.items()}
    for metric in declared().values():
        labels = {*metric.labels, *OF_TARGETS}
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}": labels | more for part, more in PARTS.items()}
        elif metric.kind == "summary":
            known |= {f"{metric.name}_{part}": labels for part in PARTS if part != "bucket"}
        else:
            known[metric.name] = labels
    return known


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        inner = getattr(node, name, None)
        if inner is not None:
            yield from _nodes(inner)
    for inner in getattr(node, "args", ()):
        yield from _nodes(inner)


def _selectors(parsed: Any) -> Iterator[tuple[str, list[str]]]:
    for node in _nodes(parsed):
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name or "", [matcher.name for matcher in node.matchers.matchers]


def _grouped(parsed: Any) -> Iterator[str]:
    for node in _nodes(parsed):
        modifier = getattr(node, "modifier", None)
        for holder in (modifier, getattr(modifier, "matching", None)):
            yield from getattr(holder, "labels", None) or ()
