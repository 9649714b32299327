"""Ranks for tests, in this process or in one that can be stopped and killed, and sends between them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import random
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tercet.protocol import Content, TercetError
from tercet.transport import (
    BlockShape,
    HeadSlice,
    KVRegion,
    PlaneRun,
    RankTransport,
    SendDestination,
    SendReport,
    TransportSettings,
)
from tercet.transport.sockets import parse_address
from tests.longest_wait import wait_until
from tests.unit.transport.models import a_grant, whose

FINGERPRINT = "ranks"
TOKENS = 16
KIB = 1024
TOKEN_BYTES = 192  # of one layer: a small model's
SCATTERED = ((31, 2, 17, 3, 38), (5, 39, 0, 22, 21))
ADJACENT = (tuple(range(4, 20)), tuple(range(11, 27)))
NOW = ("connections", "sessions_in", "sessions_out", "sends_active", "leases_open", "receives_active")
SECONDS = 60.0  # for what ends by itself; only a failure takes so long

Outcome = SendReport | TercetError


def settings(backend: str = "tcp", **changes: Any) -> TransportSettings:
    return TransportSettings(backend, **changes)


def connect(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), SECONDS)


def until_closed(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while more := sock.recv(4096):
            found += more
    except ConnectionError:
        return found
    return found


def filled(layers: int, blocks: int, block_bytes: int, seed: int) -> KVRegion:
    """A region full of bytes that are found nowhere else."""
    region = KVRegion.create(layers, blocks, block_bytes)
    choose = random.Random(seed)
    for layer in range(layers):
        region.blocks(layer, 0, blocks)[:] = choose.randbytes(blocks * block_bytes)
    return region


def content(region: KVRegion) -> list[bytes]:
    """All KV of a region, layer by layer."""
    return [bytes(region.blocks(layer, 0, region.shape.num_blocks)) for layer in range(region.num_layers)]


@contextmanager
def rank(
    region: KVRegion,
    settings: TransportSettings | None = None,
    fingerprint: str = FINGERPRINT,
    block: BlockShape | None = None,
    on_filled: Callable[[str, int], None] = lambda _lease, _end: None,
) -> Generator[RankTransport]:
    """A rank in this process; it takes its region with it."""
    try:
        transport = RankTransport(region, fingerprint, settings, on_filled, block)
        try:
            yield transport
        finally:
            transport.close()
    finally:
        region.close()


settle = partial(wait_until, seconds=SECONDS)
"""Wait until something holds that nobody reports."""


def new_lease(end: int = TOKENS) -> str:
    """A name that also tells those who send, perhaps in another process, how many tokens the lease is for."""
    return f"{end:08x}{secrets.token_hex(12)}"


def of_lease(lease: str) -> Content:
    """Whose KV is sent under a lease that :func:`new_lease` has named; for any other name something that is refused."""
    digits = re.fullmatch(r"(0000[0-9a-f]{4})[0-9a-f]{24}", lease)
    return whose(int(digits[1], 16) if digits else TOKENS)


def grant(receiver: RankTransport, blocks: Sequence[int], tokens: int = TOKENS) -> str:
    """Let blocks be written; returns the lease."""
    lease = new_lease(len(blocks) * tokens)
    receiver.grants.grant(a_grant(lease, tuple(blocks), 0, len(blocks) * tokens, tokens))
    return lease


class Send:
    """One send, from its opening on. ``outcomes`` has what ``on_done`` was called with."""

    def __init__(
        self,
        sender: RankTransport,
        addresses: Sequence[str],
        lease: str,
        head_slice: HeadSlice,
        content: Content | None = None,
        word: int | None = None,
        planes: tuple[PlaneRun, ...] = (),
    ) -> None:
        self.sender, self.send_id = sender, secrets.token_hex(8)
        self.outcomes: list[Outcome] = []
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        to = [SendDestination(tuple(addresses), head_slice, planes)]
        sender.sends.open(self.send_id, lease, content or of_lease(lease), to, self._take, word)

    def _take(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._done.put(outcome)

    def push(self, layers: Sequence[int], blocks: Sequence[int], slot: int = 0) -> None:
        """A range of layers together, others one by one."""
        for some in [layers] if isinstance(layers, range) else [range(layer, layer + 1) for layer in layers]:
            self.sender.sends.push(self.send_id, some, slot, blocks)

    def finish(self, end: int, begin: int = 0) -> None:
        self.sender.sends.finish(self.send_id, begin, end)

    def cancel(self) -> None:
        self.sender.sends.cancel(self.send_id)

    def wait(self) -> Outcome:
        """How it ended."""
        return self._done.get(timeout=SECONDS)


def transport_to(sender: RankTransport, addresses: Sequence[str]) -> str | None:
    """How KV travels to a receiver, once a session with it is agreed on."""
    peer = sender.sends._peers.get(tuple(addresses))
    return peer.transport if peer is not None else None


def whole(region: KVRegion) -> HeadSlice:
    """All of each block."""
    return HeadSlice(0, region.shape.block_bytes)


def transfer(
    sender: RankTransport,
    source: KVRegion,
    receiver: RankTransport,
    sources: Sequence[int],
    targets: Sequence[int],
    tokens: int = TOKENS,
) -> SendReport:
    """Send whole blocks of every layer under a lease of their own, which is over when this returns."""
    lease = grant(receiver, targets, tokens)
    send = Send(sender, receiver.addresses, lease, whole(source))
    send.push(range(source.num_layers), sources)
    send.finish(len(targets) * tokens)
    outcome = send.wait()
    assert isinstance(outcome, SendReport), outcome
    assert receiver.grants.revoke(lease) == len(targets) * tokens
    return outcome


def idle(*ranks: RankTransport) -> None:
    """Wait until nothing of a send is left anywhere; sessions may stay."""
    for each in ranks:
        settle(lambda each=each: not any(each.counters()[name] for name in ("sends_active", "receives_active")))


def outcome_between(ours: RankTransport, source: KVRegion, theirs: RankTransport) -> Outcome:
    """How a small send between two ranks ends."""
    lease = grant(theirs, (0, 1))
    send = Send(ours, theirs.addresses, lease, whole(source))
    send.push(range(source.num_layers), (2, 3))
    send.finish(2 * TOKENS)
    outcome = send.wait()
    theirs.grants.revoke(lease)
    idle(ours, theirs)
    return outcome


def expected_after(
    before: Sequence[bytes], source: KVRegion, sources: Sequence[int], targets: Sequence[int]
) -> list[bytes]:
    """What a region of equal blocks holds after a transfer, if nothing else changes."""
    size = source.shape.block_bytes
    found: list[bytes] = []
    for layer, old in enumerate(before):
        new = bytearray(old)
        for there, here in zip(sources, targets, strict=True):
            new[here * size : (here + 1) * size] = source.blocks(layer, there)
        found.append(bytes(new))
    return found


def held() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class Held:
    """What this process held at the start; :meth:`require_back` waits until it is no more than that.

    ``regions`` will have been closed by then; their mappings hold a descriptor each as long as somebody knows them.
    """

    def __init__(self, *regions: KVRegion) -> None:
        self._descriptors, self._threads = held()
        self._descriptors -= len(regions)

    def require_back(self) -> None:

        def back() -> bool:
            descriptors, threads = held()
            return descriptors <= self._descriptors and threads <= self._threads

        gc.collect(1)  # some mappings are part of a cycle; those of the test are young
        if not back():
            gc.collect()
        settle(back)


class RankProcess:
    """A rank in a process of its own, with ``layers`` of ``blocks`` blocks, filled by ``seed``."""

    def __init__(self, settings: TransportSettings, layers: int, blocks: int, block_bytes: int, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, settings, layers, blocks, block_bytes, seed)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.pid, self.fd, self.addresses = self._answer()

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of :class:`_Child` there."""
        self.ask(method, *args)
        return self._answer()

    def ask(self, method: str, *args: Any) -> None:
        """As :meth:`call`, for a process that is stopped; the answer is taken by :meth:`answer`."""
        self._pipe.send((method, args))

    def answer(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(SECONDS), "the other process does not answer"
        return self._pipe.recv()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and wait until it is gone; calling this again is fine."""
        if not self._pipe.closed:
            os.kill(self.pid, signal.SIGKILL)
            self._process.join(SECONDS)
            self._process.close()
            self._pipe.close()


class _Child:
    """What the other process does when asked."""

    def __init__(self, settings: TransportSettings, layers: int, blocks: int, block_bytes: int, seed: int) -> None:
        self.region = filled(layers, blocks, block_bytes, seed)
        self.transport = RankTransport(self.region, FINGERPRINT, settings)
        self._send: Send | None = None
        self._stranger: socket.socket | None = None

    def grant(self, blocks: Sequence[int]) -> str:
        return grant(self.transport, blocks)

    def revoke(self, lease: str) -> tuple[int | None, list[bytes]]:
        """End a lease; returns how far its KV is valid, and all KV at that moment."""
        return self.transport.grants.revoke(lease), content(self.region)

    def content(self) -> list[bytes]:
        return content(self.region)

    def counters(self) -> dict[str, int]:
        return dict(self.transport.counters())

    def connect(self, host: str, port: int) -> None:
        """Connect, and say nothing."""
        self._stranger = socket.create_connection((host, port))
        assert self._stranger.recv(1)

    def open(self, addresses: Sequence[str], lease: str) -> None:
        self._send = Send(self.transport, addresses, lease, whole(self.region))

    def push(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        assert self._send is not None
        self._send.push(layers, blocks)

    def finish(self, end: int) -> None:
        assert self._send is not None
        self._send.finish(end)

    def wait(self) -> str | None:
        """``None`` if the send is in place, else what went wrong."""
        assert self._send is not None
        outcome = self._send.wait()
        return outcome.message if isinstance(outcome, TercetError) else None


def _serve(
    pipe: Connection, settings: TransportSettings, layers: int, blocks: int, block_bytes: int, seed: int
) -> None:
    child = _Child(settings, layers, blocks, block_bytes, seed)
    pipe.send((os.getpid(), child.region.fd, child.transport.addresses))
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(child, method)(*args))


@contextmanager
def rank_process(
    settings: TransportSettings, layers: int, blocks: int, block_bytes: int, seed: int = 7
) -> Generator[RankProcess]:
    process = RankProcess(settings, layers, blocks, block_bytes, seed)
    try:
        yield process
    finally:
        process.kill()
