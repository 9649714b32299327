"""What runs on each engine, for a picker that sees no answer end: what engines report, and what they lack yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tercet.fleet import EngineFleet, Member
from tercet.protocol import EngineLoad, UnknownEngine

UNTIL_COUNTED = 0.3
"""Seconds from a pick until the engine's reports have it: the way through Envoy, the queue, and a report's own pace."""


@dataclass
class _Recent:
    """Picks of one engine that its reports may lack, with their times and prompt tokens; and what it reported last."""

    picks: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    requests: int = 0
    tokens: int = 0


class ReportedLoad:
    """Keeps the counts of the fleet's members: ``in_flight`` is what an engine reports plus what was picked just now.

    So several pickers that share nothing see each other's requests in the engines' reports. ``on_news`` is called
    after each report.
    """

    def __init__(self, fleet: EngineFleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self.on_news: Callable[[], object] = lambda: None
        self._recent: dict[str, _Recent] = {}
        fleet.on_report = self.reported

    def picked(self, member: Member, tokens: int) -> None:
        """A request with a prompt of so many tokens is on its way to the engine."""
        recent = self._recent.setdefault(member.name, _Recent())
        recent.picks.append((self._clock(), tokens))
        self._count(member, recent)

    def reported(self, name: str, load: EngineLoad) -> None:
        """An engine said how busy it is."""
        try:
            member = self._fleet.member(name)
        except UnknownEngine:  # it has just left
            self._recent.pop(name, None)
            return
        recent = self._recent.setdefault(name, _Recent())
        recent.requests, recent.tokens = load.waiting + load.running, load.tokens or 0
        self._count(member, recent)
        self.on_news()

    def _count(self, member: Member, recent: _Recent) -> None:
        picks, oldest = recent.picks, self._clock() - UNTIL_COUNTED
        while picks and picks[0][0] < oldest:
            picks.popleft()
        member.in_flight = recent.requests + len(picks)
        member.in_flight_tokens = recent.tokens + sum(tokens for _, tokens in picks)

    def on_its_way(self, name: str) -> int:
        """Requests that were picked for the engine just now."""
        recent = self._recent.get(name)
        return len(recent.picks) if recent is not None else 0
