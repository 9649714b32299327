"""The load of each engine for a picker that does not see answers end: reports, plus recent picks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tercet.fleet import EngineFleet, Member
from tercet.protocol import EngineLoad, UnknownEngine

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
        """Record an engine's load report."""
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
