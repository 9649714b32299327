"""An agent's control channel, which any process of the machine can reach, the inbox of reports, and KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tercet.engine.agents import AgentReports
from tercet.fleet import FleetKnowledge
from tercet.fleet.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVInbox, _numbered
from tercet.protocol import Request, packed
from tercet.protocol.spans import SpanContext
from tercet.protocol.wire import UNREADABLE
from tercet.transport import (
    CancelSend,
    GrantLease,
    HeadSlice,
    KVRegion,
    LeaseFilled,
    Push,
    PushCached,
    ReadCounters,
    ReceiveDone,
    ReceiveEnd,
    RevokeLease,
    SendDestination,
    SendDone,
    SendPlan,
    TransportSettings,
)
from tercet.transport.agent.agent import Agent, AgentSetup
from tercet.transport.agent.agent_messages import Envelope
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case, MessagePack
from tests.fuzz.targets.kv_transfer import kind_of
from tests.unit.transport.models import whose

SECRET, LEASE, NOTIFY = "s" * 32, "ab" * 16, "inproc://nobody"
TRACED = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


# ---- the control channel ---------------------------------------------------------------------------------------------


class AgentRoom:
    """An agent that carries out the commands that a case holds, as its control channel has it do."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    async def run(self, case: Case) -> Outcome:
        happened: list[str] = []
        for item in case:
            try:
                envelope = self._decoder.decode(item)
            except UNREADABLE as error:
                happened.append(type(error).__name__)
                continue
            if envelope.secret != SECRET:
                happened.append("stranger")
                continue
            answer = self._agent._control._answer(envelope)
            msgspec.msgpack.encode(answer)
            happened.append(type(envelope.command).__name__ + ("" if answer.error is None else answer.error[:16]))
        await self._give_back()
        return Outcome(len(case), " ".join(happened[:4]))

    async def _give_back(self) -> None:
        """What leases are left end; then nothing is."""
        transport, grants = self._agent._transport, self._agent._transport.grants
        for lease in list(grants._open):
            self._agent._handle(RevokeLease(lease))
        assert not self._agent._notify_of_lease, "a lease that was not granted is remembered"
        for send in list(transport.sends._sends):
            self._agent._handle(CancelSend(send))
        while transport.counters()["sends_active"]:  # its own thread ends a send; the case is bounded
            await asyncio.sleep(0.001)
        assert transport.counters()["leases_open"] == 0


@asynccontextmanager
async def _agent() -> AsyncGenerator[AgentRoom]:
    region = KVRegion.create(2, 8, 64)
    agent = Agent(AgentSetup(0, region.fd, region.shape, "same", TransportSettings("tcp", timeout=1.0), ()))
    try:
        yield AgentRoom(agent)
    finally:
        agent.close()
        region.close()


def _command_cases() -> list[Case]:
    to = [SendDestination(("tcp://127.0.0.1:1",), HeadSlice(0, 64))]
    commands = [
        GrantLease(LEASE, [[5, 2, 3]], 0, 48, 16, packed(range(48)), None, NOTIFY),
        ReadCounters(),
        PushCached(SendPlan("a", LEASE, whose(48), 0, 0, 48, [[]], NOTIFY), (Push("a", 0, (1, 2, 3)),)),
        PushCached(
            SendPlan("b", LEASE, whose(48), 0, 0, 48, [to], NOTIFY, traceparent=TRACED.traceparent),
            (Push("b", 0, (1, 2, 3)),),
        ),
        CancelSend("a"),
        CancelSend("b"),
        RevokeLease(LEASE),
    ]
    said = [msgspec.msgpack.encode(Envelope(SECRET, number, each)) for number, each in enumerate(commands)]
    return [said[:3] + said[4:5] + said[6:], [said[0], said[6], said[0]], [said[3], said[5]], [said[1]]]


# ---- reports ---------------------------------------------------------------------------------------------------------


class ReportsRoom:
    """The inbox of an engine's edge, with one send under way that agents 0 and 1 are to report on."""

    def __init__(self, reports: AgentReports, filled: list[LeaseFilled]) -> None:
        self._reports, self._filled = reports, filled

    async def run(self, case: Case) -> Outcome:
        happened: list[str] = []
        with self._reports.sending() as sending:
            name = sending.send_id[: len("the-send")]
            self._reports._sends[name] = sending
            for item in case:
                with suppress(*UNREADABLE):
                    self._reports._take(item.replace(b"the-send", name.encode()))
            del self._reports._sends[name]
            happened.append(f"{len(sending.reports)} {sending.done.done()} {sending.failed.done()}")
        assert not self._reports._sends
        happened.append(str(len(self._filled)))
        self._filled.clear()
        return Outcome(len(case), " ".join(happened))


@asynccontextmanager
async def _reports() -> AsyncGenerator[ReportsRoom]:
    filled: list[LeaseFilled] = []
    reports = AgentReports(2, filled.append)
    try:
        yield ReportsRoom(reports, filled)
    finally:
        reports._task.cancel()
        await asyncio.wait([reports._task])
        reports._socket.close()


def _report_cases() -> list[Case]:
    def said(report: SendDone | LeaseFilled | ReceiveDone) -> bytes:
        return msgspec.msgpack.encode([type(report).__name__, report])

    done = [said(SendDone("the-send", rank, 10, 2, "tcp")) for rank in range(2)]
    failed = said(SendDone("the-send", 0, error="refused"))
    return [
        done,
        [done[0], failed],
        [said(LeaseFilled(LEASE, 0, whose(32))), said(LeaseFilled(LEASE, 1, whose(48))), done[1]],
        [said(ReceiveDone(0, ReceiveEnd(LEASE, TRACED.traceparent, 1, 2, 64))), done[0]],
    ]


# ---- KV events -------------------------------------------------------------------------------------------------------

SIZE = 4


class EventsRoom:
    """What a fleet knows of two engines; one of them says what a case holds, the other one's cache is not touched."""

    def __init__(self) -> None:
        self._knowledge = FleetKnowledge(lambda: 0.0)
        for name in ("other", "e"):
            self._knowledge.add(name)
        self._request = Request(seq_id="r", prompt=tuple(range(8 * SIZE)))
        self._other = KVInbox("other", self._knowledge)
        self._other.take(0, _payload(_stored(0), _stored(1)))

    async def run(self, case: Case) -> Outcome:
        inbox, happened = KVInbox("e", self._knowledge), "followed"
        try:
            for item in case:
                parts = msgspec.msgpack.decode(item, type=list[bytes])
                number, payload = _numbered(parts)
                if inbox.take(number, payload):
                    inbox.take_replayed(number, payload)
                assert 0 <= inbox.expected < 2**64
        except (ValueError, *UNREADABLE) as error:
            happened = kind_of(error)
        cached = self._knowledge.cached_tokens("e", self._request)
        assert 0 <= cached <= self._request.num_tokens
        assert self._knowledge.cached_tokens("other", self._request) == 2 * SIZE
        inbox.reset()
        assert not inbox.take(0, _payload(_stored(0)))
        assert self._knowledge.cached_tokens("e", self._request) == SIZE
        inbox.reset()
        (index,) = self._knowledge.indexes.values()
        assert len(index) == 2
        assert list(index._rows_held) == [0]
        return Outcome(len(case), f"{happened} {cached}")


def _payload(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, list(events)))


def _stored(index: int, **fields: Any) -> BlockStored:
    tokens = list(range(index * SIZE, (index + 1) * SIZE))
    return BlockStored([index + 1], index if index else None, tokens, SIZE, **fields)


class Events:
    """The parts of a message of a publisher; a tree is the topic, the number and the batch."""

    def tree(self, item: bytes) -> Any:
        topic, number, payload = msgspec.msgpack.decode(item, type=tuple[bytes, bytes, bytes])
        return [topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)]

    def item(self, tree: Any) -> bytes:
        topic, number, batch = tree
        return msgspec.msgpack.encode([topic, number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)])


@asynccontextmanager
async def _events() -> AsyncGenerator[EventsRoom]:
    yield EventsRoom()


def _event_cases() -> list[Case]:
    batches = [
        _payload(_stored(0), _stored(1)),
        _payload(BlockRemoved([2]), _stored(1), _stored(2)),
        _payload(_stored(3, extra_keys=[None]), _stored(4, lora_name="adapter"), _stored(5, group_idx=1)),
        _payload(AllBlocksCleared(), _stored(0, extra_keys=[["salt"]])),
    ]
    said = [msgspec.msgpack.encode([b"", number.to_bytes(8, "big"), each]) for number, each in enumerate(batches)]
    return [said, [said[0], said[2], said[1]], [said[0], said[0]], [said[3]]]


TARGETS = (
    Target("agent_control", _command_cases, MessagePack(), _agent),
    Target("agent_reports", _report_cases, MessagePack(), _reports),
    Target("kv_events", _event_cases, Events(), _events),
)
