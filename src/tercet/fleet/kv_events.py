"""Subscription to the KV events of engines that publish them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from tercet.aio import keep_running
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.kv_inbox import KVInbox
from tercet.protocol import Engine, KVEvents, TercetError
from tercet.protocol.hosts import bracketed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.bounded_sockets import bounded

logger = logging.getLogger("tercet.fleet")
RETRY_DELAY_S, ASK_SETTLED_SECONDS = 5.0, 60.0
"""Seconds between polls for an engine's publisher address: before the engine has answered, and after that."""
REPLAY_SECONDS = 5.0
# The queue length of vLLM's publisher for a slow subscriber. Beyond it batches are lost and must be replayed.
MOST_UNREAD = 100_000
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


@asynccontextmanager
async def cache_followed(
    name: str, url: str, engine: Engine, knowledge: FleetKnowledge, restarted: asyncio.Event
) -> AsyncGenerator[None]:
    """Run :func:`follow_cache` while entered."""
    following = asyncio.create_task(
        keep_running(partial(follow_cache, name, url, engine, knowledge, restarted), f"KV events of {name}")
    )
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait({following})


async def follow_cache(
    name: str, url: str, engine: Engine, knowledge: FleetKnowledge, restarted: asyncio.Event | None = None
) -> None:
    """Keep ``knowledge`` of an engine's cache up to date while the engine publishes KV events, until cancelled.

    The publisher's address is part of the engine's status, which is polled: the address changes with a restart.
    ``restarted`` is set when another incarnation of the engine is met.
    """
    restarted = restarted or asyncio.Event()
    following: asyncio.Task[None] | None = None
    current: KVEvents | None = None
    try:
        while True:
            restarted.clear()
            found, settled = await _published(engine, current)
            if found != current or (following is not None and following.done()):
                await _end(following)
                current, following = found, None
                knowledge.cleared(name)
                if found is not None:
                    following = asyncio.create_task(_follow(at(found, url), KVInbox(name, knowledge)))
            await _wait(restarted, ASK_SETTLED_SECONDS if settled else RETRY_DELAY_S, following)
    finally:
        await _end(following)


def at(events: KVEvents, url: str) -> KVEvents:
    """Return ``events`` with wildcard hosts in the addresses replaced by the host of ``url``, the engine's URL."""
    host = bracketed(urlsplit(url).hostname or "127.0.0.1")

    def reached(address: str) -> str:
        for anywhere in ("//0.0.0.0:", "//[::]:", "//*:"):
            address = address.replace(anywhere, f"//{host}:")
        return address

    replay = None if events.replay is None else reached(events.replay)
    return msgspec.structs.replace(events, endpoint=reached(events.endpoint), replay=replay)


async def _published(engine: Engine, before: KVEvents | None) -> tuple[KVEvents | None, bool]:
    """Return the publisher's addresses, and True if the engine answered now; otherwise ``before`` and False."""
    try:
        return (await engine.status()).kv_events, True
    except TercetError:
        return before, False  # the engine may be back soon with its cache; numbers that restart show a lost cache


async def _wait(restarted: asyncio.Event, seconds: float, following: asyncio.Task[None] | None) -> None:
    """Wait ``seconds`` until the next poll; less if the engine was restarted or following its events has failed."""
    waits = asyncio.create_task(restarted.wait())
    try:
        await asyncio.wait(
            {waits} if following is None else {waits, following}, timeout=seconds, return_when="FIRST_COMPLETED"
        )
    finally:
        waits.cancel()
    if following is not None and following.done():
        await asyncio.sleep(RETRY_DELAY_S)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def _follow(events: KVEvents, inbox: KVInbox) -> None:
    context = zmq.asyncio.Context.instance()
    with ExitStack() as stack:
        live: Any = stack.enter_context(bounded(context.socket(zmq.SUB)))
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.RCVHWM, MOST_UNREAD)
        live.setsockopt(zmq.IPV6, 1)
        live.setsockopt(zmq.SUBSCRIBE, events.topic.encode())
        live.connect(events.endpoint)
        try:
            await _replay(events, inbox)  # blocks that were stored before this subscription
            while True:
                number, payload = _numbered(await live.recv_multipart())
                if inbox.take(number, payload):
                    await _replay(events, inbox)
                    inbox.take_replayed(number, payload)
        except (ValueError, zmq.ZMQError, *UNREADABLE) as error:
            logger.warning("KV events from %s: %s; subscribing again", events.endpoint, error)


async def _replay(events: KVEvents, inbox: KVInbox) -> None:
    """Request and apply all batches from the next expected one on; do nothing without a replay address or an answer."""
    if events.replay is None:
        return
    context = zmq.asyncio.Context.instance()
    with bounded(context.socket(zmq.DEALER)) as asking:
        socket: Any = asking
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(events.replay)
        await socket.send_multipart([b"", inbox.expected.to_bytes(NUMBER_BYTES, "big")])
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                while True:
                    _, *rest = await socket.recv_multipart()
                    if rest[1:2] == [END_OF_REPLAY]:
                        return
                    inbox.take_replayed(*_numbered(rest))
        except TimeoutError:
            logger.warning("KV events: no replay from %s", events.replay)


def _numbered(parts: list[bytes]) -> tuple[int, bytes]:
    if len(parts) != 3 or len(parts[1]) != NUMBER_BYTES:
        raise ValueError(f"not a KV event: {len(parts)} parts")
    number = int.from_bytes(parts[1], "big", signed=True)
    if number < 0:
        raise ValueError(f"not a KV event: number {number}")
    return number, parts[2]
