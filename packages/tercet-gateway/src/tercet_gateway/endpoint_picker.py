"""The decision of ``tercet epp``: the engines that serve a request, by the router's plugins and state.

A picker does not see answers end. So an engine's load is what the engine reports, plus the picks of the last moments,
which its reports may lack: several pickers that share nothing see each other's requests in the reports. While no engine
has room for another request, requests wait for a slot; the room is computed from each engine's queue and KV cache, or
from the work of all engines together, as in llm-d's ``utilization-detector`` and ``concurrency-detector``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.decisions.cost.costs import RouteCandidate, RouteRequest, Targets, max_tokens_of, pair_pays
from tercet.decisions.cost.engine_work import CostModel, ReportedWork
from tercet.decisions.scheduling import ConcurrencyLimit, Engines, Saturation
from tercet.fleet import EngineFleet, Member
from tercet.fleet.admission import Gate
from tercet.protocol import (
    EngineLoad,
    EngineUnreachable,
    Request,
    RoleUnavailable,
    Saturated,
    TercetError,
    UnknownAdapter,
    UnknownEngine,
)
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.names import host_and_port, sequence_id
from tercet.settings import Limits
from tercet.wire import SECONDS
from tercet.wire.streams.wire_format import REPORT_SECONDS
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.openai_call import OpenAICall, Renderer, Tokens

DECISION_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)
SIZES = (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 131072, 262144)
RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MOST_MODELS, LONGEST_MODEL = 64, 256
"""Most model names with own labels in addition to those that engines report, and most characters of a name."""
OTHER_MODELS = "other"
"""The label of all other models: clients choose the names in requests."""


@dataclass(frozen=True)
class _OfModel:
    """The counters of one model's requests; ``whole`` and ``split`` count the decisions for them."""

    requests: Counter
    sizes: Histogram
    tokens: Histogram
    whole: Counter
    split: Counter


class PickerMetrics:
    """The counters of decisions; ``registry`` is shown at ``/metrics``. Times are in seconds.

    ``serves`` returns True for the name of a model that the fleet serves.
    """

    def __init__(self, serves: Callable[[str], bool], registry: CollectorRegistry | None = None) -> None:
        self._serves = serves
        self.registry = own = CollectorRegistry() if registry is None else registry
        model = ["model_name"]
        self._models: dict[str, _OfModel] = {}
        self._requests = Counter("inference_objective_request", "Requests that got endpoints.", model, registry=own)
        self._errors = Counter(
            "inference_objective_request_error", "Requests that were refused, by HTTP status.", ["error_code"],
            registry=own,
        )  # fmt: skip
        self._sizes = Histogram(
            "inference_objective_request_sizes", "Bytes of requests' bodies.", model, buckets=SIZES, registry=own
        )
        self._tokens = Histogram(
            "inference_objective_input_tokens", "Tokens of prompts, or an estimate.", model, buckets=TOKENS,
            registry=own,
        )  # fmt: skip
        self._decision = Histogram(
            "inference_extension_scheduler_e2e_duration_seconds", "Seconds from a whole request to its endpoints.",
            buckets=DECISION_SECONDS, registry=own,
        )  # fmt: skip
        self._hits = Histogram(
            "inference_extension_prefix_indexer_hit_ratio", "Estimated share of the prompt on the decode engine.",
            buckets=RATIOS, registry=own,
        )  # fmt: skip
        self._disaggregated = Counter(
            "llm_d_inference_scheduler_disagg_decision", "Decisions by kind.", ["model_name", "decision_type"],
            registry=own,
        )  # fmt: skip
        self.refused = Counter("tercet_requests_refused", "Requests that were not admitted.", ["reason"], registry=own)
        self.waited = Histogram(
            "inference_extension_flow_control_request_queue_duration_seconds", "Seconds that waiting requests waited.",
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self._queued = Gauge(
            "inference_extension_flow_control_queue_size", "Requests that wait for room.", registry=own
        )
        self._served = Counter(
            "tercet_picker_served", "Answers that began, by the endpoint that served them.", ["endpoint"],
            registry=own,
        )  # fmt: skip
        self.streams = Gauge("tercet_picker_streams", "Requests that Envoy shows now.", registry=own)

    def decided(self, call: OpenAICall, tokens: int, cached: int, split: bool, seconds: float) -> None:
        """Count a request that has its endpoints."""
        counted = self._counted_as(call.body.model or "")
        counted.requests.inc()
        self._decision.observe(seconds)
        if call.size:
            counted.sizes.observe(call.size)
        if tokens:
            counted.tokens.observe(tokens)
            self._hits.observe(min(1.0, cached / tokens))
            (counted.split if split else counted.whole).inc()

    def failed(self, status: int) -> None:
        """Count a refused request, by HTTP status."""
        self._errors.labels(str(status)).inc()

    def served(self, place: int | None) -> None:
        """Count an answer that began: from the endpoint at index ``place`` of the list, or from another one."""
        self._served.labels("other" if place is None else "first" if place == 0 else "fallback").inc()

    def admission(self, in_flight: int, queued: int) -> None:
        """Set the number of waiting requests."""
        self._queued.set(queued)

    def _counted_as(self, model: str) -> _OfModel:
        """Return a model's counters, from a cache: looking them up costs more than counting."""
        if (found := self._models.get(model)) is not None:
            return found
        # An engine reports one of its names, and clients may use its others: these share places with invented names.
        has_own = len(model) <= LONGEST_MODEL and (self._serves(model) or len(self._models) < MOST_MODELS)
        name = model if has_own else OTHER_MODELS
        if name not in self._models:
            kinds = self._disaggregated
            self._models[name] = _OfModel(
                self._requests.labels(name),
                self._sizes.labels(name),
                self._tokens.labels(name),
                kinds.labels(name, "decode-only"),
                kinds.labels(name, "prefill-decode"),
            )
        return self._models[name]


class PoolCollector(Collector):
    """A collector of engines' reports, averaged over the pool ``name``; it collects when metrics are read."""

    def __init__(self, fleet: EngineFleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    def collect(self) -> Iterable[Metric]:
        able = [member for member in self._fleet.members if not member.leaving and not member.is_store]
        ready = [member for member in able if member.reachable]
        last = {member.name: self._fleet.knowledge.loads.last(member.name) for member in ready}
        loads = {name: found[0] for name, found in last.items() if found is not None}
        many = max(1, len(loads))
        averages = {
            "inference_pool_ready_pods": ("Engines that may be picked.", float(len(ready))),
            "inference_pool_average_queue_size": (
                "Requests that wait, per engine.", sum(load.waiting for load in loads.values()) / many,
            ),
            "inference_pool_average_running_requests": (
                "Requests that run, per engine.", sum(load.running for load in loads.values()) / many,
            ),
            "inference_pool_average_kv_cache_utilization": (
                "Share of the KV cache in use, per engine.", sum(load.kv_usage for load in loads.values()) / many,
            ),
        }  # fmt: skip
        for metric, (meaning, value) in averages.items():
            gauge = GaugeMetricFamily(metric, meaning, labels=["name"])
            gauge.add_metric([self._name], value)
            yield gauge
        queues = GaugeMetricFamily(
            "inference_pool_per_pod_queue_size", "Requests that wait.", labels=["name", "model_server_pod"]
        )
        for name, load in loads.items():
            queues.add_metric([self._name, name], load.waiting)
        yield queues

    def describe(self) -> Iterable[Metric]:
        """Describe no metrics: the registry need not collect at registration."""
        return ()


ENOUGH_PREFILLS = 8
"""Number of prefills that must have been timed before costs decide."""
LEAST_GAIN = 0.1
"""Share of the cost that a split must save: reports do not show the cost of transfers."""


class SplitCost:
    """One cost model for the fleet, and the work of each engine, by its reports. ``clock`` is in seconds."""

    def __init__(self, fleet: EngineFleet, clock: Callable[[], float]) -> None:
        self.model = CostModel()
        self.learned = 0
        self._fleet = fleet
        self._clock = clock
        self._works: dict[str, tuple[Member, ReportedWork]] = {}

    def reported(self, name: str, load: EngineLoad) -> None:
        try:
            work = self._work(self._fleet.member(name))
        except UnknownEngine:  # the engine has just left
            return
        before = work.learned
        work.reported(load)
        self.learned += work.learned - before

    def picked(self, member: Member, request: Request, cached: int) -> None:
        """Record that an engine will prefill a prompt, of which it has an estimated ``cached`` tokens."""
        self._work(member).picked(request.num_tokens, cached)

    def pays(self, request: Request, prefill: str, decode: Member, cached: int) -> bool:
        """True if the engine ``prefill`` should prefill for ``decode``, which has ``cached`` tokens."""
        wanted = RouteRequest(request.num_tokens, self.model.output_of(max_tokens_of(request)), Targets())
        there, here = self._candidate(self._fleet.member(prefill), 0), self._candidate(decode, cached)
        return pair_pays(there, here, wanted, LEAST_GAIN)

    def _candidate(self, member: Member, matched: int) -> RouteCandidate:
        return RouteCandidate(member.name, self._work(member), self.model, self._clock(), matched)

    def _work(self, member: Member) -> ReportedWork:
        known, work = self._works.get(member.name, (None, None))
        if work is None or known is not member:
            work = ReportedWork(self.model, self._clock, lambda: member.kv_tokens)
            self._works[member.name] = member, work
            # When an engine joins, drop those that left: each new pod has a new name.
            here = {id(each) for each in self._fleet.members}
            self._works = {name: found for name, found in self._works.items() if id(found[0]) in here}
            self.model.arrivals.engines = len(self._works)
        return work


@dataclass(frozen=True)
class SplitRule:
    """A :class:`~tercet.protocol.PrefillRule`: split if it pays with the engine that has the least prefilling to do."""

    costs: SplitCost
    decode: Member

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """True if a split pays: see :class:`~tercet.decisions.scheduling.Decider`."""
        idlest = prefill[int(np.nan_to_num(prefill.tokens).argmin())]
        return self.costs.pays(request, idlest.name, self.decode, cached)


ENOUGH_ROOM = 8
"""Most requests that hold a slot at a time; a slot is given back as soon as the pick is made."""


class Room(Protocol):
    """Room for further requests."""

    def left(self) -> int:
        """Return the number of further requests; any positive number means room, and without engines it is large."""
        ...

    def may_have_come(self, name: str) -> bool:
        """True if there may be room now, after a report of this engine."""
        ...


@dataclass(frozen=True)
class RoomByUtilization:
    """Room by utilization: each decode engine has room while it is below the thresholds of ``limit``."""

    fleet: EngineFleet
    load: ReportedLoad
    limit: Saturation

    def left(self) -> int:
        """Return the number of further requests, up to a number that is enough for all slots."""
        room, nobody = 0, True
        for member in self.fleet.open:
            if member.reachable and member.role != "prefill":
                nobody = False
                room += self._on(member.name)
                if room >= ENOUGH_ROOM:
                    return room
        # without an engine, the pick raises the error, or picks an engine of another role
        return UNKNOWN_ROOM if nobody else room

    def may_have_come(self, name: str) -> bool:
        return self._on(name) > 0

    def _on(self, name: str) -> int:
        return self.load.room(name, self.limit.queue_depth_threshold, self.limit.kv_cache_util_threshold)


@dataclass(frozen=True)
class RoomByConcurrency:
    """Room by concurrency: the engines that answer have room together, by the work that ``limit`` allows for each."""

    fleet: EngineFleet
    limit: ConcurrencyLimit

    def left(self) -> int:
        able = [member for member in self.fleet.open if member.reachable]
        if not able:
            return UNKNOWN_ROOM  # without an engine, the pick raises the error
        limit = self.limit
        if limit.concurrency_mode == "requests":
            return max(0, len(able) * limit.max_concurrency - sum(member.in_flight for member in able))
        if limit.concurrency_mode == "tokens":
            used = sum(member.in_flight_tokens for member in able) / (len(able) * limit.max_token_concurrency)
        else:  # for each engine the larger of both shares counts
            used = sum(
                max(member.in_flight / limit.max_concurrency, member.in_flight_tokens / limit.max_token_concurrency)
                for member in able
            ) / len(able)  # fmt: skip
        return ENOUGH_ROOM if used < 1 else 0  # the length of the next requests is unknown

    def may_have_come(self, name: str) -> bool:
        return True


UNTIL_COUNTED = 0.3
"""Seconds from a pick until the engine's reports include it: way through Envoy, queue, and report interval."""

UNKNOWN_ROOM = 2**31
"""The room of an engine without a report."""


@dataclass
class _Recent:
    """The recent picks of one engine that its reports may lack, with times and prompt tokens; and its last report."""

    picks: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    requests: int = 0
    tokens: int = 0
    waiting: int | None = None
    kv_usage: float = 0.0


class ReportedLoad:
    """The counts of the fleet's members: ``in_flight`` is the number that an engine reports plus recent picks.

    Several pickers that share nothing thereby see each other's requests in the engines' reports. ``on_news`` is called
    with an engine's name and report after each report. ``until_counted`` is the number of seconds from a pick until
    reports include it.
    """

    def __init__(self, fleet: EngineFleet, clock: Callable[[], float], until_counted: float = UNTIL_COUNTED) -> None:
        self._fleet = fleet
        self._clock = clock
        self._until_counted = until_counted
        self.on_news: Callable[[str, EngineLoad], object] = lambda engine, load: None
        self._recent: dict[str, _Recent] = {}
        fleet.on_report = self.reported

    def picked(self, member: Member, tokens: int) -> None:
        """Record that a request with ``tokens`` of prompt was sent to the engine."""
        recent = self._recent_of(member.name)
        recent.picks.append((self._clock(), tokens))
        self._count(member, recent)

    def reported(self, name: str, load: EngineLoad) -> None:
        try:
            member = self._fleet.member(name)
        except UnknownEngine:  # the engine has just left
            self._recent.pop(name, None)
            return
        recent = self._recent_of(name)
        recent.requests, recent.tokens = load.waiting + load.running, load.tokens or 0
        recent.waiting, recent.kv_usage = load.waiting, load.kv_usage
        self._count(member, recent)
        self.on_news(name, load)

    def _recent_of(self, name: str) -> _Recent:
        found = self._recent.get(name)
        if found is None:  # when an engine joins, drop the data of those that left
            here = {member.name for member in self._fleet.members}
            self._recent = {known: recent for known, recent in self._recent.items() if known in here}
            found = self._recent[name] = _Recent()
        return found

    def _count(self, member: Member, recent: _Recent) -> None:
        picks, oldest = recent.picks, self._clock() - self._until_counted
        while picks and picks[0][0] < oldest:
            picks.popleft()
        requests, tokens = recent.requests + len(picks), recent.tokens + sum(tokens for _, tokens in picks)
        if (requests, tokens) != (member.in_flight, member.in_flight_tokens):  # most reports change nothing
            member.in_flight, member.in_flight_tokens = requests, tokens

    def room(self, name: str, max_waiting: int, max_kv_usage: float) -> int:
        """Return how many more requests may wait on an engine; 0 while its KV cache is used above the limit."""
        recent = self._recent.get(name)
        if recent is None or recent.waiting is None:
            return UNKNOWN_ROOM
        return 0 if recent.kv_usage > max_kv_usage else max(0, max_waiting - recent.waiting - len(recent.picks))


_numbers = itertools.count(1)


@dataclass(frozen=True)
class Endpoints:
    """The destination: ``decode`` addresses (``host:port``) in the order to try them, and a prefill engine or empty."""

    decode: Sequence[str]
    prefill: str = ""


class EndpointPicker:
    """The picker of one fleet. ``objectives`` are priorities by name; ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        fleet: EngineFleet,
        renderer: Renderer,
        metrics: PickerMetrics,
        config: PickerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._renderer = renderer
        self._metrics = metrics
        self._most = 1 + config.fallbacks
        self._configured_objectives = {name: int(priority) for name, priority in config.objectives.items()}
        self.objectives: Mapping[str, int] = self._configured_objectives
        pace = config.metrics_interval_s if config.load_from == "metrics" else REPORT_SECONDS
        self._load = ReportedLoad(fleet, clock, UNTIL_COUNTED - REPORT_SECONDS + pace)
        limits = Limits(queued=config.max_queued, queue_timeout_s=config.queue_timeout_s)
        self._room = room_of(fleet, self._load, config)
        self._gate = Gate(limits, fleet, metrics, clock, self._room.left)
        self._load.on_news = self._heard
        self._costs = SplitCost(fleet, clock) if config.split_by == "cost" else None
        self._addresses: dict[str, str] = {}

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """Set the priorities of objectives; those in the configuration keep theirs."""
        self.objectives = {**priorities, **self._configured_objectives}

    def close(self, error: TercetError) -> None:
        """Refuse waiting requests with ``error``."""
        self._gate.close(error)

    async def pick(self, call: OpenAICall, among: Collection[str] | None = None) -> Endpoints:
        """Pick the endpoints of a call; ``among`` are the addresses that may be picked, None for all.

        Waits while no engine has room. Raises :class:`~tercet.protocol.EngineUnreachable` or
        :class:`~tercet.protocol.RoleUnavailable` if no engine can serve the call, :class:`~tercet.protocol.Saturated`
        if the fleet is at its limits.
        """
        if not call.generates:
            return self._choose(call, (), among)
        priority, sheddable = self._priority(call)
        if among is None:
            self._fleet.health.require_answers()
        else:
            self._named(among)  # without a candidate, waiting would not help
        if sheddable and self._gate.saturated:
            self._metrics.refused.labels("shed").inc()
            raise Saturated("the fleet is saturated, and this request may be dropped")
        began = time.perf_counter()
        prompt = await self._renderer.tokens(call)
        rendering = time.perf_counter() - began
        left = asyncio.get_running_loop().create_future
        flow = call.fairness_id(self._fleet.scheduling.fairness_headers)
        async with self._gate.slot(priority, left, flow):
            return self._choose(call, prompt, among, rendering)

    def _priority(self, call: OpenAICall) -> tuple[int, bool]:
        """Return the priority (lower is admitted first), and whether the request is dropped instead of waiting."""
        objective = call.objective
        importance = self.objectives.get(objective, 0) if objective is not None else 0
        return call.body.priority - importance, importance < 0

    # ---- deciding --------------------------------------------------------------------------------------------

    def _choose(
        self, call: OpenAICall, prompt: Tokens, among: Collection[str] | None, rendering: float = 0.0
    ) -> Endpoints:
        """Pick now; making the ``prompt`` took ``rendering`` seconds."""
        began = time.perf_counter() - rendering
        names = self._named(among)
        request = _request(call, prompt, call.body.model if call.body.model in self._fleet.adapters else None)
        decoding, cached = self._fleet.picking.ranked("decode", request, self._most, names)
        decode = decoding[0]
        may_split = request.prompt and call.may_split and self._fleet.scheduling.splits
        prefilling = self._prefilling(request, decode, cached, names) if may_split else None
        if call.generates:
            self._count(request, decode, cached, prefilling)
        self._metrics.decided(call, request.num_tokens, cached, prefilling is not None, time.perf_counter() - began)
        prefill = "" if prefilling is None else self._address(prefilling)
        return Endpoints([self._address(member) for member in decoding], prefill)

    def _count(self, request: Request, decode: Member, cached: int, prefilling: Member | None) -> None:
        self._load.picked(decode, request.num_tokens)
        if prefilling is not None:
            self._load.picked(prefilling, request.num_tokens)
        if self._costs is not None:
            self._costs.picked(prefilling or decode, request, 0 if prefilling else cached)

    def _prefilling(
        self, request: Request, decode: Member, cached: int, names: Collection[str] | None
    ) -> Member | None:
        """Return the engine that prefills for ``decode``, which has ``cached`` tokens; None if a split does not pay."""
        costs = self._costs
        rule = SplitRule(costs, decode) if costs is not None and costs.learned >= ENOUGH_PREFILLS else None
        try:
            if not self._fleet.picking.disaggregates(request, decode.name, rule, cached, names):
                return None
            (member,), _ = self._fleet.picking.ranked("prefill", request, 1, names, decode.name)
        except (EngineUnreachable, RoleUnavailable, UnknownAdapter):
            return None
        return member if member is not decode else None

    # ---- candidates ------------------------------------------------------------------------------------------

    def _named(self, among: Collection[str] | None) -> Collection[str] | None:
        if among is None:
            return None
        wanted = frozenset(among)
        names = {member.name for member in self._fleet.members if _is_named(self._address(member), wanted)}
        if not names:
            raise EngineUnreachable("no endpoint that is allowed for this request is an engine of this fleet")
        return names

    def _address(self, member: Member) -> str:
        address = self._addresses.get(member.url)
        if address is None:
            address = self._addresses[member.url] = address_of(member.url)
        return address

    def _heard(self, name: str, load: EngineLoad) -> None:
        """Admit waiting requests if an engine that has reported has room."""
        if self._costs is not None:
            self._costs.reported(name, load)
        if self._room.may_have_come(name):
            self._gate.look()


def room_of(fleet: EngineFleet, load: ReportedLoad, config: PickerConfig) -> Room:
    """Return the room by the limits of the scheduling file; without them, by the configuration's limits."""
    limits = fleet.scheduling.saturation
    if isinstance(limits, ConcurrencyLimit):
        return RoomByConcurrency(fleet, limits)
    given = Saturation(
        queue_depth_threshold=config.max_waiting_per_engine, kv_cache_util_threshold=config.max_kv_usage
    )  # fmt: skip
    return RoomByUtilization(fleet, load, limits or given)


def _request(call: OpenAICall, prompt: Tokens, adapter: str | None) -> Request:
    body, limit = call.body, call.max_tokens
    return Request(
        seq_id=sequence_id(call.headers.get(REQUEST_ID_HEADER) or f"pick-{next(_numbers)}"),
        prompt=prompt,
        sampling_params={} if limit is None else {"max_tokens": limit},
        priority=body.priority,
        cache_salt=body.cache_salt,
        headers=call.headers,
        user=body.user,
        adapter=adapter,
    )


def address_of(url: str) -> str:
    """Return ``host:port`` of an engine's URL, the form of Envoy's endpoints."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return host_and_port(host, port)


def _is_named(address: str, among: Collection[str]) -> bool:
    """True if ``address`` is in ``among``; an entry without a port stands for all ports of its host."""
    if address in among:
        return True
    host = address.rpartition(":")[0]
    return host in among or host.strip("[]") in among
