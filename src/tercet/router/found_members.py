"""Engines that are found, in pods or in a roster, as engines of the state that a router's processes follow."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from tercet.fleet.discovery import Discovery, roles_of
from tercet.protocol import Role, TercetError
from tercet.router.shared_state import SharedState

logger = logging.getLogger("tercet.router")
RETRY_DELAY_S = 1.0


async def follow_found(state: SharedState, discovery: Discovery) -> None:
    """Make the state's members those that are found, next to those that an operator named, until cancelled."""
    told: dict[str, Role] = {}
    logger.info("engines are %s", discovery.source)
    async with aclosing(discovery.changes()) as changes:
        async for found in changes:
            while True:
                try:
                    await state.change(
                        lambda now, found=found, told=told: now.with_found(found, told), f"{discovery.source} say so"
                    )
                    break
                except TercetError as error:  # the state file is not writable, or is locked
                    logger.error("the engines stay as they are: %s", error.message)
                    await asyncio.sleep(RETRY_DELAY_S)
            told = roles_of(found)
