"""Membership of engines that come and go while the router serves: their connections, and the check before they join."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

from tercet.aio import TaskSet
from tercet.fleet.engine_fleet import EngineFleet, Member
from tercet.fleet.kv_events import cache_followed
from tercet.fleet.member_state import MemberState
from tercet.fleet.served_model import ReplacedModel, ServedModel, has_same_text, require_same_text
from tercet.protocol import BadRequest, Engine, EngineError, EngineStatus, EngineUnreachable, KVEvents, TercetError
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.names import bracketed
from tercet.settings import EngineAddress
from tercet.wire.client import Admit, HttpEngine
from tercet.wire.client.scraped_engine import ScrapedEngine
from tercet.wire.streams import StreamListener

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


def connecting(
    fleet: EngineFleet, listener: StreamListener, secret: str = "", tls: ssl.SSLContext | None = None
) -> Connect:
    """Return a function that connects to an engine by name and URL, and passes its reports to ``fleet``.

    Knowledge about an engine's cache is dropped when the engine was restarted. ``secret`` and ``tls`` are those of
    :class:`~tercet.wire.client.HttpEngine`.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        report, restarted = partial(fleet.report, name), asyncio.Event()

        def note_restart() -> None:
            fleet.health.restarted(name)
            restarted.set()

        proposed, hung_up = partial(fleet.proposed, name), partial(fleet.liveness.hung_up, name)
        async with (
            HttpEngine(name, url, listener, report, admit, note_restart, secret, tls, proposed, hung_up) as engine,
            cache_followed(name, url, engine, fleet.knowledge, restarted),
        ):
            yield engine

    return connect


def scraping(
    fleet: EngineFleet,
    interval: float,
    kv_events_port: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> Connect:
    """Return a function that connects to an engine and reads its ``/metrics`` every ``interval`` seconds.

    With ``kv_events_port`` each engine publishes vLLM's KV events on this port of its host. ``tls`` is that of
    :class:`~tercet.wire.client.HttpEngine`. The page needs no key on any vLLM server, so none is sent.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        restarted = asyncio.Event()

        def note_restart() -> None:
            fleet.health.restarted(name)
            restarted.set()

        host = bracketed(urlsplit(url).hostname or "127.0.0.1")
        events = None if kv_events_port is None else KVEvents(f"tcp://{host}:{kv_events_port}")
        reported = partial(fleet.report, name)
        async with (
            ScrapedEngine(name, url, interval, reported, note_restart, tls, events) as engine,
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
        """Make an engine a member, even if it does not answer.

        Raises :class:`~tercet.protocol.Conflict` for a name in use.
        """
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
            if addresses.get(member.name) != member.url:
                self.remove(member.name)
        here, entered = {member.name: member for member in self._fleet.members}, list[Member]()
        for state in wanted:
            name, role = state.address.name, state.address.role
            if name not in here:
                here[name] = await self.enter(state.address)
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
            self._admit(status)

    async def until_ready(self, seconds: float = READY_SECONDS) -> ServedModel:
        """Wait for the first status of any member, and then at most :data:`OTHERS_SECONDS` for those of the others.

        Engines that do not answer are polled later. Returns the model that the engines that answered serve together.
        Raises :class:`~tercet.protocol.EngineUnreachable` if none answers within ``seconds``.
        """
        statuses = await self._first_look(seconds)
        if not statuses:
            raise EngineUnreachable(f"no engine of this fleet answered within {seconds:g} s")
        return ServedModel.of(statuses)

    async def until_all_ready(self, seconds: float = READY_SECONDS) -> ServedModel:
        """Wait for the first status of every member, for the start of a whole fleet.

        Engines that do not answer within ``seconds`` are polled later. Raises
        :class:`~tercet.protocol.EngineUnreachable` if none answers in that time.
        """
        statuses = await self._first_look(seconds, math.inf)
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
                    asks = silent or not member.reachable or member.reported_stamp != member.asked_stamp
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

        Other weights fit if the router's tokenizer, chat template and model names match.
        """
        serves = any(member.reachable for member in self._fleet.members)
        refused = [self._others[id(member)] for member in self._fleet.members if id(member) in self._others]
        found = self._replaced.seen(asyncio.get_running_loop().time(), refused, serves)
        if (
            found is None
            or self.served_model is None
            or self.on_replaced is None
            or not has_same_text(found, self._text)
        ):
            return None
        replaced = self.served_model.of_replaced(found)
        if replaced is None or replaced == self.served_model:
            return None
        self._replaced = ReplacedModel()  # a failed attempt is repeated
        logger.warning("engines: accepting other weights (%s), which all engines have now", replaced.fingerprint)
        return self.on_replaced(replaced)

    async def _ask(self, member: Member) -> None:
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
        found = await self._polled(self._fleet.members, seconds, others)
        if any(isinstance(answer, EngineStatus) for _, answer in found):
            return self._noted(found, seconds)
        for member, _ in found:
            member.reachable = False
        return []

    async def _polled(
        self, members: Sequence[Member], seconds: float, others: float
    ) -> list[tuple[Member, EngineStatus | BaseException]]:
        """Poll members for ``seconds``, and once one has answered at most ``others`` more; return what each answers."""
        if not members:
            return []
        asked = [asyncio.ensure_future(_first_status(member, seconds)) for member in members]
        try:
            await _answers(asked, seconds, others)
        finally:
            for task in asked:
                task.cancel()
        return list(zip(members, await asyncio.gather(*asked, return_exceptions=True), strict=True))

    def _noted(
        self, answers: Sequence[tuple[Member, EngineStatus | BaseException]], seconds: float
    ) -> list[EngineStatus]:
        found: list[EngineStatus] = []
        for member, answer in answers:
            if isinstance(answer, EngineStatus):
                found.append(answer)
                self._answered(member, answer)
            else:
                late = EngineUnreachable(f"{member.name} has not answered within {seconds:g} s")
                member.refused = ""
                self._fleet.health.lost(member, answer if isinstance(answer, TercetError) else late)
        return found

    def _answered(self, member: Member, status: EngineStatus) -> None:
        """Record an engine's status; an engine with another model is not picked, and the reason is logged once."""
        self._fleet.health.heard(member.name, status.stalled_s)
        member.kv_tokens = status.total_blocks * status.block_size
        member.model = status.model
        member.model_dtype = status.model_dtype
        if member.revision != status.revision:
            member.revision = status.revision
        self._fleet.adapters.reported(member, status)
        try:
            self._admit(status)
        except BadRequest as error:
            if id(member) in self._open:
                self._others[id(member)] = status
            self._refuse(member, error)
        else:
            self._refused.pop(id(member), None)
            self._others.pop(id(member), None)
            member.refused = ""
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


async def _answers(asked: Sequence[asyncio.Future[EngineStatus]], seconds: float, others: float) -> None:
    """Wait for all answers, at most ``seconds``, and at most ``others`` seconds after the first status."""
    clock = asyncio.get_running_loop().time
    deadline, answered, waiting = clock() + seconds, False, set(asked)
    while waiting and (left := deadline - clock()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not answered and any(not task.cancelled() and task.exception() is None for task in done):
            answered, deadline = True, min(deadline, clock() + others)


async def _first_status(member: Member, seconds: float) -> EngineStatus:
    """Return a member's status as soon as it answers; a wait is logged once if ``seconds`` exceed a usual poll."""
    is_said = seconds <= ASK_SECONDS
    while True:
        try:
            return await member.engine.status()
        except EngineUnreachable as error:
            if not is_said:
                logger.warning("engines: waiting for %s: %s", member.name, error.message)
            is_said = True
            await asyncio.sleep(FIRST_POLL_INTERVAL_S)
        except TercetError as error:
            if not is_said:
                logger.error("engines: the server of %s is not a Tercet engine: %s", member.name, error.message)
            raise
