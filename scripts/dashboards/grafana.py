"""The dashboards as JSON that Grafana imports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scripts.dashboards.declared import Query

WIDTH, HEIGHT, ACROSS = 24, 8, 3
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 39
"""Version of Grafana's format: that of Grafana 10."""


class Panel(NamedTuple):
    """A graph. All its queries have the same unit."""

    title: str
    queries: tuple[Query, ...]


class Variable(NamedTuple):
    """A variable at the top of a dashboard: a choice of values of a label."""

    name: str
    query: str


class Dashboard(NamedTuple):
    """A dashboard, in one file. ``name`` is the file's name and part of the uid; an import replaces an equal uid."""

    name: str
    title: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard in Grafana's format."""
    return {
        "uid": f"tercet-{dashboard.name}",
        "title": f"Tercet: {dashboard.title}",
        "tags": ["tercet"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["tercet"], "title": "Tercet", "asDropdown": True, "keepTime": True}],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_panels(dashboard.rows)),
    }


def _panels(rows: Sequence[tuple[str, Sequence[Panel]]]) -> Iterator[dict[str, Any]]:
    number, top, width = 0, 0, WIDTH // ACROSS
    for title, panels in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
            "panels": [],
        }
        top += 1
        for place, panel in enumerate(panels):
            number += 1
            across, down = place % ACROSS, place // ACROSS
            grid = {"x": across * width, "y": top + down * HEIGHT, "w": width, "h": HEIGHT}
            yield {"id": number, "gridPos": grid, **_graph(panel)}
        top += -(-len(panels) // ACROSS) * HEIGHT


def _graph(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "expr": query.expr, "legendFormat": query.legend, "datasource": DATASOURCE}
        for number, query in enumerate(panel.queries)
    ]
    (unit,) = {query.unit for query in panel.queries}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(dict.fromkeys(query.meaning for query in panel.queries)),
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
