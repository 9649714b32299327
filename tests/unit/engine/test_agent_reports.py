"""Reports of agents: those of this engine's own are believed, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from tercet.engine.agents import AgentReports
from tercet.protocol.spans import Span, SpanContext, process
from tercet.transport import LeaseFilled, ReceiveDone, ReceiveEnd, SendDone
from tercet.transport.agent.agent import Reporter
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.models import whose


@pytest.mark.parametrize("key", [b"", b"0" * 32, b"key"])
async def test_a_process_that_does_not_know_the_inbox_s_key_reports_nothing(key: bytes) -> None:
    filled: list[LeaseFilled] = []
    reports, reporter = AgentReports(1, filled.append), Reporter()
    stranger: Any = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    stranger.connect(reports.address.partition("#")[0])
    try:
        with reports.sending() as sending:
            forged = msgspec.msgpack.encode(["SendDone", SendDone(sending.send_id, 0, 666, 1)])
            for frames in ([key, forged], [forged], [forged, key], [key, forged, forged]):
                await stranger.send_multipart(frames)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sending.wait()
            assert not sending.reports
        with reports.sending() as sending:
            reporter.report(reports.address, LeaseFilled("f" * 32, 0, whose(16)))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert (await sending.wait()).bytes == 5
        assert filled == [LeaseFilled("f" * 32, 0, whose(16))]
    finally:
        reports._task.cancel()
        reports._socket.close()
        stranger.close(linger=0)
        reporter.close()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
async def test_agents_on_other_machines_report_to_the_address_that_they_reach(host: str) -> None:
    reports, reporter = AgentReports(1, print, host), Reporter()
    try:
        with reports.sending() as sending:
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert (await sending.wait()).bytes == 5
    finally:
        reports._task.cancel()
        reports._socket.close()
        reporter.close()


class Sink:
    """Keeps what it is told, below its caller."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def enters(self, caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext:
        assert caller is not None
        return caller.child()

    def take(self, spans: Iterable[Span]) -> None:
        self.spans += spans


SENDER = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


async def test_a_receive_is_a_span_below_its_sender_s(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, (reports, reporter) = Sink(), (AgentReports(1, print), Reporter())
    lost = ReceiveEnd("f" * 32, SENDER.traceparent, 5, 9, 64, "transfer_failed", "gone")
    try:
        with reports.sending() as sending:
            reporter.report(reports.address, ReceiveDone(0, ReceiveEnd("f" * 32, SENDER.traceparent, 3, 4, 1)))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            await asyncio.wait_for(sending.wait(), LONGEST_WAIT_S)  # nobody wants spans
            monkeypatch.setattr(process, "sink", sink)
        with reports.sending() as sending:
            reporter.report(reports.address, ReceiveDone(0, msgspec.structs.replace(lost, traceparent="nonsense")))
            reporter.report(reports.address, ReceiveDone(1, lost))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            await asyncio.wait_for(sending.wait(), LONGEST_WAIT_S)
    finally:
        reports._task.cancel()
        reports._socket.close()
        reporter.close()
    (span,) = sink.spans
    assert (span.name, span.parent, span.context.trace_id) == ("receive", SENDER.span_id, SENDER.trace_id)
    assert (span.began_ns, span.ended_ns, span.error, span.reason) == (5, 9, "transfer_failed", "gone")
    assert span.attributes == {"tercet.rank": 1, "tercet.bytes": 64}
