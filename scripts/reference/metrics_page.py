"""Every metric of Tercet's own, asked of the collectors that declare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from scripts.reference.markdown import code, table

from tercet.fleet import EngineFleet, Member
from tercet.fleet.engine_gauges import EngineCollector
from tercet.gateway.model_router.proxy import ModelMetrics
from tercet.gateway.picker_metrics import PickerMetrics, PoolCollector
from tercet.lab.planning.planner_metrics import PlannerMetrics
from tercet.lab.sim.sim_server import COUNTERS, GAUGES
from tercet.protocol import Engine, EngineLoad
from tercet.router.exposition import COUNTED_HERE, KNOWN_HERE, SERVED, VLLMS
from tercet.router.metrics import Metrics
from tercet.router.session_metrics import SessionCounters
from tercet.vllm_plugin.edge import agent_metrics
from tercet.vllm_plugin.edge.liveness_probe import LivenessProbe
from tercet.wire.client import prefill_metrics

HEAD = """# Metrics

What `/metrics` has of Tercet's own. Engines have vLLM's `vllm:*` next to them; a router says what its serving layer
sees as `tercet_served_*`, by vLLM's names. Times are in seconds, sizes in bytes. Histograms have `_bucket`, `_sum` and `_count`, summaries the last two.
"""


BOUNDS = {
    "program": "programs of the plans that operators have set, and each of them with ` -> data_parallel`; a client chooses among them",
    "engine": "members of the fleet: series of those that have left are not shown",
    "to": "as `engine`; a router counts 4,096 pairs of `engine` and `to` by their names, and those beyond as `other`",
    "verb": "`prep_recv`, `extend_recv`, `remote_send`, `start_generate`, `move`",
    "class": "classes of objectives that operators have set, at most 16, and `default`",
    "code": "codes of the error tree, about 30; what a peer says under another code has that of its status",
    "stage": "2",
    "reason": "of moves the first 32 and `other`, of refusals those that the router declares",
    "outcome": "results of a move or of a prefill that Tercet declares",
    "kind": "kinds of routes that Tercet declares",
    "how": "`flipped`, `started`, `stopped`",
    "role": "`prefill`, `decode`",
    "why": "2",
    "what": "2",
    "server": "pooling servers that are configured",
    "router": "routers of a model router, by URL",
    "model": "names that routers list",
    "status": "HTTP statuses",
    "rank": "ranks of the engine",
    "model_name": "of a router and an engine, the names that it serves; of a picker, the first 64 names of at most 256 characters that clients ask for, and `other`",
    "finished_reason": "vLLM's reasons",
    "error_code": "HTTP statuses",
    "decision_type": "2",
    "endpoint": "`first`, `fallback`, `other`",
    "name": "1: the pool",
    "model_server_pod": "members of the pool",
}
"""How many values a label may have, or which: whatever clients send, there are no others."""


class Declaration(NamedTuple):
    """One metric as `/metrics` has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics_page() -> str:
    """The page."""
    return "\n\n".join(
        [
            HEAD.strip(),
            "## Of a router\n\nOf all its processes together, wherever one asks; those whose name begins with "
            "`tercet_engine_` are what the process that answers has heard last of engines that answer.",
            _table(
                [
                    *declared_by(vars(Metrics())),
                    *declared_by(vars(SessionCounters())),
                    *collected(EngineCollector(_fleet()).collect()),
                    *_served(),
                ]
            ),
            "## Of an engine",
            _table(
                [
                    *declared_by(vars(agent_metrics)),
                    *declared_by(vars(prefill_metrics)),
                    *collected(agent_metrics.ProbeCollector(_probe()).collect()),
                ]
            ),
            "## Of an endpoint picker",
            _table(
                [
                    *declared_by(vars(PickerMetrics())),
                    *collected(PoolCollector(_fleet(), "tercet").collect()),
                    *collected(EngineCollector(_fleet()).collect()),
                ]
            ),
            "## Of a sidecar\n\nAt `/sidecar/metrics`; `/metrics` is the engine's.",
            _table(declared_by(vars(prefill_metrics))),
            "## Of a model router",
            _table(declared_by(vars(ModelMetrics()))),
            "## Of a simulated engine\n\nAnd those of a sidecar.",
            _table([*_of_simulated_engines()]),
            "## Of a planner\n\nAt the port `--metrics-port` of `tercet planner`.",
            _table(declared_by(vars(PlannerMetrics()))),
            "## Labels\n\nWhat bounds the number of series, whatever clients send. No label has a text of a client, except "
            "a picker's `model_name`.",
            table(("label", "values"), ((code(name), BOUNDS[name]) for name in sorted(BOUNDS))),
        ]
    )


def _table(found: Iterable[Declaration]) -> str:
    rows = ((code(each.name), each.kind, ", ".join(each.labels), each.meaning) for each in sorted(found))
    return table(("metric", "kind", "labels", ""), rows)


def _served() -> Iterable[Declaration]:
    """What vLLM's serving layer has seen."""
    for name in sorted(KNOWN_HERE):
        kind, end = ("counter", "_total") if name in COUNTED_HERE else ("histogram", "")
        labels = ("model_name", "finished_reason") if name == "request_success" else ("model_name",)
        yield Declaration(f"{SERVED}{name}{end}", kind, labels, f"`{VLLMS}{name}`, as this router's clients see it.")


def declared_by(names: Mapping[str, Any]) -> Iterable[Declaration]:
    """Metrics that are values of some names."""
    for value in names.values():
        if isinstance(value, MetricWrapperBase):
            yield from _declarations(value.describe(), vars(value)["_labelnames"])


def collected(families: Iterable[Metric]) -> Iterable[Declaration]:
    """Metrics that are made when somebody asks."""
    for family in families:
        yield from _declarations([family], tuple(sorted({name for sample in family.samples for name in sample.labels})))


def _declarations(families: Iterable[Metric], labels: tuple[str, ...]) -> Iterable[Declaration]:
    for family in families:
        suffix = "_total" if family.type == "counter" else ""
        yield Declaration(f"{family.name}{suffix}", family.type, labels, family.documentation)


def _of_simulated_engines() -> Iterable[Declaration]:
    for name, (meaning, _) in GAUGES.items():
        yield Declaration(name, "gauge", ("model_name",), meaning)
    for name, meaning in COUNTERS.items():
        yield Declaration(f"tercet_sim_{name}_total", "counter", ("model_name",), meaning)


def _fleet() -> EngineFleet:
    fleet = EngineFleet([Member("engine", "http://engine", "both", cast(Engine, None))])
    fleet.report("engine", EngineLoad(waiting=0, running=0, kv_usage=0.0, tokens=0, step_time=0.0))
    return fleet


class _OneRank:
    """A probe of an engine with one rank that has counted nothing."""

    stalled_s = 0.0
    agent_counters = ({},)


def _probe() -> LivenessProbe:
    return cast(LivenessProbe, _OneRank())
