"""Background loops of a store: an error at each await, and each goes on."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tercet.cluster.ports import free_ports
from tercet.engine.interface import KeyedPrompt
from tercet.protocol import BadRequest
from tercet.store.announcer import Announcer
from tercet.store.blocks import StoreBlocks
from tercet.store.disk import DiskFolder
from tercet.transport import KVRegion
from tests.longest_wait import until

from ..supervision import Works, with_an_error_at_each_await

SIZE, LAYERS, BYTES = 4, 2, 64
SOON_MS = 50


async def test_missed_events_are_repeated() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        announcer = Announcer("127.0.0.1", SIZE, list)
        announcer.start()

        async def works() -> None:
            while not await asked():
                pass

        async def asked() -> bool:
            with zmq.asyncio.Context.instance().socket(zmq.DEALER) as asking:
                socket: Any = asking
                socket.linger = 0
                socket.connect(announcer.addresses["replay"])
                await socket.send_multipart([b"", bytes(8)])
                answers = 0
                while await socket.poll(SOON_MS):  # the loop may have lost the question
                    await socket.recv_multipart()
                    answers += 1
                return answers == 2  # a summary, and the end

        try:
            yield works
        finally:
            await announcer.close()

    await with_an_error_at_each_await("store/announcer.py:Announcer._repeat", started)


async def test_events_are_at_the_ports_that_were_chosen_or_the_port_is_named() -> None:
    first, port = next(announcers_at_ports())
    try:
        assert first.addresses == {"endpoint": f"tcp://127.0.0.1:{port}", "replay": f"tcp://127.0.0.1:{port + 1}"}
        with pytest.raises(BadRequest, match=r"kv-events-port: \d+ or \d+ cannot be used: Address already in use;"):
            Announcer("127.0.0.1", SIZE, list, port)
    finally:
        await first.close()


def announcers_at_ports() -> Iterator[tuple[Announcer, int]]:
    for port in free_ports("127.0.0.1", 20):
        with suppress(BadRequest):  # another process has the port after it
            yield Announcer("127.0.0.1", SIZE, list, port), port


async def test_blocks_are_written_behind(tmp_path: Path) -> None:
    folders, prompts = itertools.count(), itertools.count()

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        region = KVRegion.create(LAYERS, 4, BYTES)
        folder = DiskFolder(tmp_path / str(next(folders)), "tercet-0123456789abcdef", LAYERS * BYTES)
        blocks = StoreBlocks([region], SIZE, folder, 10_000)
        blocks.start()

        async def works() -> None:
            before = len(blocks.disk)
            while len(blocks.disk) == before:  # a block whose write ended in an error stays in memory only
                await blocks.reserve("lease", KeyedPrompt([next(prompts)] * SIZE))
                await blocks.release("lease", SIZE)
                await until(lambda: not blocks.waiting_writes)
            assert blocks.pool.available == 4

        try:
            yield works
        finally:
            await blocks.close()
            region.close()

    await with_an_error_at_each_await("store/blocks.py:StoreBlocks._write_behind", started)
