"""Leases at the engine's edge: their sequences and tokens, the KV that has arrived, their timeouts, and their stories.

A lease is in three ledgers, each with the part on which only its process can act: :class:`LeaseTimers` has time and
owner, here, where calls arrive and time passes even if the engine does not step; ``Reservations`` has the blocks, which
only the scheduler's thread may touch; :class:`~tercet.transport.grants.GrantTable`, in each agent, has the right to
write them. Its states, with the ledger that enters each::

    asked ──────▶ reserved ─────▶ open ◀─▶ filled ──▶ claimed ──▶ fenced ──▶ adopted
    timers        reservations    grants   grants     timers      grants     reservations
      │ │              │            │        │           │          ▲  │
      │ └──────────────┴────────────┴────────┴───────────┴▶ ending ─┘  └───▶ freed
      ▼                                                     timers           reservations
    refused
    reservations

No block is freed or adopted before its fence: until every agent has confirmed that it does not write there any more,
blocks have no other owner.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tercet.aio.tasks import TaskSet
from tercet.engine import agents
from tercet.engine.agents import AgentCalls
from tercet.engine.interface import KeyedPrompt, ReservedBlocks, SchedulerHalf
from tercet.engine.leases import LIFE, Lease, LeaseState, LeaseTable, Ledger, aborted_while_reserving, require_continued
from tercet.protocol import Conflict, Content, EngineError, LeaseEnded, TercetError, UnknownSequence, packed
from tercet.protocol.spans import LeaseReport
from tercet.transport import ExtendLease, GrantLease, LeaseFilled

logger = logging.getLogger(__name__)
RELEASE_SECONDS = 3.0
"""Seconds for which a release is awaited; after that it continues in the background."""
ADOPT_SECONDS = 1.0
"""Seconds for which a sequence waits until no peer writes under its lease; after that it computes its KV itself."""


KEPT_STORIES = 1000
"""Ended and open leases of an engine whose stories are kept."""
# Steps of a story: a lease that grows with its sequence loses those in its middle.
MOST_STEPS, FIRST_STEPS = 24, 4


class StoryStep(NamedTuple):
    """One step of a lease's life: seconds since ``prep_recv``, the ledger that entered the state, and the cause."""

    seconds: float
    ledger: Ledger
    state: LeaseState
    cause: str


class InvalidTransition(EngineError):
    """Raised for a step that no lease can take: a fault of this code. The message tells the lease's story."""


class LeaseStory:
    """The life of one lease across its three ledgers, as this process hears of it."""

    def __init__(self, lease: str, seq_id: str, cause: str) -> None:
        self.lease, self.seq_id = lease, seq_id
        self.at = time.time()
        self._began = time.monotonic()
        self.steps = [StoryStep(0.0, "timers", "asked", cause)]
        self._failed = False

    @property
    def state(self) -> LeaseState:
        return self.steps[-1].state

    @property
    def has_ended(self) -> bool:
        return not LIFE[self.state][1]

    def enter(self, state: LeaseState, cause: str) -> None:
        """Record that the lease enters a state. Raises :class:`InvalidTransition` if it cannot."""
        ledger, _ = LIFE[state]
        if state not in LIFE[self.state][1]:
            raise InvalidTransition(f"lease {self.lease} cannot become {state} ({cause}): {self}")
        if state == "filled" and [each.state for each in self.steps[-2:]] == ["filled", "filled"]:
            self.steps.pop()  # of the reports of one send, the first and the last one are kept
        if len(self.steps) == MOST_STEPS:
            del self.steps[FIRST_STEPS]
        self.steps.append(StoryStep(time.monotonic() - self._began, ledger, state, cause))
        if self._failed and self.has_ended:
            logger.info("lease %s of %s has failed: %s", self.lease, self.seq_id, self)

    def end(self, cause: str, *, failed: bool = False) -> None:
        """Record why the lease ends, unless it ends or has ended already: a story that ``failed`` is logged."""
        if self.has_ended or self.state == "ending":
            return
        self._failed = failed
        if self.state != "fenced":  # what is fenced already has only to be freed
            self.enter("ending", cause)

    def report(self) -> LeaseReport:
        steps = [(each.seconds, each.ledger, each.state, each.cause) for each in self.steps]
        return LeaseReport(self.lease[:8], self.seq_id, self.at, steps)

    def __str__(self) -> str:
        return "; ".join(f"{seconds:.3f} s {ledger}: {state}, {cause}" for seconds, ledger, state, cause in self.steps)


def story(held: EdgeLease) -> list[StoryStep]:
    """Return a lease's life so far, across its three ledgers."""
    return list(held.story.steps)


@dataclass(eq=False, slots=True)
class EdgeLease(Lease):
    """One lease for a prompt, which ends by itself ``ttl`` seconds after the last activity."""

    prompt: KeyedPrompt
    story: LeaseStory
    matched_len: int = 0
    tier_len: int = 0
    group_begins: tuple[int, ...] = ()  # the first token for which each group of layers has blocks
    committed: int = 0
    # For each rank that has reported: the valid end and the content of its KV.
    filled: dict[int, Content] = field(default_factory=dict[int, Content])
    granted: bool = False
    extending: bool = False
    # The fence, once requested: done, with the valid end of the KV, when no agent writes under the lease any more.
    closing: asyncio.Task[int] | None = None


class LeaseTimers(LeaseTable[EdgeLease]):
    """The ledger of time and owner, from which agents are called: blocks are opened here, and fenced.

    A lease that is forgotten here is claimed, and then the request that adopts it has its blocks, or freed.
    """

    def __init__(self, core: SchedulerHalf, agents: AgentCalls, tasks: TaskSet, reserve_wait: float) -> None:
        super().__init__(self._expire)
        self._core = core
        self._agents = agents
        self._tasks = tasks
        self._reserve_wait = reserve_wait
        self._stories: deque[LeaseStory] = deque(maxlen=KEPT_STORIES)

    def stories(self, seq_id: str) -> list[LeaseStory]:
        return [each for each in self._stories if each.seq_id == seq_id]

    def adapters(self) -> list[str]:
        return [held.prompt.adapter.name for held in self if held.prompt.adapter is not None]

    async def reserve(self, seq_id: str, prompt: KeyedPrompt, ttl: float, notify: str) -> EdgeLease:
        """Reserve blocks for a prompt until ``ttl`` seconds after the last activity; open them on every rank.

        Agents report to ``notify``. Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.LeaseEnded` if
        the lease has ended already, or :class:`~tercet.protocol.EngineError` if a rank does not open it; then no rank
        keeps it.
        """
        lease = uuid.uuid4().hex
        life = LeaseStory(lease, seq_id, f"blocks for {len(prompt.tokens)} tokens, for {ttl:g} s without activity")
        # Before the reservation, so that a refused one has a story, too.
        self._stories.append(life)
        held = EdgeLease(prompt, life, name=lease, seq_id=seq_id, ttl=ttl)
        # Before the core is asked: from here on an abort of the sequence finds the lease.
        self.add(held)
        self.renew(held)
        try:
            reserved = await self._within_wait(held, self._core.reserve(lease, prompt))
            held.tier_len = reserved.tier_len
            held.matched_len, held.group_begins = reserved.matched_len, reserved.group_begins()
            if self.find(lease) is held:  # otherwise the lease has ended, and its blocks are being freed
                held.granted = True
                life.enter("reserved", f"{held.matched_len} tokens were in the prefix cache")
                blocks, size, tokens = reserved.blocks, reserved.block_size, prompt.tokens
                await self._agents.begin(
                    GrantLease(lease, blocks, held.matched_len, len(tokens), size, packed(tokens), prompt.key, notify)
                )
        except BaseException as error:
            self.remove(held)
            if held.granted or not isinstance(error, TercetError):  # how far the reservation got is unknown
                failed = isinstance(error, Exception)
                why = f"it could not be opened: {error}" if failed else "its caller left"
                self.release_soon(held, why, failed=failed)
            elif life.state == "asked":
                life.enter("refused", str(error))
            raise
        if self.find(lease) is not held:
            raise aborted_while_reserving(seq_id)
        if life.state == "reserved":  # a rank that was open first may have reported KV already
            life.enter("open", f"for {len(prompt.tokens) - held.matched_len} tokens on {len(self._agents)} ranks")
        return held

    async def extend(self, lease: str, seq_id: str, prompt: KeyedPrompt) -> EdgeLease:
        """Reserve more blocks for a lease, and open them on every rank; ``prompt`` begins with the lease's tokens.

        Raises :class:`~tercet.protocol.UnknownSequence` or :class:`~tercet.protocol.LeaseEnded` if the lease has ended,
        :class:`~tercet.protocol.BadRequest` for other tokens, :class:`~tercet.protocol.NoSpace`, or
        :class:`~tercet.protocol.EngineError` if a rank does not open the blocks. Then the lease is unchanged; blocks
        that a rank has not opened stay pinned until it ends.
        """
        held = self.require(lease, seq_id)
        require_continued(held.prompt.tokens, prompt.tokens, prompt.difference(held.prompt))
        # Two extensions at once would open blocks in an order that the ranks do not agree on.
        if not held.granted or held.extending:
            raise Conflict(f"lease {lease} is being opened or extended already", "lease")
        self.renew(held)
        held.extending = True
        try:
            reserved = await self._within_wait(held, self._core.extend(lease, prompt))
            if self.find(lease) is held:  # otherwise the lease has ended: these blocks are freed with the others
                blocks, begin, size, tokens = reserved.blocks, held.matched_len, reserved.block_size, prompt.tokens
                extended = ExtendLease(lease, blocks, begin, len(tokens), size, packed(tokens), prompt.key)
                await self._agents.begin(extended)
        finally:
            held.extending = False
        held.group_begins = reserved.group_begins()
        if self.find(lease) is not held:
            raise LeaseEnded(f"{seq_id} was aborted, or its lease ended, while it was being extended", "seq_id")
        held.prompt = prompt
        held.story.enter("open", f"extended to {len(prompt.tokens)} tokens")
        return held

    async def _within_wait(self, held: EdgeLease, reserving: Coroutine[Any, Any, ReservedBlocks]) -> ReservedBlocks:
        def give_up() -> None:
            self._tasks.spawn(self._core.give_up(held.name))

        giving_up = asyncio.get_running_loop().call_later(self._reserve_wait, give_up)
        try:
            return await reserving
        finally:
            giving_up.cancel()

    def claim(self, seq_id: str, prompt: KeyedPrompt) -> EdgeLease | None:
        """Take the sequence's lease, if it has one, away from its timer: a request of ``prompt`` will adopt it.

        The lease's fence is then in progress: see :meth:`closed`. Returns None without a lease. Raises
        :class:`~tercet.protocol.BadRequest` if the prompt does not begin with the reserved tokens, or if salt, adapter
        or images differ.
        """
        held = self.of(seq_id)
        if held is None:
            return None
        require_continued(held.prompt.tokens, prompt.tokens, prompt.difference(held.prompt))
        held.story.enter("claimed", f"a request of {len(prompt.tokens)} tokens will decode on its blocks")
        self.remove(held)
        self._closing(held)
        return held

    async def closed(self, held: EdgeLease, given_up: asyncio.Future[None]) -> bool:
        """Wait until no peer writes under a claimed lease; if that fails, return False, and free its blocks later."""
        fence = self._closing(held)
        try:
            await asyncio.wait({fence, given_up}, timeout=ADOPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.release_soon(held, "the call that claimed it was cancelled")
            raise
        # The blocks cannot be adopted before the fence, so they are freed after it, in the background.
        if given_up.done():
            self.release_soon(held, "its sequence was aborted")
            return False
        if not fence.done():
            self.release_soon(held, f"an agent did not confirm the fence within {ADOPT_SECONDS:g} s", failed=True)
            return False
        return True

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's lease; return whether it had one."""
        held = self.of(seq_id)
        if held is None:
            return False
        agents.leases_aborted.inc()
        await self.release(held.name, "its sequence was aborted")
        return True

    async def release(self, lease: str, cause: str = "it was released") -> int:
        """End a lease; return how many tokens' KV is valid. Raises ``EngineError`` if its blocks are freed later."""
        held = self.require(lease)
        self.remove(held)
        releasing = self.release_soon(held, cause)
        await asyncio.wait({releasing}, timeout=RELEASE_SECONDS)
        if not releasing.done():
            raise EngineError(
                f"lease {lease} has ended, but its blocks are freed only when every KV agent has answered"
            )
        return releasing.result()

    def release_soon(self, held: EdgeLease, cause: str = "", *, failed: bool = False) -> asyncio.Task[int]:
        """End the lease in a background task, for this ``cause``; without one, its request may have adopted it.

        Nothing happens if a request has adopted it, or if it was never reserved.
        """
        if cause or held.story.state not in ("claimed", "fenced"):
            held.story.end(cause or "its caller left", failed=failed)
        return self._tasks.spawn(self._release(held))

    def note(self, filled: LeaseFilled) -> None:
        """Record a rank's report on received KV, which counts as activity; what all ranks have is committed."""
        held = self.find(filled.lease)
        if held is None:
            return  # the lease has ended
        self.renew(held)
        held.filled[filled.rank] = filled.valid
        if held.granted:
            held.story.enter("filled", f"rank {filled.rank} has valid KV of {filled.valid.end} tokens")
        valid = min(held.filled.values(), key=lambda valid: valid.end)
        if len(held.filled) == len(self._agents) and valid.end > held.committed:
            held.committed = valid.end
            # The least of all ranks: a block is valid only if every rank has its part.
            self._tasks.spawn(self._core.commit(filled.lease, valid))

    def end_soon(self, lease: str, cause: str = "its caller left", *, failed: bool = False) -> None:
        """End a lease in the background, if it is held here and not claimed."""
        held = self.find(lease)
        if held is not None:
            self.remove(held)
            self.release_soon(held, cause, failed=failed)

    def _expire(self, held: EdgeLease) -> None:
        agents.leases_expired.inc()
        self.end_soon(held.name, "it expired: no rank has reported KV in time", failed=True)

    def adopted(self, held: EdgeLease) -> None:
        if held.story.state == "fenced":
            held.story.enter("adopted", "its request decodes on the blocks")

    def _closing(self, held: EdgeLease) -> asyncio.Task[int]:
        async def fence() -> int:
            valid_end = await self._agents.revoke(held.name)
            held.story.enter("fenced", f"no agent writes any more; KV of {valid_end} tokens is valid")
            return valid_end

        # The command is sent once: a second answer would not contain the valid end.
        if held.closing is None:
            held.closing = self._tasks.spawn(fence())
        return held.closing

    async def _release(self, held: EdgeLease) -> int:
        valid_end = max(held.matched_len, await self._closing(held))
        try:
            valid_end = await self._core.release(held.name, valid_end)
        except UnknownSequence:  # adopted, or it never had blocks
            if any(step.state == "ending" for step in held.story.steps):
                self._freed(held, "the core has no blocks of it")
            else:
                self.adopted(held)
        else:
            self._freed(held, f"KV of {valid_end} tokens stays in the prefix cache")
        return valid_end

    def _freed(self, held: EdgeLease, cause: str) -> None:
        if not held.story.has_ended:  # two causes may end a lease at once
            held.story.enter("freed", cause)
