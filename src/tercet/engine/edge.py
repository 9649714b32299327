"""One engine's edge: what the verbs share in their process: checks, ledgers of what runs, status, and the stop.

The verbs are the functions of :mod:`.verbs`, with an :class:`Edge` as their first argument. A call is checked here,
before it reaches the engine's core, or a connection that other calls share.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tercet import __version__
from tercet.aio.tasks import TaskSet
from tercet.engine.agents import AgentCalls, AgentReports
from tercet.engine.block_tables import Bypass, open_table
from tercet.engine.interface import (
    AdapterTable,
    EngineDescription,
    GenerationHalf,
    KeyedPrompt,
    RequestInCore,
    SchedulerHalf,
)
from tercet.engine.lease_timers import LeaseTimers
from tercet.engine.leases import check_range
from tercet.engine.liveness_probe import LivenessProbe
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineStatus,
    KVEvents,
    KVLayout,
    LayoutMismatch,
    MoveProposal,
    Revision,
    SequenceReport,
    UnknownSequence,
)
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.names import find_id
from tercet.protocol.wire import MoveCall, Prompt, RemoteSendCall, SequenceCall
from tercet.transport import is_address

if TYPE_CHECKING:  # the verbs run on an edge
    from tercet.engine.verbs import DecodingSequence, OutputSender

logger = logging.getLogger(__name__)
LEASE = re.compile(r"[0-9a-f]{32}")


def check_adapter(call: RemoteSendCall, digest: str) -> None:
    """Refuse KV of another adapter than the receiver needs; ``digest`` is that of this engine's adapter.

    Raises :class:`~tercet.protocol.LayoutMismatch`: engines with one name for different contents exchange no KV.
    """
    info = call.kv_addr_info
    if info.adapter == digest:
        return
    if not info.adapter or not digest:
        where = "no adapter" if not info.adapter else "an adapter"
        raise BadRequest(f"adapter: is {call.adapter!r}, and prep_recv on {info.engine} was for {where}", "adapter")
    raise LayoutMismatch(
        f"adapter: {call.adapter!r} has the digest {digest} here, and {info.adapter} on {info.engine}; "
        "load the same files on both under this name",
        "adapter",
    )


def check_send(call: RemoteSendCall, begin: int, end: int, length: int, layout: KVLayout) -> None:
    """Refuse a send of ``[begin, end)`` of ``length`` tokens that does not fit the receiver's reservation."""
    info = call.kv_addr_info
    addresses = [address for rank in info.ranks for address in rank.addresses]
    well_formed = (
        LEASE.fullmatch(info.lease)
        and 0 <= info.begin < info.end
        and info.begin % info.layout.block_size == 0
        and info.ranks
        and all(rank.addresses for rank in info.ranks)
        and all(map(is_address, addresses))
        and len(info.group_begins) == len(info.layout.groups)
        and {len(counts) for counts in info.layout.stages} <= {len(info.layout.groups) or 1}
        and not any(begin % info.layout.block_size for begin in info.group_begins)
    )
    if info.transport != "tcp" or not well_formed:
        raise BadRequest("kv_addr_info: is not a value that prep_recv returned", "kv_addr_info")
    check_range(info, begin, end, length, call.sample, layout, call.cached_only)
    if sorted(rank.rank for rank in info.ranks) != list(range(info.layout.num_ranks)):
        raise BadRequest("kv_addr_info: ranks: must name each rank of the layout once", "kv_addr_info")


# ---- what the verbs have begun ---------------------------------------------------------------------------------------


ANSWER_SECONDS = 0.25  # longest wait of a caller for a report


class SequenceTable:
    """A table of the sequences that an engine generates.

    It has their tokens, age and router. Only the core knows their blocks, and whether they run. ``ask`` polls the core,
    one poll at a time. A stuck core blocks no caller: then its last answer is reported.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[RequestInCore]]]) -> None:
        self._ask = ask
        self._sequences: dict[str, DecodingSequence] = {}  # by Tercet's request ids
        self._in_core: dict[str, RequestInCore] = {}  # by Tercet's request ids
        self._asking: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self.numbers = itertools.count(1)

    def add(self, sequence: DecodingSequence) -> None:
        self._sequences[sequence.request.request_id] = sequence

    def remove(self, sequence: DecodingSequence) -> None:
        self._sequences.pop(sequence.request.request_id, None)

    def beginning_with(self, prompt: KeyedPrompt) -> list[DecodingSequence]:
        """Return the sequences of whose first tokens the KV is also KV of ``prompt``."""
        tokens, end = prompt.tokens, len(prompt.tokens)
        # The last token distinguishes most sequences, so most need no comparison of all tokens.
        alike = (each for each in self._sequences.values() if each.tokens[end - 1 : end] == tokens[-1:])
        return [each for each in alike if not prompt.difference(each.request.prompt) and each.tokens[:end] == tokens]

    async def reports(self) -> list[SequenceReport]:
        """Return every sequence, in order of arrival; one that has not reached the core yet waits, without blocks."""
        if self._sequences:
            # One poll at a time: a stuck core would collect them.
            if self._asking is None or self._asking.done():
                self._asking = self._tasks.spawn(self._ask_core())
            await asyncio.wait({self._asking}, timeout=ANSWER_SECONDS)
        return [self._report(request_id, sequence) for request_id, sequence in self._sequences.items()]

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        propose_move({sequence.seq_id: sequence.sender for sequence in self._sequences.values()}, seq_id, call)

    def _report(self, request_id: str, sequence: DecodingSequence) -> SequenceReport:
        found, sender = self._in_core.get(request_id), sequence.sender
        return SequenceReport(
            seq_id=sequence.seq_id,
            tokens=len(sequence.tokens),
            blocks=found.blocks if found is not None else 0,
            running=found is not None and found.running,
            age=sequence.age,
            router=sender.connection.address if sender is not None else "",
        )

    async def _ask_core(self) -> None:
        try:
            answer = await self._ask()
        except Exception as error:  # an engine may raise anything for a core that has ended
            logger.debug("the engine's core cannot be polled for its sequences: %s", error)
            return
        self._in_core = {found.request_id: found for found in answer}


def propose_move(senders: Mapping[str, OutputSender | None], seq_id: str, call: MoveCall) -> None:
    """Send a router the proposal to move a sequence.

    ``senders`` has the sender of each sequence that the engine generates, by the engine's ids; None without a router.
    ``seq_id`` is one of these ids, or its client's.

    Raises :class:`~tercet.protocol.UnknownSequence` if the sequence is not here, and :class:`~tercet.protocol.Conflict`
    if no router runs it.
    """
    found = find_id(senders, seq_id)
    if found is None:
        raise UnknownSequence(f"seq_id: this engine does not generate {seq_id!r}", "seq_id")
    sender = senders[found]
    if sender is None or not sender.open:
        raise Conflict(f"seq_id: {found} is not run by a router, so it cannot be moved", "seq_id")
    sender.propose(MoveProposal(found, call.destination, call.reason))


class SequenceWork:
    """The running work of each sequence, at most one generation and any number of sends, and how to end it early."""

    def __init__(self) -> None:
        self._stops: dict[tuple[str, str | None], Callable[[], object]] = {}  # a send has its id, a generation None

    def __len__(self) -> int:
        return len(self._stops)

    def generates(self, seq_id: str) -> bool:
        return (seq_id, None) in self._stops

    def begin(self, seq_id: str, stop: Callable[[], object]) -> None:
        self._stops[seq_id, None] = stop

    def end(self, seq_id: str) -> None:
        del self._stops[seq_id, None]

    def stop(self, seq_id: str) -> bool:
        """End all work for a sequence early; return whether there was any."""
        found = [stop for (busy, _), stop in self._stops.items() if busy == seq_id]
        for stop in found:
            stop()
        return bool(found)

    @asynccontextmanager
    async def sending(self, seq_id: str, send_id: str) -> AsyncGenerator[None]:
        """End the current task by ``UnknownSequence`` if the sequence is stopped within this context."""
        # A timeout and not a cancellation of the task: the caller's own cancellation must stay what it is.
        until_aborted = asyncio.timeout(None)
        self._stops[seq_id, send_id] = lambda: until_aborted.expired() or until_aborted.reschedule(0)
        try:
            async with until_aborted:
                yield
        except TimeoutError:
            if not until_aborted.expired():
                raise
            raise UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id") from None
        finally:
            del self._stops[seq_id, send_id]


UNKNOWN_TEXT = TextFingerprint()


class Edge:
    """The edge of the engine ``name``: its two halves, its agents, and the ledgers of what the verbs have begun.

    ``secret`` is the fleet's, or empty. ``incarnation`` is the id of this start of the process.
    """

    def __init__(
        self, name: str, description: EngineDescription, core: SchedulerHalf, generation: GenerationHalf,
        agents: AgentCalls, adapters: AdapterTable, probe: LivenessProbe,
        secret: str = "", text: TextFingerprint = UNKNOWN_TEXT,
    ) -> None:  # fmt: skip
        self.name, self.secret = name, secret
        # Routers tell by it that an engine was restarted, and that its leases and cache are gone.
        self.incarnation = uuid.uuid4().hex
        self.description, self.layout = description, description.layout
        self.core, self.generation = core, generation
        self.agents, self.adapters, self.probe = agents, adapters, probe
        self.tasks, self.work = TaskSet(), SequenceWork()
        self.leases = LeaseTimers(core, agents, self.tasks, description.reserve_wait)
        adapters.count_users(self.leases.adapters)
        self.generated = SequenceTable(core.sequences)
        self.reports = AgentReports(len(description.transports), self.leases.note, description.host)
        tables = description.tables
        self.bypass = None if tables is None else Bypass(open_table(tables), self.layout.block_size)
        self.revision = Revision(__version__, generation.version, self.layout.model, text, self.layout)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a call's prompt. Raises :class:`~tercet.protocol.BadRequest` for an invalid one."""
        if isinstance(prompt, str):  # in a thread, since it may be long
            tokens = await asyncio.to_thread(self.generation.encode, prompt)
        else:
            tokens = list(prompt)
        self.generation.limits.check_prompt(tokens)
        return tokens

    async def keyed(self, call: SequenceCall, tokens: list[int]) -> KeyedPrompt:
        """Return a call's prompt, with these :meth:`tokens` and all other inputs of its KV.

        Raises :class:`~tercet.protocol.BadRequest`, :class:`~tercet.protocol.UnknownAdapter`, also for an adapter with
        other contents here, and :class:`~tercet.protocol.Conflict` if its files have changed.
        """
        adapter = await self.adapters.find(call.adapter, call.adapter_digest)
        self.generation.limits.check_features(tokens, call.mm_features, call.adapter)
        features = tuple(feature.without_data() for feature in call.mm_features)
        return KeyedPrompt(tokens, call.cache_salt, adapter, features)

    def model_of(self, call: SequenceCall) -> str:
        return call.adapter or self.generation.model

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's reservation, sends and generation; return whether there was any."""
        found = self.work.stop(seq_id)
        return await self.leases.abort(seq_id) or found

    async def status(self) -> EngineStatus:
        """Return the present load, leases and sends; the last known ones if the core is stuck."""
        await self.probe.news()
        events, generation = self.description.kv_events, self.generation
        return EngineStatus(
            engine=self.name,
            model=generation.model,
            version=self.revision.tercet,
            vllm_version=self.revision.vllm,
            block_size=self.layout.block_size,
            max_model_len=generation.limits.max_model_len,
            kv_events=None if events is None else KVEvents(**events, epoch=self.incarnation),
            incarnation=self.incarnation,
            fingerprint=self.revision.weights,
            layout=self.layout,
            text=self.revision.text,
            dtype=self.layout.dtype,
            model_dtype=generation.model_dtype,
            stalled_s=self.probe.stalled_s,
            counters=self.probe.counters,
            max_adapters=self.adapters.most,
            adapters=await self.adapters.reports(),
            regions=tuple(self.description.regions),
            is_store=self.description.is_store,
            **self.probe.core_status,
        )


# ---- the stop at SIGTERM ---------------------------------------------------------------------------------------------


POLL_INTERVAL_S = 0.05
HEARD_SECONDS = 0.3
"""Seconds until every router knows that the engine stops, and its earlier calls have arrived."""


class StopWhenEmpty:
    """The decision when an engine stops after a stop request.

    ``announce`` notifies its routers, and returns their number. ``is_empty`` returns True if the engine holds nothing
    for others. ``stop`` ends the engine: once it is empty, after ``grace`` seconds at the latest, or at a second
    request. Without routers and work it stops at once.
    """

    def __init__(
        self, announce: Callable[[], int], is_empty: Callable[[], bool], stop: Callable[[], object], grace: float
    ) -> None:
        self._announce = announce
        self._is_empty = is_empty
        self._stop = stop
        self._grace = grace
        self.is_asked = False
        self._tasks = TaskSet()

    def ask(self) -> None:
        asked_before, self.is_asked = self.is_asked, True
        # A second signal is a person, or a supervisor, that does not want to wait.
        if asked_before or not self._grace:
            self._tasks.cancel()
            self._stop()
            return
        self._tasks.spawn(self._stop_when_empty(), "stop when empty")

    async def _stop_when_empty(self) -> None:
        try:
            async with asyncio.timeout(self._grace):
                if self._announce():
                    logger.warning("the engine stops when it is empty, in %g s at the latest", self._grace)
                    await asyncio.sleep(HEARD_SECONDS)
                while True:
                    if self._is_empty():
                        break
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            logger.warning("the engine stops with running work: it is not empty after %g s", self._grace)
        except Exception:  # the stop was requested, and must not be lost
            logger.exception("the engine stops with running work: it is not known whether it is empty")
        self._stop()


def fail_at_exit(reason: str) -> None:
    """Log the ``reason`` and make this process exit with 1: a server may exit with 0 also after its core was lost."""
    logger.critical("the engine ends with exit code 1: %s", reason)

    def fail() -> None:
        atexit.unregister(fail)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # those that were registered earlier
        logging.shutdown()
        os._exit(1)

    atexit.register(fail)
