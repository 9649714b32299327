"""The decision of ``tercet epp``: the engines that serve a request, by the router's plugins and state."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tercet.decisions.scheduling import ConcurrencyLimit, Saturation
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
)
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.hosts import host_and_port
from tercet.protocol.names import sequence_id
from tercet.settings import Limits
from tercet.wire.streams.wire_format import REPORT_SECONDS
from tercet_gateway.openai_call import OpenAICall
from tercet_gateway.picker_config import PickerConfig
from tercet_gateway.picker_metrics import PickerMetrics
from tercet_gateway.rendering import Renderer, Tokens
from tercet_gateway.reported_load import UNTIL_COUNTED, ReportedLoad
from tercet_gateway.room import Room, RoomByConcurrency, RoomByUtilization
from tercet_gateway.split_cost import SplitCost

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
        self._told_priorities = {name: int(priority) for name, priority in config.objectives.items()}
        self.objectives: Mapping[str, int] = self._told_priorities
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
        self.objectives = {**priorities, **self._told_priorities}

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
        self._require_candidates(among)
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
        request = _request(call, prompt, self._adapter_of(call))
        decoding, cached = self._fleet.ranked("decode", request, self._most, names)
        decode = decoding[0]
        may_split = request.prompt and call.may_split and self._fleet.scheduling.splits
        prefilling = self._prefilling(request, decode, cached, names) if may_split else None
        if call.generates:
            self._count(request, decode, cached, prefilling)
        self._metrics.decided(call, request.num_tokens, cached, prefilling is not None, time.perf_counter() - began)
        prefill = "" if prefilling is None else self._address(prefilling)
        return Endpoints([self._address(member) for member in decoding], prefill)

    def _count(self, request: Request, decode: Member, cached: int, prefilling: Member | None) -> None:
        """Count the request at its engines."""
        for member in (decode, prefilling):
            if member is not None:
                self._load.picked(member, request.num_tokens)
        if self._costs is not None and prefilling is None:
            self._costs.picked(decode, request, cached)
        elif self._costs is not None and prefilling is not None:
            self._costs.picked(prefilling, request, 0)

    def _prefilling(
        self, request: Request, decode: Member, cached: int, names: Collection[str] | None
    ) -> Member | None:
        """Return the engine that prefills for ``decode``, which has ``cached`` tokens; None if a split does not pay."""
        costs = self._costs
        rule = costs.rule_for(decode) if costs is not None and costs.knows_enough else None
        try:
            if not self._fleet.splits(request, decode.name, cached, names, rule):
                return None
            (member,), _ = self._fleet.ranked("prefill", request, 1, names, decode.name)
        except (EngineUnreachable, RoleUnavailable, UnknownAdapter):
            return None
        return member if member is not decode else None

    def _adapter_of(self, call: OpenAICall) -> str | None:
        """Return the LoRA adapter that the call names as its model; None if the fleet has no such adapter."""
        return call.body.model if call.body.model in self._fleet.adapters else None

    # ---- candidates ------------------------------------------------------------------------------------------

    def _require_candidates(self, among: Collection[str] | None) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no candidate exists, so that waiting would not help."""
        if among is None:
            self._fleet.health.require_answers()
        else:
            self._named(among)

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
    told = fleet.scheduling.saturation
    if isinstance(told, ConcurrencyLimit):
        return RoomByConcurrency(fleet, told)
    given = Saturation(
        queue_depth_threshold=config.max_waiting_per_engine, kv_cache_util_threshold=config.max_kv_usage
    )  # fmt: skip
    return RoomByUtilization(fleet, load, told or given)


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
