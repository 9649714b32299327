"""What an operator asks for: which programs share the traffic, and which requests have a program of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from tercet.protocol import BadRequest

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Args = Mapping[str, str | int | float | bool]


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A program and its parameters. ``name`` is what metrics, traces and clients call it; ``program``, if not given."""

    program: Name
    args: Args = {}
    name: Name | None = None

    @property
    def label(self) -> str:
        """What metrics, traces and clients call it."""
        return self.name or self.program

    @property
    def same_as(self) -> tuple[str, dict[str, str]]:
        """Equal for arms that run the same code with the same parameters."""
        return self.program, {key: as_text(value) for key, value in self.args.items()}


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
    """The body of ``PUT /tercet/v1/program``: one ``program`` with ``args``, or a ``split``; and ``rules``.

    The first rule that covers a request decides. The others are split by weight, at random; with ``sticky``, the name
    of a header, by the value of that header, so that requests with the same value get the same arm.
    """

    program: Name | None = None
    args: Args = {}
    split: tuple[Share, ...] = ()
    rules: tuple[Rule, ...] = ()
    sticky: Name | None = None

    def __post_init__(self) -> None:
        if (self.program is None) == (not self.split):
            raise BadRequest("program: give either a program, or a split between several", "program")
        if self.args and self.program is None:
            raise BadRequest("args: belong to a program; in a split each program has its own", "args")
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
        return self.split or (Share(program=self.program or "", args=self.args),)

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
