"""Write-behind: the prompts that engines have computed are copied to stores, after their first token and on no path.

The copies of a process wait in a short queue and go one after the other, so a slow store or a burst of prompts costs
copies and never a request: what does not fit is dropped, and what fails is not repeated.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque

from msgspec.structs import replace

from tercet.fleet import EngineFleet
from tercet.fleet.members import Member
from tercet.fleet.trace import Generation
from tercet.protocol import NoSpace, Request, TercetError, kv_obstacle, packed
from tercet.router.observe.metrics import CopyOutcome, WriteBehindMetrics

logger = logging.getLogger("tercet.router")
# Copies that wait: the oldest prompts come first, and a new one is dropped when as many wait.
MOST_WAITING = 64
COPY_SECONDS = 10.0
# Tokens at a prompt's beginning that choose its store, so that prompts with one beginning share blocks there.
HEAD_TOKENS = 64


class WriteBehind:
    """The copies of this router process, from the engines of ``fleet`` to its stores; :meth:`run` makes them."""

    def __init__(self, fleet: EngineFleet, metrics: WriteBehindMetrics) -> None:
        self._fleet, self._metrics = fleet, metrics
        self._waiting: deque[tuple[Request, str, Member]] = deque()
        self._more = asyncio.Event()
        fleet.on_answered.append(self.answered)

    async def run(self) -> None:
        while True:
            while self._waiting:
                await self._copy(*self._waiting.popleft())
            self._more.clear()
            await self._more.wait()

    def answered(self, generation: Generation) -> None:
        """Queue the copy of a prompt whose first token an engine has sent; do nothing without a store for it."""
        request, engine = generation.request, self._fleet.get(generation.engine.name)
        if engine is None or engine.leaving or (request.adapter is not None and not request.adapter_digest):
            return
        stores = stores_for(self._fleet, request, engine)
        if not stores:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._metrics.ended("dropped")
            return
        # Without images' data: the copy names the KV that the engine has, and nothing is computed for it. It needs an
        # id that differs from the sequence's, which still runs on that engine.
        features = tuple(each.without_data() for each in request.mm_features)
        copied = replace(request, seq_id=f"{request.seq_id}-copy", mm_features=features, sampling_params={})
        self._waiting.append((copied, engine.name, stores[0]))
        self._more.set()

    async def _copy(self, request: Request, name: str, store: Member) -> None:
        engine = self._fleet.get(name)
        outcome: CopyOutcome = "failed"
        tokens = 0
        try:
            if engine is None or engine.leaving or not engine.reachable or not store.reachable:
                return
            async with asyncio.timeout(COPY_SECONDS), store.engine.prep_recv(request) as space:
                size = space.kv_addr_info.layout.block_size
                if space.missing < size:
                    outcome = "held"
                    return
                begin = space.matched_len
                sent = await engine.engine.remote_send(request, space, begin, cached_only=True)
                tokens = sent.end - begin
                outcome = "copied" if tokens else "gone"
        except NoSpace:
            outcome = "dropped"
        except (TercetError, TimeoutError) as error:
            logger.debug("%s was not copied from %s to %s: %s", request.seq_id, name, store.name, error)
        finally:
            self._metrics.ended(outcome, tokens)


def stores_for(fleet: EngineFleet, request: Request, engine: Member) -> list[Member]:
    """Return the stores for a prompt that ``engine`` has, first the one that keeps prompts with this beginning.

    There is none for a prompt that is shorter than a block.
    """
    stores = [member for member in fleet.members if _fits(member, request, engine)]
    if not stores:
        return []
    # Rendezvous hashing: a store that comes or goes moves only the prompts that it keeps.
    head = packed(request.prompt[:HEAD_TOKENS])
    return sorted(stores, key=lambda each: zlib.crc32(head, zlib.crc32(each.name.encode())), reverse=True)


def _fits(store: Member, request: Request, engine: Member) -> bool:
    if not store.is_store or not store.is_open or not store.reachable or store.revision.layout is None:
        return False
    long_enough = request.num_tokens >= store.revision.layout.block_size
    return long_enough and not kv_obstacle(engine.revision, store.revision)
