"""What operators have decided about a fleet, as one record with a version, which routers share and follow.

:class:`FleetState` is pure: each method returns the state after a change, or refuses it. :class:`StateFile` holds the
newest one: a change is made of the newest only, and readers see a whole state or the one before it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from tercet.fleet.discovery import FoundEngine, with_found
from tercet.fleet.membership import JOINED, MemberState, Promise
from tercet.protocol import BadRequest, Conflict, EngineError, Role, UnknownEngine
from tercet.protocol.wire import UNREADABLE
from tercet.router.routing import Plan
from tercet.router.state_store import LOCK_SECONDS, RETRY_DELAY_S, FileStore, SharedTurn, StateStore, Stored
from tercet.router.unknown_fields import known_part, unknown_names, with_unknown
from tercet.settings import EngineAddress, RouterConfig

logger = logging.getLogger("tercet.router")


class ProgramInUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, and its number: a plan that is asked for again is loaded again."""

    number: int
    plan: Plan


class SchedulingInUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scheduling file's path, or what it is called and its content; and how often one was asked for."""

    number: int
    file: str
    content: str | None = None


class AdapterState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that the engines of a fleet are to have; ``digest`` is empty until one of them has loaded it."""

    name: str
    path: str
    digest: str = ""


class MadeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the change to that version did: an event of the log, its fields, and who asked, or which file changed."""

    version: int
    event: str
    fields: dict[str, str | int]
    reason: str


class FleetState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Members, programs, scheduling and adapters.

    ``before`` are the programs to which routers return from failing ones. ``changes`` are the last
    ones, oldest first, for routers that find several at once. ``role_keeper`` is the process that decides about roles:
    one that was stopped for long finds another name there, and its changes are refused.
    """

    version: int = 1
    members: tuple[MemberState, ...]
    program: ProgramInUse
    before: ProgramInUse | None = None
    scheduling: SchedulingInUse | None = None
    promise: Promise | None = None
    adapters: tuple[AdapterState, ...] = ()
    changes: tuple[MadeChange, ...] = ()
    role_keeper: str = ""

    @classmethod
    def of(cls, config: RouterConfig) -> FleetState:
        """The state that a router begins with when there is none yet."""
        return cls(
            members=tuple(MemberState(address) for address in config.engines),
            program=ProgramInUse(1, Plan(program=config.program, args=config.program_args)),
            scheduling=None if config.scheduling is None else SchedulingInUse(1, config.scheduling),
            adapters=tuple(AdapterState(name, path) for name, path in config.lora_modules.items()),
        )

    def following(self, known: FleetState) -> FleetState:
        """This state if it is ``known`` or newer; else it is another that was put there, and comes after ``known``."""
        if self.version > known.version or self == known:
            return self
        after = known.with_program(self.program.plan)
        if self.scheduling is not None:
            after = after.with_scheduling(self.scheduling.file, self.scheduling.content)
        return msgspec.structs.replace(after, members=self.members, adapters=self.adapters)

    def with_program(self, plan: Plan) -> FleetState:
        """Requests from now on are served under ``plan``."""
        following = ProgramInUse(self.program.number + 1, plan)
        return msgspec.structs.replace(self, program=following, before=self.program)

    def with_scheduling(self, file: str, content: str | None = None) -> FleetState:
        """Picks from now on go by ``file``, as it is now, or by the ``content`` that is called so."""
        number = 1 if self.scheduling is None else self.scheduling.number + 1
        return msgspec.structs.replace(self, scheduling=SchedulingInUse(number, file, content))

    def with_promise(self, promise: Promise) -> FleetState:
        """The first promise stands."""
        return self if self.promise is not None else msgspec.structs.replace(self, promise=promise)

    def with_replaced(self, promise: Promise) -> FleetState:
        """Another promise stands, since engines serve other weights."""
        return self if self.promise == promise else msgspec.structs.replace(self, promise=promise)

    def with_adapter(self, adapter: AdapterState) -> FleetState:
        """One more adapter for all engines. Raises :class:`~tercet.protocol.Conflict` if its name is another one's."""
        others = tuple(each for each in self.adapters if each.name != adapter.name)
        for each in self.adapters:
            if each.name == adapter.name and each.path != adapter.path:
                raise Conflict(f"name: {each.name!r} is the adapter at {each.path}; unload it first", "name")
        return msgspec.structs.replace(self, adapters=(*others, adapter))

    def without_adapter(self, name: str) -> FleetState:
        """No engine needs it any more; one that was never here is fine."""
        left = tuple(each for each in self.adapters if each.name != name)
        return self if left == self.adapters else msgspec.structs.replace(self, adapters=left)

    def with_member(self, address: EngineAddress) -> FleetState:
        """One more engine. Raises :class:`~tercet.protocol.Conflict` if its name or URL is taken."""
        for member in self.members:
            if member.address.name == address.name:
                raise Conflict(f"name: an engine called {address.name!r} is in this fleet already", "name")
            if member.address.url.rstrip("/") == address.url.rstrip("/"):
                raise Conflict(f"url: {address.url} is in this fleet already, as {member.address.name}", "url")
        return msgspec.structs.replace(self, members=(*self.members, MemberState(address)))

    def with_joined(self, address: EngineAddress, uid: str, withheld: str) -> FleetState:
        """An engine is a member by its own will, or still is; what an operator said of this start of it holds.

        Raises :class:`~tercet.protocol.Conflict` if its name or URL is another engine's.
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
        """This start of an engine has left; one that is not a member is fine."""
        left = tuple(each for each in self.members if (each.address.name, each.uid) != (name, JOINED + uid))
        return self if left == self.members else msgspec.structs.replace(self, members=left)

    def without_member(self, name: str) -> FleetState:
        """The engine is forgotten. Raises :class:`~tercet.protocol.UnknownEngine`."""
        gone = self._member(name)
        return msgspec.structs.replace(self, members=tuple(each for each in self.members if each is not gone))

    def with_role(self, name: str, role: Role) -> FleetState:
        """Another role for an engine. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self._member(name)
        address = msgspec.structs.replace(member.address, role=role)
        return self._with(member, msgspec.structs.replace(member, address=address))

    def with_flip(self, names: Sequence[str], role: Role) -> FleetState:
        """The role of several engines at once; the same state if one has left, or the role of one is another by now.

        An operator's change is not undone by a decision that was made before it.
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
        """Another process decides about roles from now on."""
        return self if self.role_keeper == name else msgspec.structs.replace(self, role_keeper=name)

    def require_role_keeper(self, name: str) -> FleetState:
        """The same state; raises :class:`~tercet.protocol.Conflict` if another process decides about roles by now."""
        if self.role_keeper != name:
            raise Conflict(f"roles: {self.role_keeper or 'an operator'} decides by now, and not {name}")
        return self

    def with_draining(self, name: str, draining: bool) -> FleetState:
        """An engine is picked for nothing new, or again. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self._member(name)
        return self._with(member, msgspec.structs.replace(member, draining=draining))

    def with_found(self, found: Sequence[FoundEngine], told: Mapping[str, Role]) -> FleetState:
        """Those of its members that are found become ``found``; see :func:`tercet.fleet.discovery.with_found`."""
        members = with_found(self.members, found, told)
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
"""Of a file without ``format``. Fields may be added to it; what is incompatible has another one."""
_KIND = msgspec.inspect.type_info(FleetState)


class StateFile:
    """The newest state of a fleet, at ``path`` or in another ``store``. Every method does I/O; any process may use any.

    Fields that a later Tercet has added to the content are kept by changes, and named in the log.
    """

    def __init__(self, path: Path, store: StateStore | None = None) -> None:
        self.path = path
        self._store = FileStore(path) if store is None else store
        self._told: set[str] = set()

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self._store.name

    def stamp(self) -> object:
        """See :meth:`~tercet.router.state_store.StateStore.stamp`."""
        return self._store.stamp()

    def turn(self, what: str) -> SharedTurn:
        """See :meth:`~tercet.router.state_store.StateStore.turn`."""
        return self._store.turn(what)

    def read(self) -> FleetState | None:
        """The state; None without one. Raises :class:`~tercet.protocol.BadRequest` for what is not a state."""
        return self._understood(self._store.load())[0]

    def _understood(self, stored: Stored) -> tuple[FleetState | None, Any]:
        """The state, and the same as it is stored."""
        if stored.content is None:
            return None, None
        try:
            content = msgspec.json.decode(stored.content)
            self._require_format(content)
            unknown = list(unknown_names(content, _KIND))
            state = msgspec.convert(known_part(content, _KIND), FleetState)
        except (BadRequest, *UNREADABLE) as error:
            raise BadRequest(f"state: {self.name} is not the state of a fleet: {error}", "state") from error
        if not self._told.issuperset(unknown):
            self._told.update(unknown)
            logger.warning(
                "state: %s has fields that this version of Tercet does not know; they are kept, and have no effect "
                "here: %.1000s", self.name, ", ".join(unknown),
            )  # fmt: skip
        return state, content

    def _require_format(self, content: Any) -> None:
        said = cast("dict[str, Any]", content).get("format", FORMAT) if isinstance(content, dict) else FORMAT
        if said != FORMAT:
            raise BadRequest(
                f"its format is {said!r:.100}, and this version of Tercet reads {FORMAT}. Run the version that wrote "
                "it, or a later one; or name another file (--state), and add the engines there"
            )

    def update(self, change: Callable[[FleetState], FleetState], otherwise: FleetState) -> FleetState:
        """Change the state, which is ``otherwise`` if there is none, and return the one that holds now.

        A change that returns its argument writes nothing; one may be called again if another process was faster. Raises
        what ``change`` raises, and then nothing changes; :class:`~tercet.protocol.TercetError` as :meth:`read`, and for
        a store that cannot be written.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            stored = self._store.load()
            found, content = self._understood(stored)
            before = otherwise if found is None else found
            after = change(before)
            if after is not before:
                after = msgspec.structs.replace(after, version=after.version + 1)
            if after is found:
                return after
            known = msgspec.json.encode(after)
            written = known
            if content is not None:
                written = msgspec.json.encode(with_unknown(msgspec.json.decode(known), content, _KIND))
            if self._store.store(msgspec.json.format(written), stored.mark):
                return msgspec.json.decode(known, type=FleetState)  # as it will be read
            time.sleep(random.uniform(0, RETRY_DELAY_S))
        raise EngineError(f"state: other processes have changed {self.name} for {LOCK_SECONDS:.0f} s without an end")
