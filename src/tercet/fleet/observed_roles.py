"""The view of a fleet that role policies use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tercet.decisions.cost.reported_work import UNKNOWN_CONTEXT
from tercet.decisions.roles import ObservedEngine
from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.members import Member


class PrefillLine(NamedTuple):
    """Prefills of one engine, as routers count them; ``waiting_s`` is the estimated wait of a new request in seconds.

    ``busy_s`` is for how many seconds, since the engine was first seen, prefills ran or waited there.
    """

    waiting_s: float
    busy_s: float


def prefill_line(fleet: EngineFleet, name: str) -> PrefillLine:
    """Return the prefills of this process on the engine ``name``."""
    now, work = fleet.costs.clock(), fleet.costs.work(name)
    return PrefillLine(work.waiting(now), work.busy(now))


def observed_engines(fleet: EngineFleet, lines: Mapping[str, PrefillLine] | None = None) -> list[ObservedEngine]:
    """Return every engine; ``lines`` are the prefills of all processes that share the fleet, None for this process."""
    return [
        _observed(fleet, member, (lines or {}).get(member.name) or prefill_line(fleet, member.name))
        for member in fleet.members
    ]


def _observed(fleet: EngineFleet, member: Member, line: PrefillLine) -> ObservedEngine:
    able = member.reachable and not member.leaving and not member.refused
    last = fleet.knowledge.loads.last(member.name)
    if last is None:
        return ObservedEngine(member.name, member.role, able, line.waiting_s, line.busy_s)
    load = last[0]
    # Sequences whose prompts still wait on other engines have reserved KV here, which no step reads.
    share = load.running / max(load.running, member.in_flight, 1)
    contexts = int(load.kv_usage * member.kv_tokens * share) or load.running * UNKNOWN_CONTEXT
    return ObservedEngine(
        member.name, member.role, able, line.waiting_s, line.busy_s, load.running, load.waiting, contexts,
        load.step_time, load.kv_usage,
    )  # fmt: skip
