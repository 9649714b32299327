"""The members of a fleet: each engine with the calls that wait for it, the sequences counted there, and the roster.

A :class:`Member` is an engine in this process; a :class:`MemberState` is what routers store and share of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import msgspec

from tercet import logs
from tercet.fleet.knowledge import COUNTS, FleetKnowledge
from tercet.fleet.picking import Picking
from tercet.logs import LogEvent
from tercet.protocol import AdapterReport, Conflict, Engine, MemberRole, Revision, Role, TercetError, UnknownEngine
from tercet.protocol.addresses import UNKNOWN_REVISION
from tercet.protocol.names import STORE, require_uid
from tercet.protocol.types import Paused, Request
from tercet.settings import EngineAddress

Fail = Callable[[TercetError], object]
Waits = Callable[[], bool]
FOLLOWED = COUNTS | {"role", "reachable", "labels", "revision"}


class CallsInFlight:
    """The calls and streams that wait for one engine, each with the function that makes it fail."""

    def __init__(self) -> None:
        self._fails: dict[object, tuple[Fail, Waits]] = {}

    def __len__(self) -> int:
        return len(self._fails)

    def lose(self, error: TercetError, only_waiting: bool = False) -> None:
        """End every call to the engine with ``error``, or only those that have no output yet."""
        # A copy: each call that fails forgets its entry.
        for fail, waits in list(self._fails.values()):
            if not only_waiting or waits():
                fail(error)

    def note(self, fail: Fail, waits: Waits = lambda: True) -> object:
        """Register ``fail``, which :meth:`lose` calls; pass the returned value to :meth:`forget` to end that.

        ``waits`` returns True while the call has no output.
        """
        key = object()
        self._fails[key] = fail, waits
        return key

    def forget(self, noted: object) -> None:
        del self._fails[noted]


class UntilLost:
    """A context that is cancelled as soon as one of ``engines`` is lost, and then raises that engine's error.

    A class and not a generator, which costs more: a request enters such a context several times.
    """

    __slots__ = ("_engines", "_loss", "_noted", "_patience")

    def __init__(self, *engines: CallsInFlight) -> None:
        self._engines = engines
        self._noted: list[object] = []
        self._loss: TercetError | None = None
        self._patience = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._patience.__aenter__()
        self._noted = [engine.note(self._give_up) for engine in self._engines]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # First of all: a loss from here on must not cancel what runs after this block.
        for engine, noted in zip(self._engines, self._noted, strict=True):
            engine.forget(noted)
        try:
            await self._patience.__aexit__(kind, error, at)
        except TimeoutError as expired:
            error = expired
        if isinstance(error, TimeoutError) and self._loss is not None and self._patience.expired():
            raise self._loss from None

    def _give_up(self, error: TercetError) -> None:
        if self._loss is None:
            self._loss = error
            self._patience.reschedule(asyncio.get_running_loop().time())


@dataclass
class Member:
    """One engine of the fleet."""

    # What keeps a member from picks, and who ends that again:
    #
    #   reachable    it was lost, refused, or is stuck    EngineHealth.found_well, after an answer that fits
    #   draining     its operator, or its discovery       the same
    #   stopping     its own reports (SIGTERM)            its reports, or a restart that the router notices
    #   paused       its own reports                      its reports, or such a restart
    #   warming      HotContexts, at its start            the end of the copies to it
    #   adapters     it does not have the request's       its next status; only picks of that adapter pass it over
    #
    # None of them ends sequences by itself: `calls` are made to fail where an engine cannot answer any more.
    name: str
    url: str
    role: MemberRole
    engine: Engine
    in_flight: int = 0  # sequences that this router runs on it now
    # False when a call gets no answer or the engine is stuck, and true again when the watch finds the engine well.
    reachable: bool = True
    draining: bool = False  # set by its operator, as are its labels
    warming: bool = False  # it started, and gets the fleet's most wanted contexts before it is picked
    when_idle: Callable[[], None] | None = None  # called each time its last sequence ends
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    in_flight_tokens: int = 0  # prompt tokens of the sequences that were picked with their request
    background: int = 0  # those of the sequences that run in the background, and their prompt tokens
    background_tokens: int = 0
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    kv_tokens: int = 0  # capacity of its KV cache; 0 until it is reported
    # What the engine reports.
    stopping: bool = False
    paused: Paused = ""
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict[str, AdapterReport])
    max_adapters: int = 0  # LoRA adapters that one step may serve; 0 if it serves none
    model: str = ""
    model_dtype: str = ""
    revision: Revision = UNKNOWN_REVISION
    incarnation: str = ""
    restarts: int = 0  # of the engine, that this router has noticed
    since: float = 0.0  # when this router first met this start of the engine, a Unix time
    reported_stamp: int = 0  # the adapter stamp of its last report, and the one at its last status
    asked_stamp: int = 0
    refused: str = ""  # why an engine that answers may not serve here, such as another model
    # Called for each change of a field in FOLLOWED: picks use columns of these instead of reading every engine.
    on_change: Callable[[Member, str], object] | None = field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in FOLLOWED and self.on_change is not None:
            self.on_change(self, name)

    @property
    def is_open(self) -> bool:
        """True if the engine may be picked, provided that it answers."""
        return not self.leaving and not self.warming and self.paused == ""

    @property
    def leaving(self) -> bool:
        """True if the engine gets no new requests and its sequences should move to other engines."""
        return self.draining or self.stopping

    def can(self, role: Role) -> bool:
        """True if the engine may serve in ``role``; every engine can do both, and the router sets roles."""
        return not self.is_store and (role == "both" or self.role in (role, "both"))

    @property
    def is_store(self) -> bool:
        """True if it keeps KV and computes nothing: it is never picked."""
        return self.role == STORE

    def share(self, tokens: int) -> float:
        """Return the share of its KV cache that ``tokens`` need; 0 until its capacity is reported."""
        return tokens / self.kv_tokens if self.kv_tokens else 0.0


class Counted:
    """The sequence of a ``request``, counted at the engine that was picked for it; the count follows a move."""

    __slots__ = ("_background", "_member", "_tokens")

    def __init__(self, member: Member, request: Request | None) -> None:
        self._tokens = 0 if request is None else request.num_tokens
        self._background = request is not None and request.background
        self._member: Member | None = member
        self._add(member, 1)

    def go_to(self, member: Member) -> None:
        left = self._member
        if left is not None and left is not member:
            self._member = member
            self._add(member, 1)
            self._add(left, -1)

    def end(self) -> None:
        left, self._member = self._member, None
        if left is not None:
            self._add(left, -1)

    def _add(self, member: Member, one: int) -> None:
        if self._background:
            member.background += one
            member.background_tokens += one * self._tokens
        member.in_flight += one
        member.in_flight_tokens += one * self._tokens
        if member.in_flight == 0 and member.when_idle is not None:
            member.when_idle()


class Roster:
    """A fleet's members; it updates the columns in ``knowledge`` and ``picking`` when a member changes.

    ``open`` are the members that may be picked now. The list changes in place, and then each of ``when_reopened`` is
    called. ``when_started`` is called with an engine that this process meets for the first time or after a restart,
    before it may be picked. ``stores`` are the stores that serve.
    """

    def __init__(self, members: Sequence[Member], knowledge: FleetKnowledge, picking: Picking[Member]) -> None:
        self.open, self.stores = list[Member](), list[Member]()
        self._members = {member.name: member for member in members}
        self._knowledge = knowledge
        self._picking = picking
        self.when_reopened = list[Callable[[], object]]()
        self.when_started: Callable[[Member], object] = lambda _: None
        for member in members:
            self._follow(member)
        self.reopen()

    @property
    def members(self) -> Sequence[Member]:
        return list(self._members.values())

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def member(self, name: str) -> Member:
        """Return the member of that name; raise :class:`~tercet.protocol.UnknownEngine` if there is none."""
        found = self._members.get(name)
        if found is None:
            known = ", ".join(self._members) or "none"
            raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known}", "name")
        return found

    def add(self, member: Member) -> None:
        if member.name in self._members:
            raise Conflict(f"name: this fleet already has an engine {member.name!r}; choose another name", "name")
        self._members[member.name] = member
        self._follow(member)
        self.reopen()

    def remove(self, name: str) -> Member:
        member = self.member(name)
        del self._members[name]
        # The object lives on while sequences use it; its row may belong to another engine soon.
        member.on_change = None
        self._knowledge.remove(name)
        self.reopen()
        return member

    def drain(self, name: str, draining: bool = True) -> None:
        self.member(name).draining = draining
        self.reopen()

    def reopen(self) -> None:
        """Compute again which members may be picked, after a member came, left or began to leave."""
        # In place: the views of a fleet share this list.
        engines = [member for member in self._members.values() if not member.is_store]
        self.stores = [member for member in self._members.values() if member.is_store and member.is_open]
        self.open[:] = [member for member in engines if member.is_open]
        self._picking.reopen(self.open, [member for member in engines if not member.is_open])
        for call in self.when_reopened:
            call()

    def _follow(self, member: Member) -> None:
        self._knowledge.add(member.name)
        for count in COUNTS:
            self._knowledge.loads.count(member.name, count, getattr(member, count))
        member.on_change = self._changed

    def _changed(self, member: Member, field: str) -> None:
        # Counts change with every request, so they update one number only; the rest changes which engines a pick may
        # choose.
        if field in COUNTS:
            self._knowledge.loads.count(member.name, field, getattr(member, field))
        else:
            self._picking.forget_candidates()
            if field == "role":
                self.reopen()


JOINED = "joined:"
"""Prefix of the uid of an engine that has joined by itself."""


class MemberState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine of a fleet, as routers store and share it, and whether it may be picked."""

    address: EngineAddress
    draining: bool = False  # set by its operator
    # That of the pod or roster entry as which the engine was found, or of the start that joined by itself; empty for an
    # engine that was named in settings.
    uid: str = msgspec.field(default="", name="pod")
    withheld: str = ""  # why it gets no new requests, or empty

    def __post_init__(self) -> None:
        if self.uid:
            require_uid(self.uid)

    @property
    def leaving(self) -> bool:
        return self.draining or bool(self.withheld)

    @property
    def joined(self) -> bool:
        """True if the engine joined by itself, and leaves by itself."""
        return self.uid.startswith(JOINED)


class Change(NamedTuple):
    """A log event and its fields except the reason; ``reason`` is empty if the caller gives one."""

    event: LogEvent
    fields: dict[str, str | int]
    reason: str = ""


def member_changes(before: Sequence[MemberState], after: Sequence[MemberState]) -> Iterator[Change]:
    """Yield each change from ``before`` to ``after`` once; an engine at another URL is another engine."""
    known = {each.address.name: each for each in before}
    wanted = {each.address.name: each for each in after}
    here = {
        name: each for name, each in known.items() if name in wanted and each.address.url == wanted[name].address.url
    }
    for name in sorted(known.keys() - here.keys()):
        yield Change(logs.ENGINE_REMOVED, {"engine": name})
    for name, now in wanted.items():
        then, role = here.get(name), now.address.role
        engine: dict[str, str | int] = {"engine": name}
        if then is None:
            yield Change(logs.ENGINE_ADDED, {**engine, "url": now.address.url, "role": role})
        elif then.address.role != role:
            yield Change(logs.ENGINE_ROLE, {**engine, "role": role, "before": then.address.role})
        if now.leaving != (then is not None and then.leaving):
            yield Change(logs.ENGINE_DRAINED if now.leaving else logs.ENGINE_UNDRAINED, engine, now.withheld)
