"""The edge's inbox for agents' reports: ended sends, filled leases, and receives of traced senders."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from tercet.aio import keep_running
from tercet.protocol import TransferFailed
from tercet.protocol.spans import Span, process, read_traceparent
from tercet.protocol.wire import UNREADABLE
from tercet.transport import LeaseFilled, ReceiveDone, SendDone
from tercet.transport.sockets import LOOPBACK, bind_somewhere, bounded

RECEIVE = "receive"


@dataclass(frozen=True)
class Delivered:
    """A finished send, summed over ranks."""

    bytes: int
    chunks: int
    transport: str


@dataclass
class SendInFlight:
    """One send, until every rank has reported. ``failed`` completes as soon as one rank reports an error."""

    send_id: str
    ranks: int
    reports: dict[int, SendDone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()

    def take(self, report: SendDone) -> None:
        """Record one rank's report."""
        self.reports[report.rank] = report
        if report.error is not None and not self.failed.done():
            self.failed.set_result(None)
        if (report.error is not None or len(self.reports) == self.ranks) and not self.done.done():
            self.done.set_result(None)

    async def wait(self) -> Delivered:
        """Wait for all ranks; raises :class:`~tercet.protocol.TransferFailed` if one failed."""
        await self.done
        errors = [report.error for report in self.reports.values() if report.error is not None]
        if errors:
            raise TransferFailed(errors[0], "kv_addr_info")
        reports = self.reports.values()
        ways = {way for report in reports for way in report.transport.split("+") if way}
        return Delivered(
            sum(report.bytes for report in reports), sum(report.chunks for report in reports), "+".join(sorted(ways))
        )


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
        self._address = bind_somewhere(self._socket, host)
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
        elif kind == ReceiveDone.__name__:
            _tell_receive(msgspec.msgpack.decode(body, type=ReceiveDone))


def _tell_receive(done: ReceiveDone) -> None:
    """Export a span of a receive, below its sender's span on another engine, if this process exports spans."""
    sink, ended = process.sink, done.ended
    sender = read_traceparent(ended.traceparent)
    if sink is None or sender is None:
        return
    told = {"tercet.rank": done.rank, "tercet.bytes": ended.bytes}
    place = sink.enters(sender, RECEIVE, told)
    sink.take(
        [
            Span(
                RECEIVE, place, sender.span_id, ended.began_ns, ended.ended_ns, "server", told,
                error=ended.code, reason=ended.reason,
            )
        ]
    )  # fmt: skip
