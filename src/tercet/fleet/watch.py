"""Looks at engines again and again: who answers, who makes progress, who is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tercet.aio import TaskSet
from tercet.fleet.engine_fleet import EngineFleet, Member
from tercet.protocol import EngineStatus, EngineUnreachable, TercetError

logger = logging.getLogger("tercet.fleet")
LOOK_SECONDS = 0.5
REPORTED_WITHIN = 1.0
"""Seconds without a report after which an engine is asked for one."""


class Watch:
    """Acts on what the fleet's :class:`~tercet.fleet.liveness.Liveness` decides.

    ``may_be_picked`` says whether an engine that answers is one that this fleet wants; it says itself why not.
    ``on_fault`` is told of what no engine should do.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        may_be_picked: Callable[[Member, EngineStatus], bool],
        on_fault: Callable[[Member, str], None],
    ) -> None:
        self._fleet = fleet
        self._may_be_picked = may_be_picked
        self._on_fault = on_fault
        self._questions = TaskSet()
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look until cancelled. No engine waits for another one's answer."""
        try:
            while True:
                self._ask_the_silent()
                for stuck in self._fleet.stand_still(LOOK_SECONDS):
                    logger.error("engines: %s is stuck, and not picked until it goes on: %s", *stuck)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._questions.close()

    def answered(self, member: Member, status: EngineStatus) -> None:
        """An engine has said how it is."""
        self._fleet.heard(member.name, status.stalled_s)
        member.reachable = self._may_be_picked(member, status) and not self._fleet.liveness.is_stuck(member.name)

    def _ask_the_silent(self) -> None:
        self._asking = {key: task for key, task in self._asking.items() if not task.done()}
        for member in self._fleet.members:
            silent = not self._fleet.heard_within(member.name, REPORTED_WITHIN)
            if (silent or not member.reachable) and id(member) not in self._asking:
                self._asking[id(member)] = self._questions.spawn(self._ask(member), f"question to {member.name}")

    async def _ask(self, member: Member) -> None:
        try:
            self.answered(member, await member.engine.status())
        except EngineUnreachable:
            member.reachable = False
        except TercetError as error:
            logger.debug("engines: %s answers: %s", member.name, error)
        except Exception as error:  # such as that of a connection closed meanwhile
            self._on_fault(member, f"{type(error).__name__}: {error}")
