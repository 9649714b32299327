"""What tests of backends share: ranks with recognisable KV, sends between them, and a rank in another process."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import secrets
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from tercet.protocol import TercetError
from tercet.transport import HeadSlice, KVRegion, RankTransport, SendDestination, SendReport, TransportSettings
from tercet.transport.backends import backends_for
from tercet.transport.backends.reading import Batch, Copies, Reader, SendingPeer
from tercet.transport.region import RegionShape
from tests.unit.transport.models import a_grant, whose

TOKENS = 16
SECONDS = 240.0  # for what ends by itself; only a failure takes so long


def filled(layers: int, blocks: int, block_bytes: int, seed: int) -> KVRegion:
    region = KVRegion.create(layers, blocks, block_bytes)
    choose = random.Random(seed)
    for layer in range(layers):
        region.blocks(layer, 0, blocks)[:] = choose.randbytes(blocks * block_bytes)
    return region


@contextmanager
def rank(backend: str, region: KVRegion) -> Generator[RankTransport]:
    transport = RankTransport(region, "crossing", TransportSettings(backend))
    try:
        yield transport
    finally:
        transport.close()
        region.close()


def send(
    sender: RankTransport,
    receiver: RankTransport,
    layers: int,
    sources: Sequence[int],
    targets: Sequence[int],
    head_slice: HeadSlice,
    lease: str | None = None,
) -> SendReport | TercetError:
    """Send whole blocks' strips; grants and revokes unless a lease is given."""
    end, name = len(targets) * TOKENS, lease or secrets.token_hex(16)
    if lease is None:
        receiver.grants.grant(a_grant(name, tuple(targets), 0, end, TOKENS))
    outcomes: queue.SimpleQueue[SendReport | TercetError] = queue.SimpleQueue()
    send_id = secrets.token_hex(8)
    sender.sends.open(send_id, name, whose(end), [SendDestination(receiver.addresses, head_slice)], outcomes.put)
    sender.sends.push(send_id, range(layers), 0, list(sources))
    sender.sends.finish(send_id, 0, end)
    outcome = outcomes.get(timeout=SECONDS)
    if lease is None and isinstance(outcome, SendReport):
        assert receiver.grants.revoke(name) == end
    return outcome


def read(reader: Reader, copies: Copies) -> bool:
    """Copy into our region, with no lease; the word that is looked at is one that nobody has set."""
    return reader.read(Batch(1, "", memoryview(b""), copies=[copies]), lambda step: step())


class Elsewhere:
    """A process with a region, full of byte 7, that a backend offers."""

    def __init__(self, backend: str, blocks: int, block_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_offer, args=(theirs, backend, blocks, block_bytes), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(SECONDS)
        self.offer: bytes
        self.shape: RegionShape
        self.offer, self.shape = self._pipe.recv()

    @property
    def sender(self) -> SendingPeer:
        return SendingPeer(self.shape)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again, and wait until it has; UCX may end a process that lost a peer while it was stopped."""
        self._signal(signal.SIGCONT)
        with suppress(OSError, EOFError):
            self._pipe.send("ping")
            assert self._pipe.poll(SECONDS)
            assert self._pipe.recv() == "ping"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _offer(pipe: Connection, name: str, blocks: int, block_bytes: int) -> None:
    region = KVRegion.create(1, blocks, block_bytes)
    region.blocks(0, 0, blocks)[:] = b"\7" * (blocks * block_bytes)
    (backend,) = backends_for(name, region)
    pipe.send((backend.offer(), region.shape))
    while True:
        pipe.send(pipe.recv())


@contextmanager
def elsewhere(backend: str, blocks: int, block_bytes: int) -> Generator[Elsewhere]:
    process = Elsewhere(backend, blocks, block_bytes)
    try:
        yield process
    finally:
        process.kill()
