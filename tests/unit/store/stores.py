"""Stores in this process, whose agents are processes, and engines that fill them and read from them."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tercet.cluster.ports import free_ports
from tercet.protocol import EngineStatus, KVLayout, Request, Reservation, Sent, TercetError, content_of, packed
from tercet.protocol.addresses import RankRegion
from tercet.store.blocks import StoreBlocks
from tercet.store.server import StoreConfig, StoreServer, regions_for, serving, started_agents
from tercet.transport import KVRegion, RankTransport, SendDestination, SendReport, TransportSettings, routes
from tercet.wire.client import HttpEngine
from tests.longest_wait import LONGEST_WAIT_S, until

SIZE, LAYERS, BLOCK_BYTES = 16, 3, 4096
LAYOUT = KVLayout("weights", "float32", LAYERS, 2, 8, SIZE, BLOCK_BYTES, 1, "test", splits_by_head=True)
MIRROR = EngineStatus(
    engine="e", model="m", version="1.0", vllm_version="0.32", block_size=SIZE, total_blocks=1, free_blocks=1,
    running=0, waiting=0, kv_cache_usage=0.0, max_model_len=100_000, leases=0, sends=0, fingerprint="weights",
    layout=LAYOUT, regions=(RankRegion((LAYERS,)),),
)  # fmt: skip
numbers = itertools.count()


def mirror(ranks: int = 1, model: str = "weights") -> EngineStatus:
    """The status of an engine with so many tensor-parallel ranks."""
    layout = replace(LAYOUT, model=model, tp_size=ranks, block_bytes=BLOCK_BYTES // ranks)
    return replace(MIRROR, layout=layout, fingerprint=model, regions=(RankRegion((LAYERS,)),) * ranks)


@dataclass
class Store:
    """A running store."""

    config: StoreConfig
    server: StoreServer
    blocks: StoreBlocks
    regions: Sequence[KVRegion]
    engine: HttpEngine

    def kv(self, prompt: Sequence[int], salt: str | None = None) -> list[bytes]:
        """The KV in memory of a prompt's whole blocks, rank by rank and layer by layer."""
        from tercet.engine.interface import KeyedPrompt
        from tercet.store.contents import contents_of

        slots = [self.blocks.pool.slot(each.name) for each in contents_of(KeyedPrompt([*prompt], salt), SIZE)]
        return [
            b"".join(bytes(region.blocks(layer, slot)) for slot in slots if slot is not None)
            for region in self.regions
            for layer in range(LAYERS)
        ]


@asynccontextmanager
async def store(
    disk: Path | None = None, status: EngineStatus = MIRROR, blocks: int = 32, disk_blocks: int = 1000, secret: str = ""
) -> AsyncGenerator[Store]:
    """Run a store of so many blocks."""
    (port,) = free_ports("127.0.0.1", 1)
    of_a_block = LAYERS * BLOCK_BYTES
    config = StoreConfig(
        name=f"store-{next(numbers)}", host="127.0.0.1", port=port, mirrors=[], memory=blocks * of_a_block, disk=disk,
        disk_size=disk_blocks * (of_a_block + 1024), secret=secret, transport="tcp",
    )  # fmt: skip
    regions = regions_for(status, config.memory)
    agents = started_agents(config, status, regions)
    try:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving(config, status, regions, agents))
            url = f"http://127.0.0.1:{port}"
            engine = await stack.enter_async_context(HttpEngine(config.name, url, secret=secret))
            yield Store(config, server, server.blocks, regions, engine)
    finally:
        for agent in agents:
            agent.close()
        for region in regions:
            region.close()


def request(prompt: Sequence[int], salt: str | None = None) -> Request:
    return Request(seq_id=f"s{next(numbers)}", prompt=tuple(prompt), cache_salt=salt)


def prompt_of(blocks: int, seed: int = 0, rest: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1000) for _ in range(blocks * SIZE + rest)]


class Sender:
    """The ranks of an engine with random KV, which push whole prompts into leases."""

    def __init__(
        self, ranks: int = 1, seed: int = 1, blocks: int = 64, secret: str = "", model: str = "weights"
    ) -> None:  # fmt: skip
        layout = mirror(ranks, model).layout
        assert layout is not None
        self.layout = layout
        self.regions = [KVRegion.create(LAYERS, blocks, layout.block_bytes) for _ in range(ranks)]
        choose = random.Random(seed)
        for region in self.regions:
            for layer in range(LAYERS):
                region.blocks(layer, 0, blocks)[:] = choose.randbytes(blocks * layout.block_bytes)
        settings = TransportSettings(secret=secret, transport="tcp")
        self.ranks = [RankTransport(region, layout.exchange_key, settings) for region in self.regions]

    def kv(self, blocks: int) -> list[bytes]:
        """The KV of the first blocks, rank by rank and layer by layer."""
        return [bytes(region.blocks(layer, 0, blocks)) for region in self.regions for layer in range(LAYERS)]

    async def push(self, request: Request, to: Reservation) -> None:
        """Send all KV that is missing; the block at ``n`` of the prompt is this engine's block ``n``."""
        info, loop = to.kv_addr_info, asyncio.get_running_loop()
        content = content_of(packed(request.prompt), request.cache_salt, to.end)
        for number, rank in enumerate(self.ranks):
            done: asyncio.Future[SendReport | TercetError] = loop.create_future()
            send = secrets.token_hex(8)
            destinations = [
                SendDestination(info.ranks[each.receiver].addresses, each.head_slice, each.planes)
                for each in routes(self.layout, info.layout, number)
            ]

            def ended(found: SendReport | TercetError, to: asyncio.Future[SendReport | TercetError] = done) -> None:
                loop.call_soon_threadsafe(to.set_result, found)

            rank.sends.open(send, info.lease, content, destinations, ended)
            blocks = range(info.begin // SIZE, -(-to.end // SIZE))
            rank.sends.push(send, range(LAYERS), 0, blocks)
            rank.sends.finish(send, info.begin, to.end)
            async with asyncio.timeout(LONGEST_WAIT_S):
                outcome = await done
            if isinstance(outcome, TercetError):
                raise outcome

    async def fill(self, store: Store, prompt: Sequence[int], salt: str | None = None) -> int:
        """Bring a prompt's KV to a store; return what it had already."""
        copied = request(prompt, salt)
        async with store.engine.prep_recv(copied) as space:
            if space.missing:
                await self.push(copied, space)
        await until(lambda: not len(store.server.edge.leases))
        await until(lambda: not store.blocks.leases)
        return space.matched_len

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for region in self.regions:
            region.close()


async def pull(source: Store, target: Store, prompt: Sequence[int], salt: str | None = None) -> tuple[int, Sent | None]:
    """Bring what ``source`` has of a prompt to ``target``; return what it had, and what was sent."""
    copied, sent = request(prompt, salt), None
    async with target.engine.prep_recv(copied) as space:
        if space.missing:
            sent = await source.engine.remote_send(copied, space, space.matched_len, cached_only=True)
    await until(lambda: not target.blocks.leases)
    return space.matched_len, sent


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file."""
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    with suppress(FileNotFoundError):
        path.write_bytes(whole)
