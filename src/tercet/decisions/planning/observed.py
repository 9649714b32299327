"""Input and output of a planning policy: the observed fleet and its traffic, the wanted fleet, and reports of plans.

Requests are known by their arrival times, lengths and shared blocks, but not by their text.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from tercet.decisions.roles import ObservedEngine
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives

FEWEST_ENDED = 8
"""Ended answers to prompts of similar length that are needed; with fewer, all ended answers are used."""


@dataclass(frozen=True, order=True)
class FleetPlan:
    """A number of engines for each role; engines of the role ``both`` stay as they are."""

    prefill: int
    decode: int

    @property
    def engines(self) -> int:
        """Number of engines of both roles: each costs the same."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class PlanLimits:
    """Bounds of the number of engines. Raises :class:`~tercet.protocol.BadRequest` if they contradict each other."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if self.fewest < 2:
            raise BadRequest(f"planner-min-engines: is {self.fewest}; give at least 2, one for each role",
                             "planner-min-engines")  # fmt: skip
        if self.most < self.fewest:
            raise BadRequest(f"planner-max-engines: is {self.most}; give at least planner-min-engines, {self.fewest}",
                             "planner-max-engines")  # fmt: skip

    def allow(self, plan: FleetPlan) -> bool:
        """True if a plan has at least one engine of each role, and its number of engines is within the bounds."""
        return plan.prefill >= 1 and plan.decode >= 1 and self.fewest <= plan.engines <= self.most


@dataclass(frozen=True)
class Expected:
    """The expected result of a plan: share of the requests within the objectives, and 99th percentile of TTFT in s.

    ``rate`` is the simulated load in requests per second; ``requests`` is the number of requests that were measured.
    """

    attainment: float
    ttft_p99: float
    rate: float
    requests: int = 1000

    @property
    def chance(self) -> float:
        """Standard deviation of the attainment by chance; at least its value if one request of a hundred is late."""
        late = min(0.5, max(0.01, 1 - self.attainment))
        return math.sqrt(late * (1 - late) / max(1, self.requests))


@dataclass(frozen=True)
class Observed:
    """A fleet at the time ``now``, in seconds of the observer's clock; the observer watches since ``since``.

    ``plan`` counts the engines that serve or start; ``starting`` of them do not serve yet. ``arrivals`` are the
    requests of the last minutes, in order. ``came`` is the share of the requests within the objectives, of those that
    ended since the last look; None if no request ended.
    """

    now: float
    since: float
    plan: FleetPlan
    arrivals: tuple[ObservedRequest, ...]
    engines: tuple[ObservedEngine, ...]
    objectives: Objectives
    limits: PlanLimits
    starting: int = 0
    came: float | None = None


@dataclass(frozen=True)
class WantedPlan:
    """The fleet that a policy wants from now on, the reason in one sentence, and the expected result (None: unknown).

    ``considered`` are the other fleets that were simulated, with their results.
    """

    plan: FleetPlan
    reason: str
    expected: Expected | None = None
    considered: tuple[tuple[FleetPlan, Expected], ...] = field(default=())


Policy: TypeAlias = Callable[[Observed], WantedPlan]
"""A function from the observed fleet to the wanted one; it decides by any method."""


@dataclass(frozen=True)
class ObservedRequest:
    """A request that came ``at`` a time in seconds, of the observer's clock.

    ``output_tokens`` is the number of tokens that its client has so far; ``ended`` is True if the answer is complete.
    ``blocks`` name the prompt's blocks of ``block_size`` tokens, in order: equal names mean equal beginnings. ``met``
    is True if the request met the objectives, None while that is not known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    ended: bool
    blocks: tuple[int, ...] = ()
    block_size: int = 512
    met: bool | None = None


def answers_completed(arrivals: Sequence[ObservedRequest], seed: int = 0) -> list[ObservedRequest]:
    """Return the same requests, each with the full length of its answer; equal seeds give equal lengths.

    The length of an answer that has not ended is drawn from the ended answers to prompts of similar length that are
    longer than it is now. Without such an answer, it is assumed to be half done: the middle of what is possible.
    """
    if all(each.ended for each in arrivals):
        return list(arrivals)
    by_class, everyone = defaultdict[int, list[int]](list), list[int]()
    for each in arrivals:
        if each.ended:
            by_class[_class(each)].append(each.output_tokens)
            everyone.append(each.output_tokens)
    everyone.sort()
    for lengths in by_class.values():
        lengths.sort()
    chance = random.Random(seed)
    return [each if each.ended else _completed(each, by_class.get(_class(each), []), everyone, chance)
            for each in arrivals]  # fmt: skip


def _completed(
    arrival: ObservedRequest, alike: Sequence[int], everyone: Sequence[int], chance: random.Random
) -> ObservedRequest:
    known = alike if len(alike) >= FEWEST_ENDED else everyone
    longer = bisect_left(known, arrival.output_tokens + 1)
    drawn = known[chance.randrange(longer, len(known))] if longer < len(known) else None
    length = max(1, 2 * arrival.output_tokens) if drawn is None else drawn
    return replace(arrival, output_tokens=length, ended=True)


def _class(arrival: ObservedRequest) -> int:
    """Return the class of a prompt's length: prompts of one class differ in length by less than a factor of two."""
    return arrival.prompt_tokens.bit_length()


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
