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

    ``in_flight`` counts the sequences that this router runs on it now, ``in_flight_tokens`` the prompt tokens of
    those that were picked with their request; ``calls`` are the calls to it in flight. ``labels`` are set by its
    operator. ``reachable`` turns false when a call gets no answer or the engine is stuck, and true again when the
    router's watch finds it well. ``draining`` is set by its operator, ``stopping`` and ``paused`` reported by the
    engine. ``when_idle`` is called each time that its last sequence ends. ``kv_tokens`` is the capacity of its KV cache
    in tokens; 0 until it is reported. ``adapters`` are the LoRA adapters that it reports, by name, ``max_adapters`` the
    number of them that one step may serve: 0 if it serves none. ``model_dtype`` is the dtype in which it computes,
    ``revision`` what it is an instance of. ``said_stamp`` is the adapter stamp of its last report, ``asked_stamp`` the
    stamp at its last status. ``refused`` is the reason why an engine that answers may not serve here, such as another
    model. ``on_change`` is called for each change of a field in ``FOLLOWED``: picks use columns of these fields instead
    of reading every engine.
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
        """Whether it may be picked, if it answers."""
        return not self.leaving and self.paused == ""

    @property
    def leaving(self) -> bool:
        """Whether nothing new may begin there, and its sequences should move elsewhere."""
        return self.draining or self.stopping

    def can(self, role: Role) -> bool:
        """Whether it may serve in ``role``; every engine can do both, roles are set by the router."""
        return role == "both" or self.role in (role, "both")

    def share(self, tokens: int) -> float:
        """The part of its KV cache that ``tokens`` need; 0 until its capacity is reported."""
        return tokens / self.kv_tokens if self.kv_tokens else 0.0


class Counted:
    """One sequence in the counts of the engine that was picked for it; the counts follow a move."""

    __slots__ = ("_member", "_tokens")

    def __init__(self, member: Member, tokens: int) -> None:
        self._tokens = tokens
        self._member: Member | None = member
        self._add(member, 1)

    def go_to(self, member: Member) -> None:
        """Count it at another engine from now on."""
        left = self._member
        if left is not None and left is not member:
            self._member = member
            self._add(member, 1)
            self._add(left, -1)

    def end(self) -> None:
        """Stop counting it."""
        left, self._member = self._member, None
        if left is not None:
            self._add(left, -1)

    def _add(self, member: Member, one: int) -> None:
        member.in_flight += one
        member.in_flight_tokens += one * self._tokens
        if member.in_flight == 0 and member.when_idle is not None:
            member.when_idle()
