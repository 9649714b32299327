"""What a planner tells a router of its plans, for people to see: plain data."""

from __future__ import annotations

import msgspec


class ReportedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plan, made at the Unix time ``at``: the fleet as it was, the wanted one, as ``3P3D``, and the reason.

    ``expected`` and ``came`` are shares of the requests within the objectives: what the plan promised, and what was
    seen until the next one; None where that is not known. ``steps`` are the commands that make the change, without any
    if the fleet stays; ``proposal`` is one that a person should give, for another program.
    """

    at: float
    fleet: str
    wanted: str
    reason: str
    expected: float | None = None
    ttft_p99: float | None = None
    came: float | None = None
    steps: tuple[str, ...] = ()
    proposal: str = ""


class PlannerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The last plans of one planner, the newest last, ``interval`` seconds apart; ``act`` is what it may do."""

    act: str
    planner: str
    interval: float
    margin: float | None
    plans: tuple[ReportedPlan, ...]
