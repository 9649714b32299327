"""Discovery for several router processes: engines that are found become members of the shared state."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from tercet.fleet.discovery import Discovery, roles_of
from tercet.protocol import Role, TercetError
from tercet.router.state.shared_state import SharedState

logger = logging.getLogger("tercet.router")
RETRY_DELAY_S = 1.0


async def follow_found(state: SharedState, discovery: Discovery) -> None:
    """Keep the state's members equal to the engines found and those that an operator named, until cancelled."""
    told: dict[str, Role] = {}
    logger.info("engines: following %s", discovery.source)
    async with aclosing(discovery.changes()) as changes:
        async for found in changes:
            while True:
                try:
                    await state.change(
                        lambda now, found=found, told=told: now.with_found(found, told),
                        f"reported by {discovery.source}",
                    )
                    break
                except TercetError as error:  # the state file cannot be written, or is locked
                    logger.error("cannot store the engines found; members stay unchanged: %s", error.message)
                    await asyncio.sleep(RETRY_DELAY_S)
            told = roles_of(found)
