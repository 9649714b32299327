"""Engines that join a router: each starts, joins when it serves, stays a member, and is drained before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tercet.aio import keep_running
from tercet.cluster.child_process import Process, describe_exit
from tercet.cluster.running_fleet import LOADING, OnEvent, until_ready
from tercet.protocol import Role, TercetError
from tercet.protocol.wire import JoinCall
from tercet.wire.client.bounded_answers import RouterMembership

AGAIN_SECONDS = 2.0
"""Interval in seconds at which a member repeats its call to join, so that a restarted router soon lists it again."""
LOOK_SECONDS = 0.2
LEAVE_SECONDS = 5.0
"""Longest wait in seconds for a router that does not answer when an engine leaves."""


@dataclass
class JoiningEngine:
    """One engine, which the router reaches at ``url``; ``uid`` identifies this start of the engine."""

    name: str
    role: Role
    url: str
    process: Process
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def call(self, leaving: bool = False) -> JoinCall:
        """Return the call by which the engine joins the router, or is drained before it leaves."""
        return JoinCall(url=self.url, uid=self.uid, role=self.role, leaving=leaving)


async def run_joined(
    engines: Sequence[JoiningEngine], router: str, secret: str, drain_seconds: float, on_event: OnEvent
) -> None:
    """Run engines as members of the router's fleet until cancelled; then drain, remove and stop them.

    ``drain_seconds`` is the longest time in which sequences are moved or finish. Raises
    :class:`~tercet.cluster.child_process.StartFailed` if an engine does not start, or ends by itself.
    """
    try:
        for engine in engines:
            await engine.process.start()
            on_event(engine.name, LOADING)
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(_run(engine, router, secret, drain_seconds, on_event))
    except* TercetError as failures:
        raise failures.exceptions[0] from None
    finally:
        await asyncio.shield(asyncio.gather(*(engine.process.stop() for engine in engines)))


async def _run(engine: JoiningEngine, router: str, secret: str, drain_seconds: float, on_event: OnEvent) -> None:
    await until_ready(engine.process, engine.url, on_event)
    engine.process.remember_shared_memory()
    async with RouterMembership(router, engine.name, secret) as membership:
        staying = asyncio.create_task(
            keep_running(partial(_stay, engine, membership, on_event), f"join of {engine.name}")
        )
        ended = asyncio.create_task(engine.process.ended())
        try:
            await asyncio.wait({staying, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            staying.cancel()
            has_ended = ended.done()
            ended.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            seconds = 0.0 if has_ended else drain_seconds
            await asyncio.shield(_leave(engine, membership, seconds, on_event))
        if has_ended:
            raise engine.process.failure(describe_exit(ended.result()))
        staying.result()


async def _stay(engine: JoiningEngine, membership: RouterMembership, on_event: OnEvent) -> None:
    """Repeat the call to join until cancelled; report each change of the result once."""
    said = ""
    while True:
        try:
            await membership.join(engine.call())
            state = "is a member of the router's fleet"
        except TercetError as error:
            state = f"is not a member: {error.message}"
        if state != said:
            on_event(engine.name, state)
            said = state
        await asyncio.sleep(AGAIN_SECONDS)


async def _leave(engine: JoiningEngine, membership: RouterMembership, seconds: float, on_event: OnEvent) -> None:
    """Drain the engine, then remove it from the router's fleet."""
    try:
        async with asyncio.timeout(seconds + LEAVE_SECONDS):
            await _empty(engine, membership, seconds, on_event)
            await membership.leave(engine.uid)
            on_event(engine.name, "has left the router's fleet")
    except TimeoutError:
        on_event(engine.name, "stops without leaving the fleet: the router does not answer")
    except TercetError as error:
        on_event(engine.name, f"stops without leaving the fleet: {error.message}")


async def _empty(engine: JoiningEngine, membership: RouterMembership, seconds: float, on_event: OnEvent) -> None:
    """Wait at most ``seconds`` until the engine has no sequences; the router moves them to other engines."""
    last = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while left := (await membership.join(engine.call(leaving=True))).in_flight:
                if left != last:
                    last = left
                    on_event(engine.name, f"leaving the fleet: {left} sequences left")
                await asyncio.sleep(LOOK_SECONDS)
