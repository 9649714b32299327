"""One engine of a fleet, and the sequences that are counted at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tercet.fleet.calls_in_flight import CallsInFlight
from tercet.protocol import AdapterReport, Engine, Role

COUNTS = frozenset({"in_flight", "in_flight_tokens"})
FOLLOWED = COUNTS | {"role", "reachable", "labels"}


@dataclass
class Member:
    """One engine of the fleet.

    ``in_flight`` counts the sequences that this front door runs on it now, ``in_flight_tokens`` the prompt tokens of
    those that were picked for with their request; ``calls`` are what it is asked for now. ``labels`` are its operator's
    words about it. ``reachable`` turns false when a call finds no answer or the engine stands still, and true again
    when somebody (the front door's watch) finds it well. ``draining`` is its operator's wish, ``stopping`` its own
    word. ``when_idle`` is called each time that its last sequence ends. ``kv_tokens`` is for how many tokens its KV
    cache has room; 0 while it has not said so. ``adapters`` are the LoRA adapters that it said it has, by name,
    ``max_adapters`` how many of them one step may serve: 0 if it takes none. ``model_dtype`` is in what it
    computes. ``said_stamp`` is what its reports say
    that changes with them, ``asked_stamp`` what they said when it was asked last. ``refused`` is why one that answers
    may not serve here, such as that it has become another model's. ``on_change`` is told of each field
    of ``FOLLOWED`` that is set: who picks keeps columns of them, and does not look at every engine for every pick.
    """

    name: str
    url: str
    role: Role
    engine: Engine
    in_flight: int = 0
    reachable: bool = True
    draining: bool = False
    when_idle: Callable[[], None] | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    in_flight_tokens: int = 0
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    kv_tokens: int = 0
    stopping: bool = False
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict[str, AdapterReport])
    max_adapters: int = 0
    model_dtype: str = ""
    said_stamp: int = 0
    asked_stamp: int = 0
    refused: str = ""
    on_change: Callable[[Member, str], object] | None = field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in FOLLOWED and self.on_change is not None:
            self.on_change(self, name)

    @property
    def leaving(self) -> bool:
        """Whether nothing new shall begin there, and what runs there shall go elsewhere."""
        return self.draining or self.stopping

    def can(self, role: Role) -> bool:
        """Whether it may serve in ``role``; every engine can do both, roles are the router's."""
        return role == "both" or self.role in (role, "both")

    def share(self, tokens: int) -> float:
        """The part of its KV cache that so many tokens take; 0 while it has not said what it has."""
        return tokens / self.kv_tokens if self.kv_tokens else 0.0


class Counted:
    """One sequence in the counts of the engine that was picked for it; they follow it when it goes elsewhere."""

    __slots__ = ("_member", "_tokens")

    def __init__(self, member: Member, tokens: int) -> None:
        self._tokens = tokens
        self._member: Member | None = member
        self._add(member, 1)

    def go_to(self, member: Member) -> None:
        """It is that engine's from now on."""
        left = self._member
        if left is not None and left is not member:
            self._member = member
            self._add(member, 1)
            self._add(left, -1)

    def end(self) -> None:
        """It is over, wherever it was."""
        left, self._member = self._member, None
        if left is not None:
            self._add(left, -1)

    def _add(self, member: Member, one: int) -> None:
        member.in_flight += one
        member.in_flight_tokens += one * self._tokens
        if member.in_flight == 0 and member.when_idle is not None:
            member.when_idle()
