"""The pressure of each role: its load as a share of the most that the objectives allow, which is 1."""

from __future__ import annotations

from typing import NamedTuple

from tercet.decisions.roles.observed import Demand, FleetHistory

LINE_AHEAD_S = 5.0
"""Seconds for which the line of prefills is expected to grow as now."""
DECODES_AHEAD_S = 10.0
"""Seconds for which decodes are expected to grow as now: more, since a decode adds load for longer than a prefill."""
WAIT_SHARE = 0.5
"""Share of the TTFT objective that a request may wait in line; the rest is for its prefill."""
STEP_SHARE = 0.9
"""Share of the TPOT objective that a step may take; the rest is for steps that prefill."""
KV_FULL = 0.9
"""Share of the KV cache above which sequences wait for room, or are preempted."""
BUSY_FULL = 0.9
"""Share of their time that prefill engines may be busy: beyond it, chance alone makes requests wait."""


class Pressures(NamedTuple):
    """The pressure of each role, expected some seconds ahead; 1 is the limit."""

    prefill: float
    decode: float

    @property
    def worse(self) -> float:
        """The larger of the two pressures."""
        return max(self)


def prefill_pressure(demand: Demand, engines: int, ttft: float) -> float:
    """Return the pressure of ``engines`` that prefill, with the objective ``ttft`` in seconds; 0 without traffic."""
    waiting = demand.waiting_s + LINE_AHEAD_S * max(0.0, demand.prefill - engines)
    return waiting / engines / (WAIT_SHARE * ttft)


def prefill_load(demand: Demand, engines: int, ttft: float) -> float:
    """Return the pressure if ``engines`` prefilled; at least their busy share, as busy engines make requests wait."""
    return max(prefill_pressure(demand, engines, ttft), demand.prefill / engines / BUSY_FULL)


def decode_pressure(demand: Demand, engines: int, tpot: float, history: FleetHistory) -> float:
    """Return the pressure of ``engines`` that decode, with the objective ``tpot`` in seconds; 0 without traffic."""
    if demand.decodes <= 0 or demand.contexts <= 0:
        return 0.0
    decodes = demand.decodes + DECODES_AHEAD_S * max(0.0, demand.more_decodes)
    contexts = demand.contexts + DECODES_AHEAD_S * max(0.0, demand.more_contexts)
    by_step = history.step_s(decodes / engines, contexts / engines) / (STEP_SHARE * tpot)
    return max(by_step, demand.kv_usage * (contexts / demand.contexts) / engines / KV_FULL)
