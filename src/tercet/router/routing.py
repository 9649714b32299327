"""Which program serves which request, and what becomes of programs that fail: a state machine without I/O.

A *plan* is what an operator asks for: which programs share the traffic, and which requests have a separate one. A
*version* is a plan whose programs are loaded. A request is served to its end by the version that it started with. When
a program fails ``return_after`` times in a row, its version gives way to the one before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tercet.programs import Program
from tercet.protocol import BadRequest

# Versions that can still be returned to.
REMEMBERED = 16
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Args = Mapping[str, str | int | float | bool]
Source = Annotated[str, msgspec.Meta(max_length=1_000_000)]


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A program and its parameters. ``name`` is what metrics, traces and clients call it; ``program``, if not given.

    ``source`` is the text of the file in ``file.py:function``, which is not read then.
    """

    program: Name
    args: Args = {}
    name: Name | None = None
    source: Source | None = None

    @property
    def label(self) -> str:
        """What metrics, traces and clients call it."""
        return self.name or self.program

    @property
    def same_as(self) -> tuple[str, dict[str, str], str | None]:
        """Equal for arms that run the same code with the same parameters."""
        return self.program, self.texts, self.source

    @property
    def texts(self) -> dict[str, str]:
        """The parameters, as they would be written on a command line."""
        return {key: as_text(value) for key, value in self.args.items()}


class Share(Arm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An arm of a split; it gets ``weight`` out of the sum of all weights."""

    weight: Weight = 1.0


class Rule(Arm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests that go to this arm whatever the split says.

    ``header`` alone asks that the request has it, with ``value`` that it has that value; ``model`` that the client
    asked for the model under this name. A rule with both asks for both.
    """

    header: Name | None = None
    value: str | None = None
    model: Name | None = None

    def __post_init__(self) -> None:
        if self.header is None and self.model is None:
            raise BadRequest(f"rules: the one for {self.label} needs a header or a model to go by", "rules")
        if self.value is not None and self.header is None:
            raise BadRequest("value: goes with a header", "value")

    def covers(self, headers: Mapping[str, str], model: str) -> bool:
        """Whether a request falls under it."""
        if self.model is not None and self.model != model:
            return False
        if self.header is None:
            return True
        found = headers.get(self.header.lower())
        return found is not None and self.value in (None, found)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of ``PUT /tercet/v1/program``: a ``program`` with what belongs to one, or a ``split``; and ``rules``.

    The first rule that covers a request decides. The others are split by weight, at random; with ``sticky``, the name
    of a header, by the value of that header, so that requests with the same value get the same arm.
    """

    program: Name | None = None
    args: Args = {}
    name: Name | None = None
    source: Source | None = None
    split: tuple[Share, ...] = ()
    rules: tuple[Rule, ...] = ()
    sticky: Name | None = None

    def __post_init__(self) -> None:
        if (self.program is None) == (not self.split):
            raise BadRequest("program: give either a program, or a split between several", "program")
        if self.args and self.program is None:
            raise BadRequest("args: belong to a program; in a split each program has its own", "args")
        if self.name is not None and self.program is None:
            raise BadRequest("name: belongs to a program; in a split each program has its own", "name")
        if self.source is not None and self.program is None:
            raise BadRequest("source: belongs to a program; in a split each program has its own", "source")
        if self.sticky is not None and self.program is not None:
            raise BadRequest("sticky: goes with a split", "sticky")
        if self.split and not 0 < self.total < float("inf"):
            raise BadRequest("weight: the weights of a split must be finite, and not all 0", "weight")
        self._require_one_meaning_of_each_name()

    def _require_one_meaning_of_each_name(self) -> None:
        seen: dict[str, Arm] = {}
        for arm in self.arms:
            other = seen.setdefault(arm.label, arm)
            if other.same_as != arm.same_as:
                raise BadRequest(f"name: {arm.label} stands for two things; give one of them another name", "name")

    @property
    def shares(self) -> tuple[Share, ...]:
        """The split; one share with everything if there is one program."""
        return self.split or (Share(program=self.program or "", args=self.args, name=self.name, source=self.source),)

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return sum(share.weight for share in self.shares)

    @property
    def arms(self) -> Iterator[Arm]:
        """Every program in it; the same one may come twice."""
        yield from self.shares
        yield from self.rules


def as_text(value: str | float | bool) -> str:
    """A parameter as it would be written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """The router went back from one version to another because ``program`` had failed so often in a row."""

    from_version: int
    to_version: int
    program: str
    failures: int
    error: str


class Routing:
    """The version in use, those before it, and the ``failures`` in a row of each program in use, where there are any.

    ``return_after`` failures of a program in a row end its version, if there is one to return to; 0 means never.
    """

    def __init__(self, first: Version, return_after: int) -> None:
        self.current = first
        self.returned: Return | None = None
        self._return_after = return_after
        self._before: list[Version] = []
        self.failures: Counter[str] = Counter()
        self._chosen_by_name: dict[str, Chosen] = {}

    @property
    def previous(self) -> Version | None:
        """The version that a failing one gives way to."""
        return self._before[-1] if self._before else None

    def choose(self, headers: Mapping[str, str], model: str, draw: float) -> Chosen:
        """The program of a request; ``draw`` is a random number from ``[0, 1)``."""
        plan = self.current.plan
        if plan.program is not None and not plan.rules:
            return self._chosen(plan.name or plan.program)
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

    def forget(self) -> None:
        """No version before the one in use is returned to."""
        self._before = []

    def succeeded(self, chosen: Chosen) -> None:
        """A request was served to its end by its program."""
        if chosen.version == self.current.number:
            self.failures.pop(chosen.name, None)

    def failed(self, chosen: Chosen, error: str) -> Return | None:
        """A program failed by its own fault; returns what that changed.

        What belongs to a version that is no longer in use changes nothing.
        """
        if chosen.version != self.current.number:
            return None
        self.failures[chosen.name] += 1
        failures = self.failures[chosen.name]
        if not self._before or not self._return_after or failures < self._return_after:
            return None
        *self._before, previous = self._before
        self.returned = Return(self.current.number, previous.number, chosen.name, failures, error)
        self._use(previous)
        return self.returned

    def _use(self, version: Version) -> None:
        self.current = version
        self.failures = Counter()
        self._chosen_by_name = {}

    def _chosen(self, name: str) -> Chosen:
        chosen = self._chosen_by_name.get(name)
        if chosen is None:
            chosen = Chosen(self.current.number, name, self.current.programs[name])
            self._chosen_by_name[name] = chosen
        return chosen


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
