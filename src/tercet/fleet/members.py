"""One engine of a fleet, and the sequences that are counted there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tercet.fleet.calls_in_flight import CallsInFlight
from tercet.protocol import AdapterReport, Engine, Revision, Role
from tercet.protocol.revision import UNKNOWN_REVISION
from tercet.protocol.types import Paused

COUNTS = frozenset({"in_flight", "in_flight_tokens"})
FOLLOWED = COUNTS | {"role", "reachable", "labels", "revision"}


@dataclass
class Member:
    """One engine of the fleet.

    ``in_flight`` counts the sequences that this router runs on it now, ``in_flight_tokens`` the prompt tokens of those
    that were picked with their request; ``calls`` are the calls to it in flight. ``labels`` and ``draining`` are set by
    its operator; the engine reports ``stopping`` and ``paused``. ``reachable`` turns false when a call gets no answer
    or the engine is stuck, and true again when the router's watch finds the engine well. ``when_idle`` is called each
    time its last sequence ends. ``kv_tokens`` is the capacity of its KV cache in tokens; 0 until it is reported.
    ``adapters`` are the LoRA adapters that it reports, by name, and ``max_adapters`` is the number of adapters that one
    step may serve: 0 if it serves none. ``model`` is the reported name of its model, ``model_dtype`` the dtype in which
    it computes, ``revision`` its software, weights and KV layout. ``said_stamp`` is the adapter stamp of its last
    report, ``asked_stamp`` the stamp at its last status. ``refused`` is the reason why an engine that answers may not
    serve here, such as another model; empty if it may. ``on_change`` is called for each change of a field in
    ``FOLLOWED``: picks use columns of these fields instead of reading every engine.
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
    paused: Paused = ""
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict[str, AdapterReport])
    max_adapters: int = 0
    model: str = ""
    model_dtype: str = ""
    revision: Revision = UNKNOWN_REVISION
    said_stamp: int = 0
    asked_stamp: int = 0
    refused: str = ""
    on_change: Callable[[Member, str], object] | None = field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in FOLLOWED and self.on_change is not None:
            self.on_change(self, name)

    @property
    def is_open(self) -> bool:
        """True if the engine may be picked, provided that it answers."""
        return not self.leaving and self.paused == ""

    @property
    def leaving(self) -> bool:
        """True if the engine gets no new requests and its sequences should move to other engines."""
        return self.draining or self.stopping

    def can(self, role: Role) -> bool:
        """True if the engine may serve in ``role``; every engine can do both, and the router sets roles."""
        return role == "both" or self.role in (role, "both")

    def share(self, tokens: int) -> float:
        """Return the share of its KV cache that ``tokens`` need; 0 until its capacity is reported."""
        return tokens / self.kv_tokens if self.kv_tokens else 0.0


class Counted:
    """One sequence, counted at the engine that was picked for it; the count follows a move."""

    __slots__ = ("_member", "_tokens")

    def __init__(self, member: Member, tokens: int) -> None:
        self._tokens = tokens
        self._member: Member | None = member
        self._add(member, 1)

    def go_to(self, member: Member) -> None:
        """Count the sequence at another engine from now on."""
        left = self._member
        if left is not None and left is not member:
            self._member = member
            self._add(member, 1)
            self._add(left, -1)

    def end(self) -> None:
        """Stop counting the sequence."""
        left, self._member = self._member, None
        if left is not None:
            self._add(left, -1)

    def _add(self, member: Member, one: int) -> None:
        member.in_flight += one
        member.in_flight_tokens += one * self._tokens
        if member.in_flight == 0 and member.when_idle is not None:
            member.when_idle()
