"""The verb ``abort`` over HTTP, which other clients than Tercet's router call."""

from __future__ import annotations

from typing import Any

from tercet.protocol import Engine
from tercet.protocol.wire import AbortCall
from tercet.wire.client import HttpEngine


async def abort(engine: Engine, seq_id: str) -> None:
    assert isinstance(engine, HttpEngine)
    await engine._calls.result_of("abort", AbortCall(seq_id=seq_id), dict[str, Any])
