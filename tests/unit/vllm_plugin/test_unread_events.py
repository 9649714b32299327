"""A caller of the engine that leaves its events unread has its sequence ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tercet.protocol import Output
from tercet.vllm_plugin import endpoint
from tests.longest_wait import LONGEST_WAIT_S


@pytest.mark.parametrize("reads", [True, False])
async def test_events_that_nobody_reads(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "UNREAD_SECONDS", 60.0 if reads else 0.02)
    ended = asyncio.Event()

    async def outputs() -> AsyncGenerator[Output, None]:
        try:
            yield Output((2,))
            yield Output((3,), "stop")
        finally:
            ended.set()

    rest = outputs()
    events = endpoint._events(await anext(rest), rest)
    found = [await anext(events)]
    if not reads:
        await asyncio.wait_for(ended.wait(), LONGEST_WAIT_S)
    found += [event async for event in events]
    assert ended.is_set()
    assert (b"read nothing" in found[-1]) is not reads
    assert (b'"finish_reason":"stop"' in found[-1]) is reads
