"""The shared state of a fleet: the operators' decisions as one record with a version, which routers follow.

:class:`FleetState` does no I/O: each method returns the state after a change, or refuses the change. :class:`StateFile`
holds the newest state: each change starts from the newest state, and readers never see part of a change.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from tercet.fleet.discovery import FoundEngine, with_found
from tercet.fleet.members import JOINED, MemberState
from tercet.fleet.membership import ServedModel
from tercet.protocol import BadRequest, Conflict, EngineError, MemberRole, Role, UnknownEngine
from tercet.protocol.names import require_adapter_name, require_text
from tercet.protocol.wire import UNREADABLE
from tercet.router.serve.plans import Plan
from tercet.router.state.state_store import LOCK_SECONDS, RETRY_DELAY_S, FileStore, StateStore, Stored
from tercet.settings import EngineAddress, RouterConfig

logger = logging.getLogger("tercet.router")


class ProgramInUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan and its number, which grows when the same plan is to be loaded again."""

    number: int
    plan: Plan


class SchedulingInUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scheduling file's path, or a name and the ``content``; ``number`` grows with each change."""

    number: int
    file: str
    content: str | None = None


class AdapterState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that the engines of a fleet should have; ``digest`` is empty until an engine has loaded it."""

    name: str
    path: str
    digest: str = ""

    def __post_init__(self) -> None:
        require_adapter_name(self.name)
        require_text(self.path, "path")


class MadeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The change that made a version: an event of the log, its fields, and its origin (a request or a changed file)."""

    version: int
    event: str
    fields: dict[str, str | int]
    reason: str


class FleetState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a fleet: members, programs, scheduling and adapters."""

    version: int = 1
    members: tuple[MemberState, ...]
    program: ProgramInUse
    # The programs to which routers return from failing ones.
    before: ProgramInUse | None = None
    scheduling: SchedulingInUse | None = None
    served_model: ServedModel | None = msgspec.field(default=None, name="promise")
    adapters: tuple[AdapterState, ...] = ()
    # The last changes, oldest first, for routers that find several at once.
    changes: tuple[MadeChange, ...] = ()
    # The process that decides about roles: one that was suspended for long finds another name here, and its changes
    # are refused.
    role_keeper: str = ""

    @classmethod
    def of(cls, config: RouterConfig) -> FleetState:
        """Return the first state of a fleet, from a router's settings."""
        return cls(
            members=tuple(MemberState(address) for address in config.engines),
            program=ProgramInUse(1, Plan(program=config.program, args=config.program_args)),
            scheduling=None if config.scheduling is None else SchedulingInUse(1, config.scheduling),
            adapters=tuple(AdapterState(name, path) for name, path in config.lora_modules.items()),
        )

    def following(self, known: FleetState) -> FleetState:
        """Return this state if it is ``known`` or newer; otherwise a state after ``known`` with this one's contents.

        A state with a lower version was put there by other means, for example from a backup.
        """
        if self.version > known.version or self == known:
            return self
        after = known.with_program(self.program.plan)
        if self.scheduling is not None:
            after = after.with_scheduling(self.scheduling.file, self.scheduling.content)
        return msgspec.structs.replace(after, members=self.members, adapters=self.adapters)

    def with_program(self, plan: Plan) -> FleetState:
        """Return the state in which ``plan`` serves new requests."""
        following = ProgramInUse(self.program.number + 1, plan)
        return msgspec.structs.replace(self, program=following, before=self.program)

    def with_scheduling(self, file: str, content: str | None = None) -> FleetState:
        """Return the state in which picks use the scheduling ``file``, or the ``content`` with that name."""
        number = 1 if self.scheduling is None else self.scheduling.number + 1
        return msgspec.structs.replace(self, scheduling=SchedulingInUse(number, file, content))

    def with_served_model(self, model: ServedModel) -> FleetState:
        """Return the state with ``model``, which clients see, unless it has one already."""
        return self if self.served_model is not None else msgspec.structs.replace(self, served_model=model)

    def with_replaced(self, model: ServedModel) -> FleetState:
        """Return the state with another served model, after engines have got other weights."""
        return self if self.served_model == model else msgspec.structs.replace(self, served_model=model)

    def with_adapter(self, adapter: AdapterState) -> FleetState:
        """Return the state with one more adapter; raise :class:`~tercet.protocol.Conflict` if its name is in use."""
        others = tuple(each for each in self.adapters if each.name != adapter.name)
        for each in self.adapters:
            if each.name == adapter.name and each.path != adapter.path:
                raise Conflict(f"name: {each.name!r} names the adapter at {each.path}; unload it first", "name")
        return msgspec.structs.replace(self, adapters=(*others, adapter))

    def without_adapter(self, name: str) -> FleetState:
        """Return the state without an adapter; an unknown name changes nothing."""
        left = tuple(each for each in self.adapters if each.name != name)
        return self if left == self.adapters else msgspec.structs.replace(self, adapters=left)

    def with_member(self, address: EngineAddress) -> FleetState:
        """Return the state with one more engine; raise :class:`~tercet.protocol.Conflict` for a name or URL in use."""
        for member in self.members:
            if member.address.name == address.name:
                raise Conflict(f"name: this fleet already has an engine {address.name!r}; choose another name", "name")
            if member.address.url.rstrip("/") == address.url.rstrip("/"):
                raise Conflict(f"url: {address.url} is already in this fleet, as {member.address.name}", "url")
        return msgspec.structs.replace(self, members=(*self.members, MemberState(address)))

    def with_joined(self, address: EngineAddress, uid: str, withheld: str) -> FleetState:
        """Return the state with an engine that joined by itself; its drain and role stay if it is the same start.

        Raises :class:`~tercet.protocol.Conflict` if its name or URL belongs to another engine.
        """
        uid = JOINED + uid
        before = next((each for each in self.members if each.address.name == address.name), None)
        if before is None or not before.joined or before.address.url != address.url:
            joined = self.with_member(address)
            return joined._with(joined.members[-1], MemberState(address, uid=uid, withheld=withheld))
        after = MemberState(address, uid=uid, withheld=withheld)
        if before.uid == uid:
            after = msgspec.structs.replace(before, withheld=withheld)
        return self if after == before else self._with(before, after)

    def without_joined(self, name: str, uid: str) -> FleetState:
        """Return the state without the start ``uid`` of an engine; a start that is not a member changes nothing."""
        left = tuple(each for each in self.members if (each.address.name, each.uid) != (name, JOINED + uid))
        return self if left == self.members else msgspec.structs.replace(self, members=left)

    def without_member(self, name: str) -> FleetState:
        """Return the state without an engine; raise :class:`~tercet.protocol.UnknownEngine` for an unknown name."""
        gone = self._member(name)
        return msgspec.structs.replace(self, members=tuple(each for each in self.members if each is not gone))

    def with_role(self, name: str, role: Role) -> FleetState:
        """Return the state with another role for an engine.

        Raises :class:`~tercet.protocol.UnknownEngine` for an unknown name.
        """
        member = self._member(name)
        address = msgspec.structs.replace(member.address, role=role)
        return self._with(member, msgspec.structs.replace(member, address=address))

    def with_flip(self, names: Sequence[str], role: Role) -> FleetState:
        """Return the state in which several engines change to ``role``; this state if one has left or changed its role.

        So a decision does not undo an operator's later change.
        """
        expected = "decode" if role == "prefill" else "prefill"
        here = {each.address.name: each.address.role for each in self.members}
        if any(here.get(name) != expected for name in names):
            return self
        state = self
        for name in names:
            state = state.with_role(name, role)
        return state

    def with_role_keeper(self, name: str) -> FleetState:
        """Return the state in which the process ``name`` decides about roles."""
        return self if self.role_keeper == name else msgspec.structs.replace(self, role_keeper=name)

    def require_role_keeper(self, name: str) -> FleetState:
        """Return this state; raise :class:`~tercet.protocol.Conflict` if another process decides about roles now."""
        if self.role_keeper != name:
            raise Conflict(f"roles: {self.role_keeper or 'an operator'} decides about roles now, not {name}")
        return self

    def with_draining(self, name: str, draining: bool) -> FleetState:
        """Return the state in which an engine is drained or not.

        Raises :class:`~tercet.protocol.UnknownEngine` for an unknown name.
        """
        member = self._member(name)
        return self._with(member, msgspec.structs.replace(member, draining=draining))

    def with_found(self, found: Sequence[FoundEngine], reported: Mapping[str, MemberRole]) -> FleetState:
        """Return the state with the engines ``found``; see :func:`tercet.fleet.discovery.with_found`."""
        members = with_found(self.members, found, reported)
        return self if members == self.members else msgspec.structs.replace(self, members=members)

    def _with(self, member: MemberState, changed: MemberState) -> FleetState:
        members = tuple(changed if each is member else each for each in self.members)
        return msgspec.structs.replace(self, members=members)

    def _member(self, name: str) -> MemberState:
        for member in self.members:
            if member.address.name == name:
                return member
        known = ", ".join(member.address.name for member in self.members)
        raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known or 'none'}", "name")


FORMAT = 1
"""The format of a file without the field ``format``; a version that writes other fields writes another format."""
MOST_BYTES = 16 * 1024 * 1024
"""Largest size of a stored state in bytes; a change that makes it larger is refused."""
_FIELDS = {each.encode_name: each for each in msgspec.structs.fields(FleetState)}
_RECORDS: Mapping[str, Any] = {"members": MemberState, "adapters": AdapterState, "changes": MadeChange}
"""The lists of a state, by field, and the kind of their records."""
_OPTIONAL = "before", "scheduling", "promise", "role_keeper"
_REFUSALS = (BadRequest, *UNREADABLE)


class LeftOut(NamedTuple):
    """A record of a stored state that cannot be used: its field and place in it, its JSON, and the reason."""

    field: str
    place: str
    content: Any
    reason: str


class _Read(NamedTuple):
    """What is stored: the state, None without one; the decoded JSON; and the records that the state is without."""

    state: FleetState | None
    content: dict[str, Any]
    left_out: Sequence[LeftOut] = ()


class StateFile:
    """The newest state of a fleet, in the file at ``path`` or in another ``store``, for any number of processes.

    Every method does I/O.

    A record that cannot be used, such as an engine with an invalid name, is left out, and the log names it; all others
    are used. It stays in the store until a record with the same name replaces it, or until it is corrected or removed
    there. A change is encoded and decoded again before it is
    written, by the rules of reading; so no change of this version makes such a record.
    """

    def __init__(self, path: Path, store: StateStore | None = None) -> None:
        self.path = path
        self.store = FileStore(path) if store is None else store
        self._left_out: Sequence[LeftOut] = ()  # those that the log has named

    @property
    def name(self) -> str:
        return self.store.name

    def read(self, known: FleetState | None = None) -> FleetState | None:
        """Return the state, or None; raise :class:`~tercet.protocol.BadRequest` for invalid content.

        If the stored programs cannot be used, those before them or those of ``known`` are.
        """
        return self._understood(self.store.load(), known).state

    def _understood(self, stored: Stored, known: FleetState | None) -> _Read:
        if stored.content is None:
            return _Read(None, {})
        try:
            content = msgspec.json.decode(stored.content, type=dict[str, Any])
            said = content.get("format", FORMAT)
            if said != FORMAT:
                raise BadRequest(
                    f"its format is {said!r:.100}, but this version of Tercet reads only {FORMAT}. Run the version "
                    "that wrote it or a later one; or name another file (--state) and add the engines again"
                )
            state, left_out = _usable(content, known)
        except _REFUSALS as error:
            raise BadRequest(f"state: {self.name} is not the state of a fleet: {error}", "state") from error
        for each in left_out:
            if each not in self._left_out:
                logger.error(
                    "state: %s: %s is left out, and all other records are used: %.1000s. It stays there; correct it or "
                    "remove it. It is %.300s", self.name, each.place, each.reason, each.content,
                )  # fmt: skip
        self._left_out = left_out
        return _Read(state, content, left_out)

    def update(self, change: Callable[[FleetState], FleetState], otherwise: FleetState) -> FleetState:
        """Change the state, which is ``otherwise`` if none is stored, and return the state after the change.

        A ``change`` that returns its argument writes nothing. It may be called again if another process was faster.
        Raises the errors of ``change``, and :class:`~tercet.protocol.BadRequest` for a state that could not be read
        again, and then the state stays as it was; the errors of :meth:`read`; and
        :class:`~tercet.protocol.TercetError` for a store that cannot be written.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            stored = self.store.load()
            found = self._understood(stored, otherwise)
            before = otherwise if found.state is None else found.state
            after = change(before)
            # Versions only grow, and each change has its own: followers compare nothing else.
            if after is not before:
                after = msgspec.structs.replace(after, version=after.version + 1)
            if after is found.state:
                return after
            known, as_read = _encoded(after)
            if found.left_out:
                # Records that cannot be used here are written back: another version, or an operator, can read them. A
                # record in a list stays until this change adds one with its name; a single field, until it is changed.
                content: dict[str, Any] = msgspec.json.decode(known)
                for each in found.left_out:
                    if each.field in _RECORDS:
                        lists = (getattr(of, each.field) for of in (as_read, found.state))
                        now, earlier = ({_own(record)[:1] for record in records} for records in lists)
                        if (_name_in(each.content),) not in now - earlier and each.field != "changes":
                            content[each.field] = [*content[each.field], each.content]
                    elif getattr(as_read, name := _FIELDS[each.field].name) == getattr(found.state, name):
                        content[each.field] = found.content[each.field]
                known = msgspec.json.encode(content)
            written = msgspec.json.format(known)
            if len(written) > MOST_BYTES:
                raise BadRequest(f"state: would have {len(written)} bytes, and may have {MOST_BYTES}", "state")
            # What was read may be out of date by now: the store then writes nothing, and the change begins again from
            # the newer state. The pause differs by process, so that two of them do not collide each time.
            if self.store.store(written, stored.mark):
                return as_read
            time.sleep(random.uniform(0, RETRY_DELAY_S))
        raise EngineError(f"state: other processes kept changing {self.name} for {LOCK_SECONDS:.0f} s; retry later")


def _usable(content: dict[str, Any], known: FleetState | None) -> tuple[FleetState, list[LeftOut]]:
    """Return the state of the records that can be used, and the others; raise one of ``_REFUSALS`` if there is none."""
    found, left_out = {field: value for field, value in content.items() if field != "format"}, list[LeftOut]()
    for field, kind in _RECORDS.items():
        if isinstance(found.get(field), list):
            usable = list[Any]()
            for place, each in enumerate(found[field]):
                try:
                    record = msgspec.convert(each, kind)
                    taken = {value for other in usable for value in _own(other)}
                    if twin := next((value for value in _own(record) if value in taken), None):
                        raise BadRequest(f"another record has {twin!r}, too")
                except _REFUSALS as error:
                    left_out.append(LeftOut(field, f"{field}[{place}]", each, str(error)))
                else:
                    usable.append(record)
            found[field] = tuple(usable)
    for field in (*_OPTIONAL, "program"):
        if field in found:
            try:
                found[field] = msgspec.convert(found[field], _FIELDS[field].type)
            except _REFUSALS as error:
                del found[field]
                left_out.append(LeftOut(field, field, content[field], str(error)))
    # A router without a program serves nothing: the programs before, or those in use here, serve on instead.
    if "program" not in found and "program" in content:
        instead = found.get("before") or (None if known is None else known.program)
        if instead is None:
            raise BadRequest(left_out[-1].reason)
        found["program"] = instead
    return msgspec.convert(found, FleetState), left_out


def _own(record: Any) -> Sequence[str]:
    """Return the name and URL that no other record of its list may have."""
    if isinstance(record, MemberState):
        return record.address.name, record.address.url.rstrip("/")
    return (record.name,) if isinstance(record, AdapterState) else ()


def _encoded(state: FleetState) -> tuple[bytes, FleetState]:
    """Return a state as JSON, and as it will be read; raise :class:`~tercet.protocol.BadRequest` if it cannot be."""
    try:
        known = msgspec.json.encode(state)
        as_read, left_out = _usable(msgspec.json.decode(known, type=dict[str, Any]), None)
    except (*_REFUSALS, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise BadRequest(f"state: the change is refused, since it could not be read again: {error}", "state") from error
    if left_out:
        refused = left_out[0]
        raise BadRequest(
            f"state: the change is refused, since {refused.place} could not be read again: {refused.reason}", "state"
        )
    return known, as_read


def _name_in(content: Any) -> str:
    """Return the name in a record of any form, or an empty text."""
    if not isinstance(content, dict):
        return ""
    named = cast("dict[str, Any]", content)
    name = named.get("name")
    return name if isinstance(name, str) else _name_in(named.get("address"))
