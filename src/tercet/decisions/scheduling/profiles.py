"""Profiles pick one engine, deciders choose disaggregation, handlers assign both to roles.

A picker chooses among a profile's scored engines, or, in plain picks without a profile, by turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tercet.decisions.scheduling.plugin import Decider, Decision, Engines, Filter, Floats, Picker, Plugin, Scorer
from tercet.protocol import BadRequest, EngineUnreachable, Request, Role

TurnPicker = Callable[[Engines, int], int]
"""Function that returns the index of one of these engines; the number is the count of earlier picks among them."""
SCHEDULED = "scheduled"
"""Value of ``by`` in a pick: the profile that the handler has for the role."""


class MaxScorePicker(Picker, frozen=True):
    """Picker of the engine with the highest score; among equals, one at random."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        best = (scores == scores[scores.argmax()]).nonzero()[0]
        return int(best[decision.random.randrange(len(best))])


class RandomPicker(Picker, frozen=True):
    """Picker of a random engine; scores do not count."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        return decision.random.randrange(len(engines))


class WeightedRandomPicker(Picker, frozen=True):
    """Picker of an engine with a probability in proportion to its score; of any if all scores are 0."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        sums = np.cumsum(scores)
        if not sums[-1]:
            return decision.random.randrange(len(engines))
        # "right": an engine with score 0 adds nothing to the sums and is never found. Rounding may reach the end.
        found = int(sums.searchsorted(decision.random.random() * float(sums[-1]), side="right"))
        return min(found, int(np.flatnonzero(scores)[-1]))


class PowerOfTwoPicker(Picker, frozen=True):
    """Picker of the higher score among two random engines; if the scores are equal, of the one with fewer sequences.

    Many routers with the same, slightly old, reports do not all pick the same engine.
    """

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        two = decision.random.sample(range(len(engines)), min(2, len(engines)))
        return max(two, key=lambda place: (scores[place], -engines.in_flight[place]))


def least_loaded(candidates: Engines, turn: int) -> int:
    """Return the index of the candidate with the fewest sequences in flight; among equals, the next in turn."""
    equals = np.flatnonzero(candidates.in_flight == candidates.in_flight.min())
    return int(equals[turn % len(equals)])


def least_work(candidates: Engines, waiting: Sequence[float], turn: int) -> int:
    """Return the index of the candidate with the least work ahead; among equals, the next in turn.

    ``waiting`` are the seconds of prefill that are predicted to be in line on each. A sequence on the way there, or in
    its decode, counts as :data:`SECONDS_OF_A_SEQUENCE`: the line has a prompt only once its KV was pulled.
    """
    work = np.asarray(waiting) + SECONDS_OF_A_SEQUENCE * candidates.in_flight
    equals = np.flatnonzero(work == work.min())
    return int(equals[turn % len(equals)])


LEAST_WORK, SECONDS_OF_A_SEQUENCE = "least_work", 0.05
PICKERS: Mapping[str, TurnPicker] = {"round_robin": lambda those, turn: turn % len(those), "least_loaded": least_loaded}
PICKER_NAMES = frozenset({*PICKERS, LEAST_WORK})


class AlwaysDisaggregate(Decider, frozen=True):
    """Decider by which another engine prefills every request."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        return True


class PrefixBasedDecider(Decider, frozen=True):
    """Decider by which another engine prefills if the decode engine lacks ``non_cached_tokens``; with 0 never.

    Prompts shorter than ``prompt_tokens`` stay on one engine, even if no token is cached.
    """

    non_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        if not self.non_cached_tokens:  # as in llm-d, where 0 switches it off
            return False
        return request.num_tokens >= self.prompt_tokens and request.num_tokens - cached >= self.non_cached_tokens


class LoadBasedDecider(Decider, frozen=True):
    """Decider by which another engine prefills if many tokens are missing, unless every prefill engine has a queue.

    The prompt must have ``prompt_tokens``, of which the decode engine lacks at least ``non_cached_tokens``; 0 means no
    limit. A queue is more than ``max_waiting`` waiting requests; an engine without a recent report counts as one
    without a queue.
    """

    non_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    max_waiting: Annotated[int, Meta(ge=0)] = 5

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        if request.num_tokens < self.prompt_tokens or request.num_tokens - cached < self.non_cached_tokens:
            return False
        return not (prefill.waiting > self.max_waiting).all()


def _highest(scores: Floats, most: int) -> list[int]:
    """Return the indices of the ``most`` highest scores, in descending order."""
    if len(scores) <= 2 * most:
        return (-scores).argsort(kind="stable")[:most].tolist()
    falling = -scores
    some = falling.argpartition(most)[:most]
    some.sort()
    return some[falling[some].argsort(kind="stable")].tolist()


@dataclass(frozen=True)
class SchedulingProfile:
    """A way to pick an engine for one purpose; filters and scorers (with weights) run in the given order."""

    name: str
    filters: Sequence[Filter]
    scorers: Sequence[tuple[Scorer, float]]
    picker: Picker

    @cached_property
    def _weights(self) -> Floats:
        return np.array([[weight] for _, weight in self.scorers], dtype=np.float64)

    def pick(self, decision: Decision, engines: Engines) -> int:
        """Return the row of the engine to pick; ``engines`` is never empty.

        Raises :class:`~tercet.protocol.EngineUnreachable` if a strict filter leaves none.
        """
        return self.ranked(decision, engines, 1)[0]

    def ranked(self, decision: Decision, engines: Engines, most: int) -> list[int]:
        """Return the row of the engine to pick, then those to try next, by scores; at most ``most`` rows."""
        left = engines
        # A filter that would leave nothing is passed over, since a pick must not fail for a preference; a strict one is
        # not a preference.
        for plugin in self.filters:
            kept = left.kept_by(plugin, decision)
            if len(kept):
                left = kept
            elif plugin.strict:
                leaves_out = f"{type(plugin).__name__} leaves out all {len(left)}"
                raise EngineUnreachable(f"the profile {self.name!r} finds no engine: {leaves_out}")
        scores = self._scores(decision, left)
        first = self.picker.pick(decision, left, scores)
        rows = [int(left.rows[first])]
        # All plugins learn of the pick, also those that another one overruled: a history of routed prompts must know
        # where each prompt went.
        for plugin in (*self.filters, *(scorer for scorer, _ in self.scorers), self.picker):
            plugin.picked(decision, rows[0])
        if most > 1:
            others = [place for place in _highest(scores, most) if place != first]
            rows += [int(left.rows[place]) for place in others[: most - 1]]
        return rows

    def explained(self, decision: Decision, picked: int, most: int) -> tuple[dict[str, float], dict[str, float], int]:
        """Return the reasons for the pick of the engine in row ``picked``.

        They are the totals of the ``most`` best engines, in falling order, the score that each scorer gave the picked
        one, and the number of compared engines.
        """
        if decision.scored is None:
            return {}, {}, 0
        engines, scores = decision.scored
        totals = np.add.reduce(scores, axis=0)
        place = int((engines.rows == picked).argmax())
        best = {engines[each].name: round(float(totals[each]), 4) for each in _highest(totals, most)}
        parts = {
            type(scorer).__name__: round(float(given), 4)
            for (scorer, _), given in zip(self.scorers, scores[:, place].tolist(), strict=True)
        }
        return best, parts, len(engines)

    def _scores(self, decision: Decision, engines: Engines) -> Floats:
        if not self.scorers:
            return np.zeros(len(engines))
        scores = np.empty((len(self.scorers), len(engines)))
        for place, (scorer, _) in enumerate(self.scorers):
            given = np.asarray(scorer.score(decision, engines), dtype=np.float64)
            if given.shape != scores.shape[1:]:
                kind = type(scorer).__name__
                raise ValueError(f"{kind} gave scores of shape {given.shape} for {len(engines)} engines")
            scores[place] = given
        np.fmin(np.fmax(scores, 0.0, out=scores), 1.0, out=scores)  # these two keep NaN
        scores *= self._weights
        decision.scored = engines, scores
        return np.add.reduce(scores, axis=0)


class Saturation(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Thresholds of waiting requests and of the used share of the KV cache above which an engine has no space."""

    queue_depth_threshold: Annotated[int, Meta(ge=1)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8


class ConcurrencyLimit(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Maximum number of requests, or of prompt tokens, per engine; all engines together count as full above it.

    With ``hybrid`` each engine counts by the scarcer of both.
    """

    max_concurrency: Annotated[int, Meta(ge=1)] = 100
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_token_concurrency: Annotated[int, Meta(ge=1)] = 1_000_000


@dataclass(frozen=True)
class Scheduling:
    """The rules by which a fleet picks engines."""

    profiles: Mapping[str, SchedulingProfile] = field(default_factory=dict[str, SchedulingProfile])
    by_role: Mapping[Role, str] = field(default_factory=dict[Role, str])  # the profile of each role
    deciders: Mapping[str, Decider] = field(default_factory=dict[str, Decider])
    decider: Decider = field(default_factory=AlwaysDisaggregate)  # whether a second engine prefills
    files: Sequence[Path] = ()  # the scheduling file and those of the user's plugins
    saturation: Saturation | ConcurrencyLimit | None = None  # the limits of an engine's space
    fairness_headers: Sequence[str] = ()  # the first that a request has names its flow, if it has no fairness id

    def profile(self, by: str, role: Role) -> SchedulingProfile | None:
        """Return the profile ``by``, or that of the role if ``by`` is ``scheduled``; None if it does not exist."""
        return self.profiles.get(self.by_role.get(role, "") if by == SCHEDULED else by)

    @property
    def splits(self) -> bool:
        return self.by_role.get("prefill", "") not in ("", self.by_role.get("decode"))

    def decider_called(self, name: str | None) -> Decider:
        """Return the decider ``name``, or the handler's if that is None. Raise :class:`~tercet.protocol.BadRequest`."""
        if name is None:
            return self.decider
        found = self.deciders.get(name)
        if found is None:
            known = ", ".join(self.deciders) or "none"
            raise BadRequest(f"by: there is no decider {name!r}; the scheduling file has {known}", "by")
        return found


class Handler(Plugin, frozen=True):
    """Base of handlers, which assign the profiles of a file to roles."""

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Scheduling:
        """Return the rules; ``at`` is the handler's place in the file. Raise :class:`~tercet.protocol.BadRequest`."""
        raise NotImplementedError(f"{type(self).__name__} has no assign()")


class SingleProfileHandler(Handler, frozen=True):
    """Handler that assigns one profile to every role."""

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Scheduling:
        if len(profiles) != 1:
            why = f"a single-profile-handler needs one profile, but there are {len(profiles)}"
            raise BadRequest(f"schedulingProfiles: {why}", "schedulingProfiles")
        return of_one_profile(profiles, deciders)


class DeciderNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of decider plugins; ``prefill`` decides about disaggregation."""

    prefill: str | None = None


class ProfileNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the profile for each role."""

    prefill: str = "prefill"
    decode: str = "decode"


class DisaggProfileHandler(Handler, frozen=True):
    """Handler with one profile for decode engines, one for prefill engines, and a decider; without one, always both."""

    profiles: ProfileNames = ProfileNames()
    deciders: DeciderNames = DeciderNames()

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Scheduling:
        prefill, decode, wanted = self.profiles.prefill, self.profiles.decode, self.deciders.prefill
        _require(prefill in profiles, f"{at}.profiles.prefill", "profile", prefill, profiles)
        _require(decode in profiles, f"{at}.profiles.decode", "profile", decode, profiles)
        by_role: Mapping[Role, str] = {"prefill": prefill, "decode": decode, "both": decode}
        if wanted is None:
            return Scheduling(profiles, by_role, deciders)
        _require(wanted in deciders, f"{at}.deciders.prefill", "decider", wanted, deciders)
        return Scheduling(profiles, by_role, deciders, deciders[wanted])


def of_one_profile(profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider]) -> Scheduling:
    """Return rules with the only profile for every role; with several profiles and no handler, roles have none."""
    if len(profiles) != 1:
        return Scheduling(profiles, {}, deciders)
    (name,) = profiles
    return Scheduling(profiles, {"prefill": name, "decode": name, "both": name}, deciders)


def _require(there: bool, field: str, kind: str, name: str, known: Mapping[str, object]) -> None:
    if not there:
        raise BadRequest(f"{field}: there is no {kind} {name!r}; there are {', '.join(known) or 'none'}", field)
