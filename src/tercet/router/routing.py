"""Which program serves which request, and what becomes of programs that fail: a state machine without I/O.

A *version* is a plan whose programs are loaded. A request is served to its end by the version that it started with.
When a program fails ``return_after`` times in a row, its version gives way to the one before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tercet.programs import Program
from tercet.router.plan import Plan, Share

# Versions that can still be returned to.
REMEMBERED = 16


@dataclass(frozen=True, eq=False)
class Version:
    """A plan that can run: ``programs`` has one entry for each of its names."""

    number: int
    plan: Plan
    programs: Mapping[str, Program]


@dataclass(frozen=True)
class Chosen:
    """The program of one request, and the version that it belongs to."""

    version: int
    name: str
    program: Program


@dataclass(frozen=True)
class Return:
    """The front door went back from one version to another because ``program`` had failed so often in a row."""

    from_version: int
    to_version: int
    program: str
    failures: int
    error: str


class Routing:
    """The version in use, those before it, and the failures in a row of each program in use.

    ``return_after`` failures of a program in a row end its version, if there is one to return to; 0 means never.
    """

    def __init__(self, first: Version, return_after: int) -> None:
        self.current = first
        self.returned: Return | None = None
        self._return_after = return_after
        self._before: list[Version] = []
        self._failures: Counter[str] = Counter()

    @property
    def previous(self) -> Version | None:
        """The version that a failing one gives way to."""
        return self._before[-1] if self._before else None

    @property
    def failures(self) -> Mapping[str, int]:
        """Failures in a row of each program in use, where there are any."""
        return self._failures

    def choose(self, headers: Mapping[str, str], model: str, draw: float) -> Chosen:
        """The program of a request; ``draw`` is a random number from ``[0, 1)``."""
        plan = self.current.plan
        rule = next((rule for rule in plan.rules if rule.covers(headers, model)), None)
        arm = rule or _share(plan, _sticky(plan, headers, draw))
        return self._chosen(arm.label)

    def called(self, name: str) -> Chosen | None:
        """The program that the version in use has under ``name``, if any."""
        return self._chosen(name) if name in self.current.programs else None

    def swap(self, version: Version) -> None:
        """Use another version from now on; the one in use becomes the one to return to."""
        self._before = [*self._before, self.current][-REMEMBERED:]
        self._use(version)
        self.returned = None

    def succeeded(self, chosen: Chosen) -> None:
        """A request was served to its end by its program."""
        if chosen.version == self.current.number:
            self._failures.pop(chosen.name, None)

    def failed(self, chosen: Chosen, error: str) -> Return | None:
        """A program failed by its own fault; returns what that changed.

        What belongs to a version that is no longer in use changes nothing.
        """
        if chosen.version != self.current.number:
            return None
        self._failures[chosen.name] += 1
        failures = self._failures[chosen.name]
        if not self._before or not self._return_after or failures < self._return_after:
            return None
        *self._before, previous = self._before
        self.returned = Return(self.current.number, previous.number, chosen.name, failures, error)
        self._use(previous)
        return self.returned

    def _use(self, version: Version) -> None:
        self.current = version
        self._failures = Counter()

    def _chosen(self, name: str) -> Chosen:
        return Chosen(self.current.number, name, self.current.programs[name])


def _share(plan: Plan, draw: float) -> Share:
    """The arm whose part of ``[0, 1)`` has ``draw`` in it; one with no weight has no part."""
    shares = [share for share in plan.shares if share.weight > 0]
    left = draw
    for share in shares:
        left -= share.weight / plan.total
        if left < 0:
            return share
    return shares[-1]  # what rounding leaves over


def _sticky(plan: Plan, headers: Mapping[str, str], draw: float) -> float:
    value = headers.get(plan.sticky.lower()) if plan.sticky is not None else None
    if value is None:
        return draw
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:6], "big") / 2**48
