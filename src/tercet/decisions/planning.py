"""The number of engines that a fleet needs, by role. Pure: observed traffic in, a wanted fleet and the reason out.

Input and output of a planning policy come first: the observed fleet and its traffic, the wanted fleet, and reports of
plans. Requests are known by their arrival times, lengths and shared blocks, but not by their text. Then what engines
bear, by an estimate: the demand of the traffic, and the few fleets worth a simulation, the promising ones first.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from tercet.protocol import BadRequest, Role
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
    """The expected result of a plan."""

    attainment: float  # share of the requests within the objectives
    ttft_p99: float  # in seconds
    rate: float  # the simulated load in requests per second
    requests: int = 1000  # that were measured

    @property
    def chance(self) -> float:
        """Standard deviation of the attainment by chance; at least its value if one request of a hundred is late."""
        late = min(0.5, max(0.01, 1 - self.attainment))
        return math.sqrt(late * (1 - late) / max(1, self.requests))


@dataclass(frozen=True)
class ObservedEngine:
    """The state of one engine now."""

    name: str
    role: Role
    able: bool = True  # it answers and may be picked
    waiting_s: float = 0.0  # the prefill ahead of a new arrival, in seconds
    busy_s: float = 0.0  # seconds in which prefills ran, since the engine is observed
    running: int = 0  # sequences that it decodes, and those that wait to decode
    queued: int = 0
    contexts: int = 0  # tokens of KV that the running ones read in a step
    step_s: float | None = None  # seconds of a recent step; None: unknown
    kv_usage: float = 0.0  # share of its KV cache in use


@dataclass(frozen=True)
class Observed:
    """A fleet, as a planning policy sees it."""

    now: float  # in seconds of the observer's clock, which watches since ``since``
    since: float
    plan: FleetPlan  # the engines that serve or start
    arrivals: tuple[ObservedRequest, ...]  # of the last minutes, in order
    engines: tuple[ObservedEngine, ...]
    objectives: Objectives
    limits: PlanLimits
    starting: int = 0  # engines of the plan that do not serve yet
    # Share of the requests within the objectives, of those that ended since the last look; None if none ended.
    came: float | None = None
    seen: float = 1.0  # share of all arrivals that this observer sees; the others are expected to be like them
    kv_tokens: int = 0  # size of the smallest KV cache; 0 if unknown


@dataclass(frozen=True)
class WantedPlan:
    """The fleet that a policy wants from now on."""

    plan: FleetPlan
    reason: str  # in one sentence
    expected: Expected | None = None  # None: unknown
    considered: tuple[tuple[FleetPlan, Expected], ...] = ()  # the other fleets that were simulated


Policy: TypeAlias = Callable[[Observed], WantedPlan]
"""A function from the observed fleet to the wanted one; it decides by any method."""


@dataclass(frozen=True)
class ObservedRequest:
    """A request, without its text."""

    at: float  # in seconds of the observer's clock
    prompt_tokens: int
    output_tokens: int  # that its client has so far
    ended: bool  # the answer is complete
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks, in order: equal names mean equal beginnings
    block_size: int = 512
    met: bool | None = None  # whether it met the objectives; None while that is not known


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
            # Long prompts have other answers than short ones (a summary, a chat), so they are drawn apart.
            by_class[_class(each)].append(each.output_tokens)
            everyone.append(each.output_tokens)
    # Answers that have not ended are the long ones: leaving them out, or taking their present length, would make every
    # load look smaller than it is.
    everyone.sort()
    for lengths in by_class.values():
        lengths.sort()
    chance, completed = random.Random(seed), list[ObservedRequest]()
    for each in arrivals:
        if not each.ended:
            alike = by_class.get(_class(each), [])
            known = alike if len(alike) >= FEWEST_ENDED else everyone
            longer = bisect_left(known, each.output_tokens + 1)
            drawn = known[chance.randrange(longer, len(known))] if longer < len(known) else None
            each = replace(each, output_tokens=max(1, 2 * each.output_tokens) if drawn is None else drawn, ended=True)
        completed.append(each)
    return completed


def _class(arrival: ObservedRequest) -> int:
    """Return the class of a prompt's length: prompts of one class differ in length by less than a factor of two."""
    return arrival.prompt_tokens.bit_length()


class ReportedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plan, as routers show it."""

    at: float  # Unix time
    fleet: str  # at that time, as ``3P3D``
    wanted: str
    reason: str
    expected: float | None = None  # share of the requests within the objectives; None where it is not known
    ttft_p99: float | None = None  # expected, in seconds
    came: float | None = None  # the share that was measured until the next plan
    steps: tuple[str, ...] = ()  # the commands that make the change, empty if the fleet stays
    proposal: str = ""  # a command that a person should give, for another program


class PlannerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The last plans of one planner, the newest last, ``interval`` seconds apart; ``act`` is its option ``--act``."""

    act: str
    planner: str
    interval: float
    margin: float | None
    plans: tuple[ReportedPlan, ...]


# ---- what engines bear, by an estimate -------------------------------------------------------------------------------

STEP_SHARE = 0.9
"""Share of the TPOT objective that a step of decodes may take, in the estimate."""
MOST_DECODES = 4096
"""Largest number of sequences for which a step is predicted: the fit knows little about such a batch."""
RELIEF = 0.8
"""Largest load of the busier role after a change, as a share of that before: a smaller gain is not worth a change."""


class EngineCapacity(Protocol):
    """The capacity of one engine, as far as an estimate needs it."""

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds that a prompt of ``tokens`` tokens takes alone."""
        ...

    def decodes(self, context: float, tpot: float) -> int:
        """Return the number of sequences with ``context`` tokens of KV that decode at ``tpot`` s a step; at least 1."""
        ...


@dataclass(frozen=True)
class EngineDemand:
    """The number of engines that a load keeps busy, by role, with fractions."""

    prefill: float
    decode: float

    def share(self, plan: FleetPlan) -> float:
        """Return the load of the busier role of a plan; 1 is the full capacity of its engines."""
        return max(self.prefill / plan.prefill, self.decode / plan.decode)


def longest_step_s(objectives: Objectives) -> float:
    """Return the longest decode step to plan for, in seconds: a share of the objective for TPOT (50 ms without one)."""
    return STEP_SHARE * (objectives.tpot or 0.05)


def most_decodes(step_s: Callable[[int], float], tpot: float, most: int) -> int:
    """Return the most sequences, of at most ``most``, whose step takes at most ``tpot`` seconds; at least 1.

    ``step_s`` returns the seconds of a step of this number of sequences, which are not fewer for more sequences.
    """
    # Bisection needs steps that grow with their number, which the caller promises.
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= tpot:
            low = middle
        else:
            high = middle - 1
    return low


def demand_of(
    sample: Sequence[ObservedRequest], rate: float, engine: EngineCapacity, objectives: Objectives
) -> EngineDemand:
    """Estimate the demand of requests like ``sample`` at ``rate`` per second.

    Prefill: the seconds of prefill that arrive per second. Decode: by Little's law, the number of sequences that run
    equals the number that arrive in the time that one takes at the objective's TPOT; the steps and the KV cache of an
    engine limit the sequences that it holds.
    """
    if not sample or rate <= 0:
        return EngineDemand(0.0, 0.0)
    tpot = longest_step_s(objectives)
    prefill = rate * sum(engine.prefill_s(each.prompt_tokens) for each in sample) / len(sample)
    output = sum(each.output_tokens for each in sample)
    # What a step reads, on average over an answer's steps: its prompt, and half of the answer.
    context = sum((each.prompt_tokens + each.output_tokens / 2) * each.output_tokens for each in sample)
    context /= max(1, output)
    tokens = output / len(sample)
    return EngineDemand(prefill, rate * tokens * tpot / engine.decodes(context, tpot))


class LearnedCapacity:
    """An :class:`EngineCapacity` by what was learned.

    ``prefill_s`` returns the predicted seconds of a prompt of this number of tokens, and ``step_s`` those of a step of
    this number of sequences with this number of tokens of KV in total, which must not be less for more of either.
    ``kv_tokens`` is the size of the KV cache in tokens, 0 if unknown.
    """

    def __init__(
        self, prefill_s: Callable[[int], float], step_s: Callable[[float, float], float], kv_tokens: int = 0
    ) -> None:
        self._prefill_s, self._step_s, self._kv_tokens = prefill_s, step_s, kv_tokens

    def prefill_s(self, tokens: int) -> float:
        return self._prefill_s(tokens)

    def decodes(self, context: float, tpot: float) -> int:
        room = int(self._kv_tokens / max(1.0, context)) if self._kv_tokens else MOST_DECODES
        return most_decodes(lambda number: self._step_s(number, number * context), tpot, min(room, MOST_DECODES))


_RATIO = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


class RoleRatio(NamedTuple):
    """Wanted ratio of prefill engines to decode engines; both numbers are at least 1."""

    prefill: int
    decode: int


def ratio_of(text: str) -> RoleRatio:
    """Return the ratio in a text such as ``1:3``. Raise :class:`~tercet.protocol.BadRequest`."""
    found = _RATIO.fullmatch(text)
    if found is None:
        raise BadRequest(f"pd-ratio: {text!r} is not a ratio such as 1:3, with numbers from 1 to 9999", "pd-ratio")
    return RoleRatio(int(found[1]), int(found[2]))


def split(instances: int, ratio: RoleRatio) -> RoleRatio:
    """Return the prefill and decode engines of a fleet of ``instances``, which are at least 2.

    All instances are used. Of the splits with at least one of each, the one whose ratio is closest has the smallest
    ``|prefill * ratio.decode - decode * ratio.prefill|``; of two equal ones, the one with more decode engines.
    """
    parts = ratio.prefill + ratio.decode
    # Integers only: with floats, equal distances would be decided by rounding errors, differently for 2:4 and 1:2.
    nearest = -((parts - 2 * instances * ratio.prefill) // (2 * parts))  # halves are rounded down
    prefill = min(max(nearest, 1), instances - 1)
    return RoleRatio(prefill, instances - prefill)


def launch_order(instances: int, ratio: RoleRatio) -> list[Role]:
    """Return the roles in the order of starts: the first two differ, and each later start follows the rule.

    If the machine has no space for all engines, the rule splits the number that has started.
    """
    sizes = [1, *(split(size, ratio).prefill for size in range(2, instances + 1))]
    more: list[Role] = ["prefill" if now > before else "decode" for before, now in pairwise(sizes)]
    return ["prefill", *more]


def best_split(engines: int, demand: EngineDemand) -> FleetPlan:
    """Return the split of ``engines`` engines whose busier role is least busy; it is near the demand's proportion."""
    return min(
        (FleetPlan(prefill, engines - prefill) for prefill in range(1, engines)),
        key=lambda plan: (demand.share(plan), abs(plan.prefill - plan.decode)),
    )
