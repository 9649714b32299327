"""A stranger who reserves an engine's KV cache until nothing is left, and holds on to it for a while."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

from tercet.chaos.client_load import VOCABULARY
from tercet.protocol import Engine, NoSpace, Request, TercetError

MOST_RESERVATIONS = 1000


async def fill_cache(engine: Engine, seconds: float, seed: int) -> int:
    """Reserve all that the engine lends, for so long; returns the number of reservations.

    An engine that goes away meanwhile ends it.
    """
    chance, held = random.Random(seed), 0
    async with AsyncExitStack() as stack:
        try:
            status = await engine.status()
            length = min(status.total_blocks // 8 * status.block_size, status.max_model_len - 1)
            while held < MOST_RESERVATIONS and length >= status.block_size:
                prompt = tuple(chance.randrange(VOCABULARY) for _ in range(length))
                request = Request(seq_id=f"stranger-{chance.getrandbits(64):x}", prompt=prompt)
                try:
                    await stack.enter_async_context(engine.prep_recv(request))
                    held += 1
                except NoSpace:
                    length //= 2
        except TercetError:
            return held
        await asyncio.sleep(seconds)
    return held
