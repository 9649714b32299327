"""Subscription to the KV events of engines that publish them, and what the events say about their caches.

:class:`KVInbox` applies the events without I/O. Messages have vLLM's wire format (``vllm/distributed/kv_events.py``);
only fields that prefix indexes need are read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from tercet.aio.tasks import TaskSet
from tercet.decisions.scheduling.plugin import DEVICE, TIER_WEIGHTS
from tercet.fleet.knowledge import FleetKnowledge
from tercet.protocol import Engine, KVEvents, TercetError
from tercet.protocol.content import extra_of
from tercet.protocol.names import bracketed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.sockets import bounded

logger = logging.getLogger("tercet.fleet")
RETRY_DELAY_S, ASK_SETTLED_SECONDS = 5.0, 60.0
"""Seconds before the next poll of an engine that does not answer, or the next subscription, and between other polls."""
REPLAY_SECONDS = 5.0
# The queue length of vLLM's publisher for a slow subscriber. Beyond it batches are lost and must be replayed.
MOST_UNREAD = 100_000
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
BlockName = int | bytes
# Kinds of layers that do not attend to all tokens: their blocks say little about a prompt's matches.
WINDOWED = frozenset(
    ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "cross_attention",
     "encoder_only_attention")
)  # fmt: skip
HERE = "local"
MOST_SIZES = 8
"""Largest number of block sizes of one engine: vLLM has up to two per kind of layer, for full and for last blocks."""
MOST_WARNINGS = 20
DIGEST = re.compile(r"[0-9a-f]{64}")


@asynccontextmanager
async def cache_followed(
    name: str, url: str, engine: Engine, knowledge: FleetKnowledge, restarted: asyncio.Event
) -> AsyncGenerator[None]:
    """Run :func:`follow_cache` while entered."""
    tasks = TaskSet()
    tasks.keep(partial(follow_cache, name, url, engine, knowledge, restarted), f"KV events of {name}")
    try:
        yield
    finally:
        await tasks.close()


async def follow_cache(
    name: str, url: str, engine: Engine, knowledge: FleetKnowledge, restarted: asyncio.Event | None = None
) -> None:
    """Keep ``knowledge`` of an engine's cache up to date while the engine publishes KV events, until cancelled.

    The publisher's address is part of the engine's status, which is polled: the address changes with a restart.
    ``restarted`` is set when another incarnation of the engine is met.
    """
    restarted, current, following = restarted or asyncio.Event(), None, TaskSet()
    try:
        while True:
            restarted.clear()
            seconds = RETRY_DELAY_S
            # Without an answer, go on: it may be back soon with its cache; numbers that restart show a lost cache.
            with suppress(TercetError):
                found, seconds = (await engine.status()).kv_events, ASK_SETTLED_SECONDS
                # Another address is another publisher, whose blocks and numbers have nothing to do with the last one's.
                if found != current:
                    await following.close()
                    current = found
                    knowledge.cleared(name)
                    if found is not None:
                        work = partial(_follow, at(found, url), name, knowledge)
                        following.keep(work, f"subscription to {name}")
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await restarted.wait()
    finally:
        await following.close()


def at(events: KVEvents, url: str) -> KVEvents:
    """Return ``events`` with wildcard hosts in the addresses replaced by the host of ``url``, the engine's URL."""
    host = bracketed(urlsplit(url).hostname or "127.0.0.1")

    def reached(address: str) -> str:
        for anywhere in ("//0.0.0.0:", "//[::]:", "//*:"):
            address = address.replace(anywhere, f"//{host}:")
        return address

    replay = None if events.replay is None else reached(events.replay)
    return msgspec.structs.replace(events, endpoint=reached(events.endpoint), replay=replay)


async def _follow(events: KVEvents, name: str, knowledge: FleetKnowledge) -> None:
    """Apply the events of one publisher until cancelled; after an unreadable one, forget all and subscribe again."""
    while True:
        # Of an earlier subscription removals may have been missed, and it may have failed by any error.
        knowledge.cleared(name)
        inbox = KVInbox(name, knowledge)
        with bounded(zmq.asyncio.Context.instance().socket(zmq.SUB)) as subscribing:
            live: Any = subscribing
            live.setsockopt(zmq.LINGER, 0)
            # A bound: a busy router must not keep the events of hours in memory.
            live.setsockopt(zmq.RCVHWM, MOST_UNREAD)
            live.setsockopt(zmq.IPV6, 1)
            live.setsockopt(zmq.SUBSCRIBE, events.topic.encode())
            live.connect(events.endpoint)
            try:
                # After the subscription has begun, so that no batch is between the two; a batch that is in both counts
                # once.
                await _replay(events, inbox)  # blocks that were stored before this subscription
                while True:
                    number, payload = _numbered(await live.recv_multipart())
                    if inbox.take(number, payload):
                        await _replay(events, inbox)
                        inbox.take_replayed(number, payload)
            except (ValueError, zmq.ZMQError, *UNREADABLE) as error:
                logger.warning("KV events from %s: %s; subscribing again", events.endpoint, error)
        await asyncio.sleep(RETRY_DELAY_S)


async def _replay(events: KVEvents, inbox: KVInbox) -> None:
    """Request and apply all batches from the next expected one on; do nothing without a replay address or an answer."""
    if events.replay is None:
        return
    with bounded(zmq.asyncio.Context.instance().socket(zmq.DEALER)) as asking:
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


# ---- what the events say ---------------------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A copy of consecutive blocks of ``block_size`` tokens each was stored in the cache."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=0)]
    lora_id: int | None = None
    lora_name: str | None = None
    # For each block, the parts of its name besides its tokens: the cache salt (first block only), an adapter, images.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None  # of the layers, for models that have several groups
    kv_cache_spec_kind: str | None = None  # the kind of these layers
    # The device or a lower tier, which may report hashes only, without tokens and with size 0, and may have blocks of
    # another size. The next two describe it as well.
    medium: str | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """A copy of each of these blocks was removed from the cache."""

    block_hashes: list[BlockName]
    group_idx: int | None = None
    medium: str | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """All blocks were removed: the cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step; ``ts`` is the engine's clock in seconds."""

    ts: float
    events: list[KVEvent]


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Kind(msgspec.Struct, frozen=True):
    type: str


_decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
_decode_events = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_event = msgspec.msgpack.Decoder(KVEvent).decode
_decode_kind = msgspec.msgpack.Decoder(_Kind).decode


class KVInbox:
    """The receiver of one engine's numbered batches, which applies each batch once and in order.

    vLLM numbers batches from 0 at each start of an engine, publishes without waiting for subscribers, and replays
    recent batches on request. ``name`` is the engine's name in the fleet. ``expected`` is the number of the next
    batch, where a replay must begin.
    """

    def __init__(self, name: str, knowledge: FleetKnowledge) -> None:
        self._name = name
        self._knowledge = knowledge
        self.expected = 0
        self._last_live = -1
        self._sizes = set[int]()
        self._warned = set[str]()
        self._group, self._looks_back = 0, False

    def reset(self) -> None:
        self._knowledge.cleared(self._name)
        self.expected, self._last_live = 0, -1
        self._sizes.clear()
        self._group, self._looks_back = 0, False

    def take(self, number: int, payload: bytes) -> bool:
        """Apply a published batch; return True, and do not apply it, if earlier batches are missing and need a replay.

        Raises one of ``UNREADABLE`` for an invalid batch.
        """
        batch = self._read(payload)
        # An engine that restarted at the same address numbers its batches from 0 again.
        if number <= self._last_live:
            self.reset()  # a publisher's numbers only grow, so this is a new publisher
        self._last_live = number
        if number > self.expected:
            return True
        self._apply(number, batch)
        return False

    def take_replayed(self, number: int, payload: bytes) -> None:
        """Apply a replayed batch, or a published batch that had to wait for earlier ones.

        If batches are missing before it, removals may be missing, so all older knowledge is dropped.
        """
        batch = self._read(payload)
        # Too little knowledge costs a prefix hit; knowledge of blocks that are gone costs a wrong pick each time.
        if number > self.expected:
            self._knowledge.cleared(self._name)
            self.expected = number
        self._apply(number, batch)

    def _read(self, payload: bytes) -> Sequence[KVEvent]:
        """Return the events of a batch; an unreadable event is skipped, the others count."""
        try:
            return _decode_batch(payload).events
        except UNREADABLE:
            raw = _decode_events(payload).events
        events = list[KVEvent]()
        for each in raw:
            try:
                events.append(_decode_event(each))
            except UNREADABLE as error:
                kind = _decode_kind(each).type
                self._warn(f"{kind} event", f"ignoring an invalid {kind} event: {error}")
                # A missing BlockStored event only loses a match; after a missing BlockRemoved event, prompts would
                # match blocks that do not exist any more.
                if kind == BlockRemoved.__name__:
                    events.append(AllBlocksCleared())
        return events

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(kind)
            logger.warning("KV events of %s: %.300s; more of this kind are not logged", self._name, message)

    def _apply(self, number: int, events: Sequence[KVEvent]) -> None:
        # A batch may come twice: published, and in a replay.
        if number != self.expected:
            return  # it was applied already
        self.expected += 1
        # Follow a group of layers that attends to all tokens, if there is one: others drop blocks behind their window.
        # Events of one step come in one batch, so no event of that group was missed before its first event arrives.
        for event in events if not self._looks_back else ():
            if not isinstance(event, BlockStored) or _tier_of(event) != DEVICE:
                continue
            if (kind := event.kv_cache_spec_kind) is not None and kind not in WINDOWED:
                if event.group_idx not in (None, self._group):
                    self._knowledge.cleared(self._name)  # forget the events of the other groups
                self._group, self._looks_back = event.group_idx or 0, True
                break
        for event in events:
            tier = _tier_of(event)
            if isinstance(event, AllBlocksCleared):
                self._knowledge.cleared(self._name)
            elif tier is None or event.group_idx not in (None, self._group):
                continue
            elif isinstance(event, BlockStored):
                self._store(event, tier)
            else:
                self._knowledge.unstore(self._name, event.block_hashes, tier)

    def _store(self, event: BlockStored, tier: str) -> None:
        # The first key of each block is the adapter's name, if there is one; it is recorded as the adapter.
        named: list[Any] | None = None if event.lora_name is None else [event.lora_name]
        keys = [block[1:] if block[:1] == named else block for block in (each or [] for each in event.extra_keys or ())]
        extras, salt = None, None
        if any(keys):
            extras, keys = _features_of(keys)
        if any(keys):
            # Only a salt is one text in a chain's first block; other keys are of prompts that Tercet cannot name.
            first = keys[0]
            if event.parent_block_hash is not None or any(keys[1:]) or len(first) != 1 or not isinstance(first[0], str):
                return
            salt = first[0]
        size = event.block_size or max(self._sizes, default=0)
        if not size:
            return  # names without tokens before any event with a size
        if size not in self._sizes and len(self._sizes) >= MOST_SIZES:
            self._warn("block_size", f"ignoring blocks of {size} tokens: the engine has {MOST_SIZES} other block sizes")
            return
        self._sizes.add(size)
        self._knowledge.store(
            self._name, size, event.block_hashes, event.parent_block_hash, event.token_ids, salt,
            event.lora_name, extras, tier,
        )  # fmt: skip


def _tier_of(event: KVEvent) -> str | None:
    """Return the tier of this engine that an event is about; None for another machine's, and unknown ones.

    What has an owner is not on the device.
    """
    if isinstance(event, AllBlocksCleared):
        return None
    medium, locality = (event.medium or DEVICE).lower(), (event.locality or HERE).lower()
    if locality != HERE or (medium == DEVICE and event.ownership is not None):
        return None
    return medium if medium in TIER_WEIGHTS else None


def _features_of(keys: Sequence[Sequence[Any]]) -> tuple[dict[int, tuple[int, ...]], list[list[Any]]]:
    """Return the extras of images and other features by block, and the remaining keys of each block.

    vLLM reports pairs of name and position. Names that Tercet gives are digests. An image that reached the engine by
    its own API has a name from vLLM, which prompts of a router never have.
    """
    extras, others = dict[int, tuple[int, ...]](), list[list[Any]]()
    for block, of_block in enumerate(keys):
        extra, rest = list[int](), list[Any]()
        for key in of_block:
            match key:
                case [str(digest), int(offset)] if DIGEST.fullmatch(digest):
                    extra += extra_of(digest, offset)
                case _:
                    rest.append(key)
        if extra:
            extras[block] = tuple(extra)
        others.append(rest)
    return extras, others
