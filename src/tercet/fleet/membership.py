"""Membership of engines that come and go while the router serves: their connections, and the check before they join.

Engines that join or return must match what was announced to clients (:class:`ServedModel`: names, context length and
weights) and the router's tokenizer and chat template. A model that all engines replaced in place is accepted after a
while: :class:`ReplacedModel`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

import msgspec

from tercet.aio.tasks import TaskSet
from tercet.fleet.engine_fleet import EngineFleet, Member
from tercet.fleet.kv_events import cache_followed
from tercet.fleet.members import MemberState
from tercet.protocol import BadRequest, Engine, EngineError, EngineStatus, EngineUnreachable, MemberRole, TercetError
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.names import STORE
from tercet.settings import EngineAddress
from tercet.wire.client import Admit, HttpEngine, StreamListener

REPLACED_AFTER_S = 5.0
"""Seconds for which no engine serves and all that answer agree, until the model counts as replaced."""


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was announced to clients when the fleet began to serve: model names, context length and weights."""

    models: tuple[str, ...]
    max_model_len: int  # in tokens
    fingerprint: str = ""  # of the weights; empty if it is not known

    @classmethod
    def of(cls, statuses: Sequence[EngineStatus]) -> ServedModel:
        """Return the model that these engines (at least one) serve together.

        Only engines with the same weights as the first one count.
        """
        fingerprint = statuses[0].fingerprint
        alike = [status for status in statuses if status.fingerprint == fingerprint]
        models = sorted({status.model for status in alike})
        return cls(tuple(models), min(status.max_model_len for status in alike), fingerprint)

    def require_kept(self, status: EngineStatus) -> None:
        if status.model not in self.models:
            ours = ", ".join(self.models)
            raise BadRequest(
                f"url: the engine at this URL serves the model {status.model}, and this fleet serves {ours}", "url"
            )
        if self.fingerprint and status.fingerprint != self.fingerprint:
            raise BadRequest(
                f"url: the engine at this URL serves other weights (fingerprint {status.fingerprint or 'not reported'}"
                f") than this fleet ({self.fingerprint})",
                "url",
            )
        if status.max_model_len < self.max_model_len:
            raise BadRequest(
                f"url: the engine at this URL has max_model_len {status.max_model_len}, and this router has announced "
                f"{self.max_model_len} to its clients",
                "url",
            )


def require_role(status: EngineStatus, role: MemberRole) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a store in an engine's role, and for an engine in a store's."""
    if status.is_store != (role == STORE):
        what, rule = ("a store", f"must be {STORE}") if status.is_store else ("an engine", f"cannot be {STORE}")
        raise BadRequest(f"role: {status.engine} is {what}, so its role {rule}", "role")


def has_same_text(status: EngineStatus, text: TextFingerprint) -> bool:
    """True if an engine has this tokenizer and chat template; what either side does not report is not compared."""
    pairs = (status.text.tokenizer, text.tokenizer), (status.text.chat_template, text.chat_template)
    return all(theirs == ours or not theirs or not ours for theirs, ours in pairs)


def require_same_text(status: EngineStatus, text: TextFingerprint, param: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an engine with another tokenizer or chat template."""
    if has_same_text(status, text):
        return
    if status.text.tokenizer and text.tokenizer and status.text.tokenizer != text.tokenizer:
        what, remedy = "tokenizer", "use the same --model and --tokenizer for the router as for its engines"
        theirs, ours = status.text.tokenizer, text.tokenizer
    else:
        what = "chat template"
        remedy = "give the router the same checkpoint, or the right template by --chat-template"
        theirs, ours = status.text.chat_template, text.chat_template
    raise BadRequest(
        f"{param}: the engine {status.engine} has another {what} (fingerprint {theirs}) than this router "
        f"({ours}), so its token ids have other meanings; {remedy}",
        param,
    )


class ReplacedModel:
    """The statuses of engines that answer and are refused, while no engine serves."""

    def __init__(self) -> None:
        self._agreed: EngineStatus | None = None
        self._since = 0.0

    def seen(self, now: float, refused: Sequence[EngineStatus], any_serves: bool) -> EngineStatus | None:
        """Return a status of the replaced model once all ``refused`` engines have agreed long enough; None until then.

        They agree on model, weights and text for :data:`REPLACED_AFTER_S` seconds. ``max_model_len`` of the returned
        status is the smallest one of these engines.
        """
        alike = len({_identity(status) for status in refused}) == 1
        # While some engine serves the announced model, the others are a rollout that is under way, or a mistake.
        if any_serves or not alike:
            self._agreed = None
            return None
        if self._agreed is None or _identity(self._agreed) != _identity(refused[0]):
            # A new agreement begins: all engines must agree on the same model for the whole time.
            self._agreed, self._since = refused[0], now
        shortest = min(status.max_model_len for status in refused)
        replaced = msgspec.structs.replace(refused[0], max_model_len=shortest)
        return replaced if now - self._since >= REPLACED_AFTER_S else None


def _identity(status: EngineStatus) -> tuple[str, str, TextFingerprint]:
    return status.model, status.fingerprint, status.text


Connect = Callable[[str, str, Admit], AbstractAsyncContextManager[Engine]]
"""Connects to an engine. Arguments: name, URL, and a function that raises for an engine that must not serve here."""
logger = logging.getLogger("tercet.fleet")
POLL_INTERVAL_S = 0.5
FIRST_POLL_INTERVAL_S = 0.2
REPORTED_WITHIN = 1.0
"""Seconds without a report after which an engine's status is polled."""
READY_SECONDS = 600.0
CLOSE_SECONDS = 10.0
ASK_SECONDS = 5.0
OTHERS_SECONDS = 2.0
"""Seconds that a starting router waits for further engines once one has answered."""


def restarts_of(fleet: EngineFleet, name: str) -> tuple[asyncio.Event, Callable[[], None]]:
    """Return an event for restarts of an engine, and the function that records one."""
    restarted = asyncio.Event()

    def note_restart() -> None:
        fleet.health.restarted(name)
        restarted.set()

    return restarted, note_restart


def connecting(
    fleet: EngineFleet, listener: StreamListener, secret: str = "", tls: ssl.SSLContext | None = None
) -> Connect:
    """Return a function that connects to an engine by name and URL, and passes its reports to ``fleet``.

    Knowledge about an engine's cache is dropped when the engine was restarted. ``secret`` and ``tls`` are those of
    :class:`~tercet.wire.client.HttpEngine`.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        report, (restarted, note_restart) = partial(fleet.report, name), restarts_of(fleet, name)
        proposed, hung_up = partial(fleet.proposed, name), partial(fleet.liveness.hung_up, name)
        async with (
            HttpEngine(name, url, listener, report, admit, note_restart, secret, tls, proposed, hung_up) as engine,
            cache_followed(name, url, engine, fleet.knowledge, restarted),
        ):
            yield engine

    return connect


class Membership:
    """The members of ``fleet``: adds and removes engines, whose connections ``connect`` opens.

    Use as an async context manager; its end closes every connection. ``served_model`` is None until it is known. When
    all engines serve other weights, ``on_replaced`` gets the model with these, and must set ``served_model``.
    """

    def __init__(self, fleet: EngineFleet, connect: Connect) -> None:
        self.served_model: ServedModel | None = None
        self.on_replaced: Callable[[ServedModel], Coroutine[Any, Any, object]] | None = None
        self._replaced = ReplacedModel()
        self._others: dict[int, EngineStatus] = {}
        self._text = TextFingerprint()
        self._fleet = fleet
        self._connect = connect
        self._open: dict[int, tuple[Member, AsyncExitStack]] = {}
        self._closing = TaskSet()
        self._refused: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for member, _ in list(self._open.values()):
            self._close(member)
        await self._closing.wait(CLOSE_SECONDS)

    async def enter(self, address: EngineAddress) -> Member:
        # The connection belongs to this stack until the member is there: a failure in between closes it.
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._connect(address.name, address.url, self._admit))
            member = Member(address.name, address.url, address.role, engine, labels=address.labels)
            self._fleet.add(member)
            self._open[id(member)] = member, stack.pop_all()
        return member

    async def become(self, wanted: Sequence[MemberState]) -> list[Member]:
        """Make the members equal to ``wanted``; an engine at another URL is another engine.

        Returns the new members. They are not picked until they have answered.
        """
        addresses = {state.address.name: state.address.url for state in wanted}
        for member in self._fleet.members:
            # Removals first: a name may move to another URL.
            if addresses.get(member.name) != member.url:
                self.remove(member.name)
        here, entered = {member.name: member for member in self._fleet.members}, list[Member]()
        for state in wanted:
            name, role = state.address.name, state.address.role
            if name not in here:
                here[name] = await self.enter(state.address)
                # Until it has answered: the check of its model is part of that.
                here[name].reachable = False
                entered.append(here[name])
            if here[name].role != role:
                here[name].role = role
            here[name].labels = state.address.labels
            if here[name].draining != state.leaving:
                self._fleet.drain(name, state.leaving)
        return entered

    async def check(self, address: EngineAddress) -> None:
        """Check that an engine may join.

        Raises :class:`~tercet.protocol.EngineUnreachable` if it does not answer, and
        :class:`~tercet.protocol.BadRequest` if its model, weights, context or tokenizer do not fit.
        """
        async with self._connect(address.name, address.url, lambda _: None) as engine:
            try:
                status = await engine.status()
            except EngineUnreachable:
                raise
            except TercetError as error:
                raise BadRequest(f"url: the server at {address.url} is not a Tercet engine: {error}", "url") from error
            require_role(status, address.role)
            self._admit(status)

    async def until_ready(self, seconds: float = READY_SECONDS, others: float = OTHERS_SECONDS) -> ServedModel:
        """Wait for the first status of any member, and then at most ``others`` seconds for those of the others.

        Engines that do not answer are polled later. Returns the model that the engines that answered serve together.
        Raises :class:`~tercet.protocol.EngineUnreachable` if none answers within ``seconds``.
        """
        statuses = await self._first_look(seconds, others)
        if not statuses:
            raise EngineUnreachable(f"no engine of this fleet answered within {seconds:g} s")
        return ServedModel.of(statuses)

    async def until_one_answers(self, seconds: float = READY_SECONDS) -> ServedModel:
        """Wait until any member answers, while members still come and go.

        Returns the model that the engines that answered serve together. Raises
        :class:`~tercet.protocol.EngineUnreachable` if none answers within ``seconds``.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while not (statuses := await self._first_look(ASK_SECONDS)):
            if asyncio.get_running_loop().time() > deadline:
                raise EngineUnreachable(f"no engine that answers was found within {seconds:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)
        return ServedModel.of(statuses)

    def remove(self, name: str) -> Member:
        """Remove an engine at once; its connection is closed when the last sequence on it has ended."""
        # It is out of picks at once. Its sequences go on over the connection, which their end closes.
        member = self._fleet.remove(name)
        if member.in_flight:
            member.when_idle = lambda: self._close(member)
        else:
            self._close(member)
        return member

    async def watch(self) -> None:
        """Detect engines that are stuck, lost or back, until cancelled.

        Engines are polled at the same time: a slow answer delays no other poll.
        """
        questions, asking = TaskSet(), dict[int, asyncio.Task[None]]()
        try:
            while True:
                asking = {key: task for key, task in asking.items() if not task.done()}
                for member in self._fleet.members:
                    silent = not self._fleet.health.heard_within(member.name, REPORTED_WITHIN)
                    # Reports over the connection show that an engine lives; only its status says which adapters it has.
                    asks = silent or not member.reachable or member.reported_stamp != member.asked_stamp
                    # One question at a time: an engine that is slow would get ever more of them.
                    if asks and id(member) not in asking:
                        asking[id(member)] = questions.spawn(self._ask(member), f"status poll of {member.name}")
                self._fleet.health.stand_still(POLL_INTERVAL_S)
                if (replaced := self._noticed_replaced()) is not None:
                    questions.spawn(replaced, "replaced model")
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            await questions.close()

    def _noticed_replaced(self) -> Coroutine[Any, Any, object] | None:
        """Return the call of ``on_replaced`` if all engines have other weights that fit; None otherwise.

        Other weights fit if the router's tokenizer and chat template match, and what was announced still holds: a name
        of the model, and a context that is at least as long.
        """
        # While one engine still serves the old weights, the others are wrong; if all have the same new ones, the fleet
        # was given another model.
        engines = self._engines()  # a store keeps the weights of its start
        serves = any(member.reachable for member in engines)
        refused = [self._others[id(member)] for member in engines if id(member) in self._others]
        status, served = self._replaced.seen(asyncio.get_running_loop().time(), refused, serves), self.served_model
        if status is None or served is None or self.on_replaced is None or not has_same_text(status, self._text):
            return None
        if status.model not in served.models or status.max_model_len < served.max_model_len:
            return None
        replaced = msgspec.structs.replace(served, fingerprint=status.fingerprint)
        if replaced == served:
            return None
        self._replaced = ReplacedModel()  # a failed attempt is repeated
        logger.warning("engines: accepting other weights (%s), which all engines have now", replaced.fingerprint)
        return self.on_replaced(replaced)

    async def _ask(self, member: Member) -> None:
        # Taken before the call: adapters that are loaded during it are asked for again.
        stamp = member.reported_stamp
        try:
            self._answered(member, await member.engine.status())
            member.asked_stamp = stamp
        except EngineUnreachable as error:
            member.refused = ""
            self._others.pop(id(member), None)
            self._fleet.health.lost(member, error)
        except TercetError as error:
            logger.debug("%s answers: %s", member.name, error)
        except Exception as error:  # for example of a connection that was closed in the meantime
            self._refuse(member, EngineError(f"{type(error).__name__}: {error}"))

    async def ask(self, members: Sequence[Member]) -> None:
        """Poll ``members`` now, for a few seconds; the watch continues to poll those that did not answer."""
        asked = [asyncio.ensure_future(self._ask(member)) for member in members]
        if asked:
            _, late = await asyncio.wait(asked, timeout=ASK_SECONDS)
            for task in late:
                task.cancel()

    async def look(
        self, seconds: float = POLL_INTERVAL_S, members: Sequence[Member] | None = None
    ) -> list[EngineStatus]:
        """Poll ``members`` (None: all) for ``seconds``, and return their statuses.

        Members that do not answer in time become unreachable.
        """
        members = self._fleet.members if members is None else members
        return self._noted(await self._polled(members, seconds, math.inf), seconds)

    async def _first_look(self, seconds: float, others: float = OTHERS_SECONDS) -> list[EngineStatus]:
        """Poll all members before the first service, and return their statuses, or none after ``seconds``.

        Once one has answered, the others have ``others`` more seconds. While none answers, none is reported as lost:
        engines and router start at the same time.
        """
        found = await self._polled(self._engines(), seconds, others)
        if any(isinstance(answer, EngineStatus) for _, answer in found):
            return self._noted(found, seconds)
        # Not lost, since it never answered: the log says at the start that it is waited for.
        for member, _ in found:
            member.reachable = False
        return []

    def _engines(self) -> list[Member]:
        return [member for member in self._fleet.members if not member.is_store]

    async def _polled(
        self, members: Sequence[Member], seconds: float, others: float
    ) -> list[tuple[Member, EngineStatus | BaseException]]:
        """Poll members for ``seconds``, and once one has answered at most ``others`` more; return what each answers."""
        if not members:
            return []
        asked = [asyncio.ensure_future(_first_status(member, seconds)) for member in members]
        clock = asyncio.get_running_loop().time
        # The first answer shortens the wait: a fleet serves with what is there, and engines that come later join it.
        deadline, answered, waiting = clock() + seconds, False, set(asked)
        try:
            while waiting and (left := deadline - clock()) > 0:
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not answered and any(not task.cancelled() and task.exception() is None for task in done):
                    answered, deadline = True, min(deadline, clock() + others)
        finally:
            for task in asked:
                task.cancel()
        return list(zip(members, await asyncio.gather(*asked, return_exceptions=True), strict=True))

    def _noted(
        self, answers: Sequence[tuple[Member, EngineStatus | BaseException]], seconds: float
    ) -> list[EngineStatus]:
        statuses: list[EngineStatus] = []
        for member, answer in answers:
            if isinstance(answer, EngineStatus):
                statuses.append(answer)
                self._answered(member, answer)
            else:
                late = EngineUnreachable(f"{member.name} has not answered within {seconds:g} s")
                member.refused = ""
                self._fleet.health.lost(member, answer if isinstance(answer, TercetError) else late)
        return statuses

    def _answered(self, member: Member, status: EngineStatus) -> None:
        """Record an engine's status; an engine with another model is not picked, and the reason is logged once."""
        self._fleet.health.heard(member.name, status.stalled_s)
        member.kv_tokens = status.total_blocks * status.block_size
        member.model = status.model
        member.model_dtype = status.model_dtype
        if member.revision != status.revision:
            member.revision = status.revision
        if member.incarnation != status.incarnation:
            first = not member.incarnation
            member.restarts += not first
            member.incarnation, member.since = status.incarnation, time.time()
            if first:  # a restart is noticed by the connection
                self._fleet.when_started(member)
        self._fleet.adapters.reported(member, status)
        try:
            require_role(status, member.role)
            self._admit(status)
        except BadRequest as error:
            if id(member) in self._open:
                self._others[id(member)] = status
            self._refuse(member, error)
        else:
            self._refused.pop(id(member), None)
            self._others.pop(id(member), None)
            member.refused = ""
            # An answer does not show progress: a stuck engine's API server answers too.
            if not self._fleet.liveness.is_stuck(member.name):
                self._fleet.health.found_well(member)

    async def speak(self, text: TextFingerprint) -> None:
        """Require the tokenizer and chat template of ``text`` of all engines from now on.

        A fingerprint that either side does not report is not compared. Raises :class:`~tercet.protocol.BadRequest` if
        engines answer and none of them matches.
        """
        self._text = text
        # Do not wait here for engines that do not answer: the watch polls them.
        answered = await self.look(ASK_SECONDS, [member for member in self._fleet.members if member.reachable])
        wrong = [status for status in answered if not has_same_text(status, text)]
        if wrong and len(wrong) == len(answered):
            require_same_text(wrong[0], text, "model")

    def _admit(self, status: EngineStatus) -> None:
        if self.served_model is not None:
            self.served_model.require_kept(status)
        require_same_text(status, self._text, "url")

    def _refuse(self, member: Member, error: TercetError) -> None:
        if id(member) not in self._open:  # it was removed
            return
        member.reachable = False
        member.refused = error.message.removeprefix(f"{error.param}: ")
        if self._refused.get(id(member)) != error.message:
            self._refused[id(member)] = error.message
            self._fleet.health.refused(member, error)

    def _close(self, member: Member) -> None:
        found = self._open.pop(id(member), None)
        self._refused.pop(id(member), None)
        self._others.pop(id(member), None)
        if found is not None:  # at the router's end all connections are closed, also those with sequences
            self._closing.spawn(found[1].aclose())


async def _first_status(member: Member, seconds: float) -> EngineStatus:
    """Return a member's status as soon as it answers; a wait is logged once if ``seconds`` exceed a usual poll."""
    is_logged = seconds <= ASK_SECONDS
    while True:
        try:
            return await member.engine.status()
        except EngineUnreachable as error:
            if not is_logged:
                logger.warning("engines: waiting for %s: %s", member.name, error.message)
            is_logged = True
            await asyncio.sleep(FIRST_POLL_INTERVAL_S)
        except TercetError as error:
            if not is_logged:
                logger.error("engines: the server of %s is not a Tercet engine: %s", member.name, error.message)
            raise
