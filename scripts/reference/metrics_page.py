"""The page of Tercet's metrics, generated from the collectors that declare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from scripts.reference.markdown import code, table

from tercet.engine import agents
from tercet.engine.liveness_probe import LivenessProbe
from tercet.fleet import EngineFleet, Member
from tercet.fleet.engine_fleet import EngineCollector
from tercet.protocol import Engine, EngineLoad
from tercet.router.observe.metrics import (
    COUNTED_HERE,
    KNOWN_HERE,
    SERVED,
    VLLMS,
    HotContextMetrics,
    Metrics,
    SessionMetrics,
    WriteBehindMetrics,
)
from tercet.store import blocks
from tercet.store.disk import DiskIndex
from tercet.store.pool import MemoryPool
from tercet.wire.client import remote_prefill
from tercet_gateway.endpoint_picker import PickerMetrics, PoolCollector
from tercet_gateway.model_router import ModelMetrics
from tercet_lab.sim.sim_server import COUNTERS, GAUGES
from tercet_planner.live_planner import PlannerMetrics

HEAD = """# Metrics

Tercet's metrics at `/metrics`. Engines also have vLLM's `vllm:*`; a router has those of its serving layer as `tercet_served_*`,
with vLLM's names. Times are in seconds, sizes in bytes. Histograms have `_bucket`, `_sum` and `_count`, summaries the last two.
"""


BOUNDS = {
    "program": "programs of the plans that operators have set, and each of them with ` -> data_parallel`; clients choose among them",
    "engine": "members of the fleet; series of engines that have left are not shown",
    "to": "as `engine`; a router counts 4,096 pairs of `engine` and `to` by name, and further pairs as `other`",
    "verb": "`prep_recv`, `extend_recv`, `remote_send`, `start_generate`, `move`",
    "class": "classes of objectives that operators have set, at most 16, and `default`",
    "code": "codes of the error tree, about 30; an unknown code of a peer becomes the code of its HTTP status",
    "stage": "2",
    "reason": "for moves the first 32 reasons and `other`, for refusals the reasons that the router declares",
    "outcome": "results of a move, of a prefill or of a copy that Tercet declares",
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
    "model_name": "for a router and an engine, the names that it serves; for a picker, the first 64 requested names of at most 256 characters that its engines report as their model or adapters, and `other`",
    "finished_reason": "vLLM's reasons",
    "error_code": "HTTP statuses",
    "decision_type": "2",
    "endpoint": "`first`, `fallback`, `other`",
    "medium": "`memory`, `disk`",
    "name": "1: the pool",
    "model_server_pod": "members of the pool",
}
"""The number of values of each label, or the values. Clients cannot cause other values."""


class Declaration(NamedTuple):
    """The declaration of a metric, as at `/metrics`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics_page() -> str:
    """Return the page."""
    return "\n\n".join(
        [
            HEAD.strip(),
            "## Of a router\n\nEach process of a router answers with the sum over all its processes. Metrics whose names begin with "
            "`tercet_engine_` are the last reports of reachable engines to the process that answers.",
            _table(
                [
                    *declared_by(vars(Metrics())),
                    *declared_by(vars(SessionMetrics())),
                    *declared_by(vars(WriteBehindMetrics())),
                    *declared_by(vars(HotContextMetrics())),
                    *collected(EngineCollector(_fleet()).collect()),
                    *_served(),
                ]
            ),
            "## Of an engine",
            _table(
                [
                    *declared_by(vars(agents)),
                    *declared_by(vars(remote_prefill)),
                    *collected(agents.ProbeCollector(_probe()).collect()),
                ]
            ),
            "## Of a store\n\nIn addition to those of an engine's ranks.",
            _table([*declared_by(vars(blocks)), *collected(blocks.StoreCollector(_store()).collect())]),
            "## Of an endpoint picker",
            _table(
                [
                    *declared_by(vars(PickerMetrics(lambda _: False))),
                    *collected(PoolCollector(_fleet(), "tercet").collect()),
                    *collected(EngineCollector(_fleet()).collect()),
                ]
            ),
            "## Of a sidecar\n\nAt `/sidecar/metrics`; `/metrics` has the engine's metrics.",
            _table(declared_by(vars(remote_prefill))),
            "## Of a model router",
            _table(declared_by(vars(ModelMetrics()))),
            "## Of a simulated engine\n\nIn addition to those of a sidecar.",
            _table([*_of_simulated_engines()]),
            "## Of a planner\n\nAt port `--metrics-port` of `tercet planner`.",
            _table(declared_by(vars(PlannerMetrics()))),
            "## Labels\n\nThese limits bound the number of series for any requests of clients. No label has a text from a client.",
            table(("label", "values"), ((code(name), BOUNDS[name]) for name in sorted(BOUNDS))),
        ]
    )


def _table(found: Iterable[Declaration]) -> str:
    rows = ((code(each.name), each.kind, ", ".join(each.labels), each.meaning) for each in sorted(found))
    return table(("metric", "kind", "labels", ""), rows)


def _served() -> Iterable[Declaration]:
    """Yield the metrics of vLLM's serving layer in a router."""
    for name in sorted(KNOWN_HERE):
        kind, end = ("counter", "_total") if name in COUNTED_HERE else ("histogram", "")
        labels = ("model_name", "finished_reason") if name == "request_success" else ("model_name",)
        yield Declaration(
            f"{SERVED}{name}{end}", kind, labels, f"`{VLLMS}{name}`, for the requests of this router's clients."
        )


def declared_by(names: Mapping[str, Any]) -> Iterable[Declaration]:
    """Yield the declarations of the metrics among the values of a mapping."""
    for value in names.values():
        if isinstance(value, MetricWrapperBase):
            yield from _declarations(value.describe(), vars(value)["_labelnames"])


def collected(families: Iterable[Metric]) -> Iterable[Declaration]:
    """Yield the declarations of metrics that a collector creates at each request."""
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
    """The probe of an engine with one rank, whose counters are empty."""

    stalled_s = 0.0
    agent_counters = ({},)


class _EmptyStore:
    """The blocks of a store that holds none."""

    pool, disk = MemoryPool(1), DiskIndex(1)


def _store() -> blocks.StoreBlocks:
    return cast(blocks.StoreBlocks, _EmptyStore())


def _probe() -> LivenessProbe:
    return cast(LivenessProbe, _OneRank())
