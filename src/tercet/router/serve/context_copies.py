"""Copies of KV in the background: prompts to stores, and the most wanted contexts of engines that leave or start.

Write-behind copies the prompts that engines have computed to stores, after their first token and on no path. The copies
of a process wait in a short queue and go one after the other, so a slow store or a burst of prompts costs copies and
never a request: what does not fit is dropped, and what fails is not repeated.

An engine that leaves passes the most wanted contexts on, and one that starts gets them before it is picked.

::

    drain, SIGTERM    engine ── contexts that no other has ──▶ store, or the engine with the most room
    start, restart    store, or an engine that has them ─────▶ engine, which is not picked until that ends

Which contexts these are, each process knows by the requests that it has served. Each engine has its own copies, one
after the other, within ``seconds``; what fails is not repeated, and none of it is on the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import zlib
from collections import deque
from contextlib import AsyncExitStack, suppress

import msgspec
from msgspec.structs import replace

from tercet.aio.tasks import TaskSet
from tercet.decisions.contexts import CopyPlan, Wanted, WantedContexts
from tercet.fleet import EngineFleet, FleetView, Trace
from tercet.fleet.fleet_view import Generation
from tercet.fleet.members import Member, UntilLost
from tercet.logs import CONTEXTS_KEPT, ENGINE_WARM
from tercet.protocol import EngineUnreachable, NoSpace, Request, Reservation, TercetError, kv_obstacle, packed
from tercet.router.observe.metrics import CopyOutcome, CopyReason, HotContextMetrics, WriteBehindMetrics

logger = logging.getLogger("tercet.router")


async def _send_cached(source: Member, request: Request, space: Reservation) -> tuple[CopyOutcome, int]:
    """Have ``source`` send what it has cached and the receiver lacks; return the outcome, and the tokens sent."""
    if space.to_send < space.kv_addr_info.layout.block_size:
        return "held", 0
    sent = await source.engine.remote_send(request, space, space.matched_len, cached_only=True)
    tokens = sent.end - space.matched_len
    return ("copied" if tokens else "gone"), tokens


# ---- write-behind ----------------------------------------------------------------------------------------------------

# Copies that wait: the oldest prompts come first, and a new one is dropped when as many wait.
MOST_WAITING = 64
COPY_SECONDS = 10.0
# Tokens at a prompt's beginning that choose its store, so that prompts with one beginning share blocks there.
HEAD_TOKENS = 64


class WriteBehind:
    """The copies of this router process, from the engines of ``fleet`` to its stores; :meth:`run` makes them."""

    def __init__(self, fleet: EngineFleet, metrics: WriteBehindMetrics) -> None:
        self._fleet, self._metrics = fleet, metrics
        self._waiting: deque[tuple[Request, str, Member]] = deque()
        self._more = asyncio.Event()
        fleet.on_answered.append(self.answered)

    async def run(self) -> None:
        while True:
            while self._waiting:
                await self._copy(*self._waiting.popleft())
            self._more.clear()
            await self._more.wait()

    def answered(self, generation: Generation) -> None:
        """Queue the copy of a prompt whose first token an engine has sent; do nothing without a store for it."""
        request, engine = generation.request, self._fleet.get(generation.engine.name)
        if engine is None or engine.leaving or (request.adapter is not None and not request.adapter_digest):
            return
        stores = stores_for(self._fleet, request, engine)
        if not stores:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._metrics.ended("dropped")
            return
        # Without images' data: the copy names the KV that the engine has, and nothing is computed for it. It needs an
        # id that differs from the sequence's, which still runs on that engine.
        features = tuple(each.without_data() for each in request.mm_features)
        copied = replace(request, seq_id=f"{request.seq_id}-copy", mm_features=features, sampling_params={})
        self._waiting.append((copied, engine.name, stores[0]))
        self._more.set()

    async def _copy(self, request: Request, name: str, store: Member) -> None:
        engine = self._fleet.get(name)
        outcome: CopyOutcome = "failed"
        tokens = 0
        try:
            if engine is None or engine.leaving or not engine.reachable or not store.reachable:
                return
            async with asyncio.timeout(COPY_SECONDS), store.engine.prep_recv(request) as space:
                outcome, tokens = await _send_cached(engine, request, space)
        except NoSpace:
            outcome = "dropped"
        except (TercetError, TimeoutError) as error:
            logger.debug("%s was not copied from %s to %s: %s", request.seq_id, name, store.name, error)
        finally:
            self._metrics.ended(outcome, tokens)


def stores_for(fleet: EngineFleet, request: Request, engine: Member) -> list[Member]:
    """Return the stores for a prompt that ``engine`` has, first the one that keeps prompts with this beginning.

    There is none for a prompt that is shorter than a block.
    """
    stores = [member for member in fleet.members if _fits(member, request, engine)]
    if not stores:
        return []
    # Rendezvous hashing: a store that comes or goes moves only the prompts that it keeps.
    head = packed(request.prompt[:HEAD_TOKENS])
    return sorted(stores, key=lambda each: zlib.crc32(head, zlib.crc32(each.name.encode())), reverse=True)


def _fits(store: Member, request: Request, engine: Member) -> bool:
    if not store.is_store or not store.is_open or not store.reachable or store.revision.layout is None:
        return False
    long_enough = request.num_tokens >= store.revision.layout.block_size
    return long_enough and not kv_obstacle(engine.revision, store.revision)


# ---- the most wanted contexts ----------------------------------------------------------------------------------------

SHARE = 0.5
"""Share of an engine's KV that copies to it, or from it, may fill."""
MOST_CONTEXTS = 512
"""Contexts that a leaving engine is asked for: it may have few of them."""
LOOK_SECONDS = 0.1
REMEMBERED = 100


class Passed(msgspec.Struct):
    """Contexts that went to one place, and their tokens that were sent."""

    contexts: int = 0
    tokens: int = 0


class ContextsPassedOn(msgspec.Struct):
    """What became of a leaving engine's most wanted contexts that no other engine or store had, from the start on.

    ``to`` counts by name of the receiver, ``dropped`` by reason. ``rest`` is the reason why no more were tried, empty
    if all were. ``at`` is a Unix time.
    """

    number: int
    engine: str
    at: float
    to: dict[str, Passed] = {}
    dropped: dict[str, int] = {}
    rest: str = ""
    is_over: bool = False

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def end(self, _: object) -> None:
        self.is_over = True


class HotContexts:
    """The copies of this router process, one of ``processes`` that share the fleet; 0 ``seconds`` are not allowed."""

    def __init__(self, fleet: EngineFleet, metrics: HotContextMetrics, seconds: float, processes: int = 1) -> None:
        self.wanted = WantedContexts()
        self._fleet, self._metrics = fleet, metrics
        self._seconds, self._processes = seconds, processes
        self._clock = fleet.costs.clock
        self._tasks = TaskSet()
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._record: deque[ContextsPassedOn] = deque(maxlen=REMEMBERED)
        self._count = 0
        self._name, self._ids = f"hot-{uuid.uuid4().hex[:12]}", 0
        fleet.on_answered.append(self.answered)
        fleet.when_started = self.started
        fleet.when_reopened.append(self.reopened)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self._tasks.close()

    def since(self, number: int) -> list[ContextsPassedOn]:
        """Return the records after ``number`` of engines that left; only the last :data:`REMEMBERED` are kept."""
        return [each for each in self._record if each.number > number]

    def answered(self, generation: Generation) -> None:
        """Count a prompt whose first token an engine has sent."""
        request = generation.request
        if len(self._fleet.members) > 1 and (request.adapter is None or request.adapter_digest):
            self.wanted.asked(request, self._clock())
            self._fleet.picking.note_routed(request, [generation.engine.name])

    # ---- an engine that leaves -----------------------------------------------------------------------------------

    def reopened(self) -> None:
        """Begin the copies from engines that have begun to leave, and end those from engines that stay after all."""
        leaving = {member.name: member for member in self._fleet.members if member.leaving and not member.is_store}
        for name in self._leaving.keys() - leaving.keys():
            self._leaving.pop(name).cancel()
        for name, member in leaving.items():
            if name not in self._leaving and self.wanted:
                self._count += 1
                record = ContextsPassedOn(self._count, name, time.time())
                self._record.append(record)
                task = self._tasks.spawn(self._pass_on(member, record), f"hot contexts of {name}")
                task.add_done_callback(record.end)  # also if it never ran
                self._leaving[name] = task

    async def _pass_on(self, member: Member, record: ContextsPassedOn) -> None:
        plan, began = self._plan(member), self._clock()
        async with AsyncExitStack() as kept:
            # Two holds keep the leaving engine from counting as empty: a sequence in this process's count, and a
            # reservation of one token on the engine itself. The copies are tried even if it grants no reservation.
            kept.enter_context(FleetView(self._fleet, Trace()).engine(member.name))
            with suppress(TercetError, TimeoutError):
                async with asyncio.timeout(self._seconds / 2), UntilLost(member.calls):
                    token = Request(seq_id=self._next_id(), prompt=(0,))
                    await kept.enter_async_context(member.engine.prep_recv(token))
            for wanted in self.wanted.most_wanted(began)[:MOST_CONTEXTS]:
                if plan.is_over(self._clock()) or not member.reachable:
                    record.rest = f"{SHARE / self._processes:.0%} of its KV was sent"
                    if not member.reachable:
                        record.rest = "no answer"
                    elif self._clock() - began >= self._seconds:
                        record.rest = f"{self._seconds:g} s were over"
                    break
                await asyncio.sleep(0)  # many may be held elsewhere
                request = self.wanted.request(wanted, self._next_id())
                if request is not None:
                    await self._pass_one_on(member, plan, request, record)
        if plan.contexts:
            said = f"{plan.tokens} tokens in {self._clock() - began:.1f} s"
            CONTEXTS_KEPT.tell(engine=member.name, contexts=plan.contexts, to=", ".join(sorted(record.to)), reason=said)

    async def _pass_one_on(
        self, member: Member, plan: CopyPlan, request: Request, record: ContextsPassedOn
    ) -> None:  # fmt: skip
        # Stores keep it if there are any; otherwise the engines, the one with the most room first.
        able = stores_for(self._fleet, request, member)
        if not able:
            able = [
                each
                for each in self._fleet.open
                if each.reachable and not kv_obstacle(member.revision, each.revision)
                and (request.adapter is None or request.adapter in each.adapters)
            ]  # fmt: skip
            able.sort(key=self._usage)
        held, places = self._held(request), {each.name: each for each in able}
        has, before = held.get(member.name, 0), plan.tokens
        staying = [each.name for each in self._fleet.members if each.reachable and not each.leaving]
        is_only_here = has > max((held.get(name, 0) for name in staying), default=0)
        place = plan.destination(has, held, list(places))
        if place is None:
            failed = [f"{name}: {plan.failed[name]}" for name in places if name in plan.failed]
            outcome, reason = "failed", ", ".join(failed) or "no other can take them"
        else:
            outcome, reason = await self._copy("drain", plan, request, member, places[place])
        if place and outcome == "copied":
            passed = record.to.setdefault(place, Passed())
            passed.contexts += 1
            passed.tokens += plan.tokens - before
        elif outcome == "failed" and is_only_here:
            record.drop(reason)

    def _usage(self, member: Member) -> float:
        last = self._fleet.knowledge.loads.last(member.name)
        return 0.0 if last is None else last[0].kv_usage

    # ---- an engine that starts -----------------------------------------------------------------------------------

    def started(self, member: Member) -> None:
        """Hold an engine back from picks, and begin the copies to it, if others serve meanwhile and have contexts."""
        if member.is_store or not self.wanted or not self._others_serve(member) or not self._sources(member):
            return
        if (before := self._warming.get(member.name)) is not None:
            before.cancel()
        task = self._warming[member.name] = self._tasks.spawn(self._warm_up(member), f"warm start of {member.name}")
        member.warming = True
        self._fleet.reopen()
        task.add_done_callback(lambda ended: self._warm(member, ended))  # also if it never ran

    def _warm(self, member: Member, ended: asyncio.Task[None]) -> None:
        # A later start of the same engine has its own task, which the end of an older one must not undo.
        if self._warming.get(member.name) is ended:
            del self._warming[member.name]
            member.warming = False
            self._fleet.reopen()

    async def _warm_up(self, member: Member) -> None:
        plan, began = self._plan(member), self._clock()
        getting = self._tasks.spawn(self._get_all(member, plan), f"contexts for {member.name}")
        try:
            while not getting.done():
                # Clients come before a warm start: the engine is opened early if it is the only one left for a role.
                here = self._fleet.get(member.name) is member
                if not here or member.leaving or not self._others_serve(member):
                    break
                await asyncio.wait({getting}, timeout=LOOK_SECONDS)
        finally:
            getting.cancel()
            await asyncio.wait({getting})
        said = f"{plan.tokens} tokens in {self._clock() - began:.1f} s"
        ENGINE_WARM.tell(engine=member.name, contexts=plan.contexts, reason=said)

    async def _get_all(self, member: Member, plan: CopyPlan) -> None:
        tokens = int(SHARE * member.kv_tokens) // self._processes
        for wanted in self.wanted.most_wanted(self._clock(), tokens):
            if not await self._get(member, plan, wanted):
                break

    async def _get(self, member: Member, plan: CopyPlan, wanted: Wanted) -> bool:
        """Have a context sent to an engine that starts; return False if no more should be tried."""
        request = self.wanted.request(wanted, self._next_id())
        # Each turn tries another source: one that failed is in the plan's list and is not chosen again.
        while request is not None:
            if plan.is_over(self._clock()):
                return False
            held = self._held(request)
            sources = self._sources(member)
            loads = {name: float(each.in_flight) for name, each in sources.items()}
            others = {name: tokens for name, tokens in held.items() if name in sources}
            stores = {name for name, each in sources.items() if each.is_store}
            source = plan.source(held.get(member.name, 0), wanted.end, others, stores, loads)
            if source is None:
                break
            outcome, _ = await self._copy("start", plan, request, sources[source], member)
            if member.name in plan.failed:
                return False
            if outcome != "failed" or source not in plan.failed:
                break
        await asyncio.sleep(0)
        return True

    def _others_serve(self, member: Member) -> bool:
        """True if every role of this engine has another engine that may be picked and answers."""
        others = [each for each in self._fleet.open if each.reachable and each is not member]
        roles = ("prefill", "decode") if member.role == "both" else (member.role,)
        return all(any(each.can(role) for each in others) for role in roles if role != "store")

    def _sources(self, member: Member) -> dict[str, Member]:
        return {
            each.name: each
            for each in self._fleet.members
            if each is not member and each.reachable and not kv_obstacle(each.revision, member.revision)
        }

    # ---- copies --------------------------------------------------------------------------------------------------

    def _plan(self, member: Member) -> CopyPlan:
        return CopyPlan(int(SHARE * member.kv_tokens) // self._processes, self._clock() + self._seconds)

    def _held(self, request: Request) -> dict[str, int]:
        return self._fleet.picking.matched(request, self._fleet.members, by_reports=True)

    async def _copy(
        self, at: CopyReason, plan: CopyPlan, request: Request, source: Member, to: Member
    ) -> tuple[CopyOutcome, str]:  # fmt: skip
        """Copy what ``source`` has cached of a context; return the outcome, and of a failure the receiver and the code.

        Who fails at that gets no more copies of the plan.
        """
        outcome: CopyOutcome = "failed"
        tokens, failing, reason = 0, to, ""
        try:
            async with (
                asyncio.timeout(plan.patience(self._clock())), UntilLost(source.calls, to.calls),
                to.engine.prep_recv(request) as space,
            ):  # fmt: skip
                failing = source if at == "start" else to
                outcome, tokens = await _send_cached(source, request, space)
        except (EngineUnreachable, NoSpace, TimeoutError) as error:
            code = "timeout" if isinstance(error, TimeoutError) else error.code
            plan.failed[getattr(error, "blames", None) or failing.name] = code
            reason = f"{to.name}: {code}"
        except TercetError as error:  # about this context, such as an adapter that is missing
            reason = f"{to.name}: {error.code}"
            logger.debug("%s was not copied from %s to %s: %s", request.seq_id, source.name, to.name, error)
        finally:
            plan.copied(tokens)
            self._metrics.ended(at, outcome, tokens)
        self._fleet.picking.note_routed(request, [to.name] if tokens else [])
        return outcome, reason

    def _next_id(self) -> str:
        self._ids += 1
        return f"{self._name}-{self._ids}"
