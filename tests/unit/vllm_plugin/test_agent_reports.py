"""Reports of agents: those of this engine's own are believed, and nobody else's."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from tercet.transport import LeaseFilled, SendDone
from tercet.transport.agent.agent import Reporter
from tercet.vllm_plugin.edge.agent_reports import AgentReports
from tests.unit.transport.models import whose

SECONDS = 30.0


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
            async with asyncio.timeout(SECONDS):
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
            async with asyncio.timeout(SECONDS):
                assert (await sending.wait()).bytes == 5
    finally:
        reports._task.cancel()
        reports._socket.close()
        reporter.close()
