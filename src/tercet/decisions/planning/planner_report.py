"""Plain data: the report that a planner sends to a router, for people to read."""

from __future__ import annotations

import msgspec


class ReportedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plan, made at the Unix time ``at``: the fleet at that time, the wanted fleet (as ``3P3D``), and the reason.

    ``expected`` and ``came`` are shares of the requests within the objectives: expected by the plan, and measured until
    the next plan; None where they are not known. ``ttft_p99`` is the expected 99th percentile of TTFT in seconds.
    ``steps`` are the commands that make the change, empty if the fleet stays; ``proposal`` is a command that a person
    should give, for another program.
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
    """The last plans of one planner, the newest last, ``interval`` seconds apart; ``act`` is its option ``--act``."""

    act: str
    planner: str
    interval: float
    margin: float | None
    plans: tuple[ReportedPlan, ...]
