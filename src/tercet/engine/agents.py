"""Calls from the verbs to the agents, the agents' reports to the verbs, and their counters in ``/metrics``.

Only this code waits for an agent. An agent may be slow, stopped or faulty. A grant or a push that it does not confirm
in time has failed. The end of a lease or a send is a fence, which holds only once every agent has answered. The answer
is awaited in the background without a timeout; until it arrives, the blocks stay pinned. Nothing can leak: a stopped
agent answers when it continues, and a dead agent ends its engine with all blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.aio.tasks import keep_running
from tercet.engine.liveness_probe import LivenessProbe
from tercet.protocol import EngineError, TercetError, TransferFailed
from tercet.protocol.spans import Span, process, read_traceparent
from tercet.protocol.wire import UNREADABLE
from tercet.transport import (
    CancelSend,
    ExtendLease,
    GrantLease,
    LeaseFilled,
    PushCached,
    ReceiveDone,
    RevokeLease,
    SendDone,
    SendReport,
)
from tercet.transport.sockets import LOOPBACK, bind_at, bounded

NOW = {
    "connections": "Open connections from senders.",
    "sessions_in": "Connected senders.",
    "sessions_out": "Receivers to which this rank is connected.",
    "sends_active": "Running sends.",
    "leases_open": "Leases under which KV may arrive.",
    "receives_active": "Sends of peers that have begun to arrive.",
}
TOTALS = {
    "bytes_sent": "KV bytes sent.",
    "chunks_sent": "Chunks of KV sent.",
    "sends_done": "Sends that were acknowledged.",
    "sends_failed": "Sends that failed or were cancelled.",
    "sessions_lost": "Sessions with receivers that broke or were closed.",
    "bytes_received": "KV bytes received.",
    "chunks_received": "Chunks of KV received.",
    "chunks_refused": "Chunks of KV refused, most of them late.",
    "receives_done": "Sends of peers that arrived completely.",
    "receives_refused": "Sends of peers that were incomplete.",
    "receives_dropped": "Sends of peers that were dropped before their end.",
    "connections_refused": "Connections that violated the protocol, did not know the secret, or exceeded the limit.",
}

leases_expired = Counter("tercet_leases_expired", "Reservations that were not used in time.")
fences_open = Gauge("tercet_fences_open", "Ended leases and sends whose blocks wait for an agent's answer.")
leases_aborted = Counter("tercet_leases_aborted", "Reservations that an abort ended.")
sends_aborted = Counter("tercet_sends_aborted", "Sends that an abort, or their client's disconnect, ended.")

sends_bypassing = Counter("tercet_sends_bypassing_core", "Sends of running sequences while the core was stuck.")


class ProbeCollector(Collector):
    """A collector of the last answers of the engine's processes: a scrape calls no process."""

    def __init__(self, probe: LivenessProbe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        stalled = GaugeMetricFamily(
            "tercet_stalled_seconds", "Seconds since the last progress of a process of this engine."
        )
        stalled.add_metric([], self._probe.stalled_s)
        yield stalled
        for kind, names in ((GaugeMetricFamily, NOW), (CounterMetricFamily, TOTALS)):
            for name, meaning in names.items():
                family = kind(f"tercet_kv_{name}", meaning, labels=["rank"])
                for rank, counters in enumerate(self._probe.agent_counters):
                    family.add_metric([str(rank)], counters.get(name, 0))
                yield family


logger = logging.getLogger(__name__)
ANSWER_SECONDS = 3.0
"""Timeout of an agent's answer to a grant or a push, in seconds."""
RETRY_SECONDS = 1.0
LOGGED_SECONDS = 5.0
RECEIVE = "receive"

Asked = GrantLease | ExtendLease | PushCached | RevokeLease | CancelSend


class AgentChannel(Protocol):
    """The channel to one agent. Commands run in the order of the calls, even if the answer is not awaited."""

    def call(self, command: Asked) -> asyncio.Future[Any]:
        """Send a command; the future gets the answer, or :class:`~tercet.protocol.EngineError`."""
        ...


class AgentCalls:
    """All agents of an engine, by rank."""

    def __init__(self, agents: Sequence[AgentChannel]) -> None:
        self._agents = agents

    def __len__(self) -> int:
        return len(self._agents)

    async def begin(self, command: GrantLease | ExtendLease | PushCached) -> None:
        """Open or extend a lease, or push, on every rank.

        Raises ``EngineError`` if one fails; then the caller must revoke the lease, or cancel the send.
        """
        # It is sent to all ranks before any answer is awaited, so that a later fence comes after it on every rank.
        asked = [agent.call(command) for agent in self._agents]
        # Not gather: an error of one rank must not leave the others' answers unread.
        await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for rank, answer in enumerate(asked):
            if not answer.done():
                raise EngineError(f"KV agent {rank} did not answer on its control channel within {ANSWER_SECONDS:g} s")
            if (error := answer.exception()) is not None:
                raise EngineError(f"KV agent {rank}: {error}") from error

    async def revoke(self, lease: str) -> int:
        """Refuse a lease from now on; once no rank writes under it, return the end of KV that is valid on all ranks."""
        return min(await self._fence(RevokeLease(lease)))

    async def cancel(self, send_id: str) -> None:
        """Stop a send; return once no rank reads its blocks. The call has no timeout."""
        await self._fence(CancelSend(send_id))

    async def _fence(self, command: RevokeLease | CancelSend) -> list[Any]:
        text = "a KV agent has not answered for %.0f s; its blocks stay pinned: %s"
        late = asyncio.get_running_loop().call_later(LOGGED_SECONDS, logger.warning, text, LOGGED_SECONDS, command)
        with fences_open.track_inprogress():
            try:
                return await asyncio.gather(*(self._until_done(rank, command) for rank in range(len(self._agents))))
            finally:
                late.cancel()

    async def _until_done(self, rank: int, command: RevokeLease | CancelSend) -> Any:
        while True:
            try:
                return await self._agents[rank].call(command)
            except TercetError as error:  # the command did not run, so it is repeated
                logger.warning("KV agent %d: %s: %s", rank, type(command).__name__, error.message)
            await asyncio.sleep(RETRY_SECONDS)


# ---- reports ---------------------------------------------------------------------------------------------------


@dataclass
class SendInFlight:
    """One send, until every rank has reported. ``failed`` completes as soon as one rank reports an error."""

    send_id: str
    ranks: int
    reports: dict[int, SendDone] = field(default_factory=dict[int, SendDone])

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()

    def take(self, report: SendDone) -> None:
        self.reports[report.rank] = report
        if report.error is not None and not self.failed.done():
            self.failed.set_result(None)
        # One error is enough: the ranks of a send need each other, and the caller cancels the rest.
        if (report.error is not None or len(self.reports) == self.ranks) and not self.done.done():
            self.done.set_result(None)

    async def wait(self) -> SendReport:
        """Wait for all ranks; raises :class:`~tercet.protocol.TransferFailed` if one failed."""
        await self.done
        errors = [report.error for report in self.reports.values() if report.error is not None]
        if errors:
            raise TransferFailed(errors[0], "kv_addr_info")
        return SendReport.of_all(self.reports.values())


class AgentReports:
    """An inbox that receives the reports of this engine's agents and passes each one to its waiting caller.

    ``ranks`` agents report on each send and each lease, to ``host``; ``on_filled`` gets the reports on leases. Other
    processes can also connect, so a report contains the inbox's key, which only this engine's agents know.
    """

    def __init__(self, ranks: int, on_filled: Callable[[LeaseFilled], None], host: str = LOOPBACK) -> None:
        self._ranks = ranks
        self._on_filled = on_filled
        self._key = secrets.token_hex(16)
        self._sends: dict[str, SendInFlight] = {}
        self._socket = bounded(zmq.asyncio.Context.instance().socket(zmq.PULL))
        self._socket.linger = 0
        self._address = bind_at(self._socket, host)
        self._task = asyncio.get_running_loop().create_task(keep_running(self._receive, "reports of KV agents"))

    @property
    def address(self) -> str:
        """The destination of agents' reports, with the inbox's key."""
        return f"{self._address}#{self._key}"

    @contextmanager
    def sending(self) -> Generator[SendInFlight]:
        """Register a new send, whose end the caller awaits; forget it at the exit."""
        sending = SendInFlight(uuid.uuid4().hex, self._ranks)
        self._sends[sending.send_id] = sending
        try:
            yield sending
        finally:
            del self._sends[sending.send_id]

    async def _receive(self) -> None:
        while True:
            key, *messages = await self._socket.recv_multipart()
            if not secrets.compare_digest(key, self._key.encode()):
                continue  # not from one of this engine's agents
            for message in messages:
                with suppress(*UNREADABLE):
                    self._take(message)

    def _take(self, message: bytes) -> None:
        kind, body = msgspec.msgpack.decode(message, type=tuple[str, msgspec.Raw])
        if kind == SendDone.__name__:
            done = msgspec.msgpack.decode(body, type=SendDone)
            sending = self._sends.get(done.send_id)
            if sending is not None:
                sending.take(done)
        elif kind == LeaseFilled.__name__:
            self._on_filled(msgspec.msgpack.decode(body, type=LeaseFilled))
        elif kind == ReceiveDone.__name__ and (sink := process.sink) is not None:
            done = msgspec.msgpack.decode(body, type=ReceiveDone)
            ended, sender = done.ended, read_traceparent(done.ended.traceparent)
            if sender is None:
                return
            attributes = {"tercet.rank": done.rank, "tercet.bytes": ended.bytes}
            span = Span(
                RECEIVE, sink.enters(sender, RECEIVE, attributes), sender.span_id, ended.began_ns, ended.ended_ns,
                "server", attributes, error=ended.code, reason=ended.reason,
            )  # fmt: skip
            sink.take([span])  # below its sender's span, which is of another engine
