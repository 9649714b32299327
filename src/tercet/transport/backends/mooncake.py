"""``mooncake``: the receiver reads the sender's KV with Mooncake's transfer engine.

A rank has two engines: one that others read from, and one that reads. The second one makes a failed read harmless:
after Mooncake reports a failure, it may still write other parts of the same batch, but not once the engine is
destroyed. So the engine is destroyed before a failure is passed on, and the next read makes a new one. That blocks the
process for up to a second; it happens only when a sender is lost.

If a sender is stopped, not dead, Mooncake has its own timeout (30 s: ``MC_TCP_PROGRESS_TIMEOUT_SEC``).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import numpy as np

from tercet.protocol import TransferFailed
from tercet.transport.backends.reading import (
    Backend,
    BackendUnavailable,
    Copies,
    RegisteredReader,
    RegisteredRegion,
    SendingPeer,
    has_rdma,
    understood,
)
from tercet.transport.region import KVRegion, RegionShape

REMEDY = (
    "run scripts/install-transport-extras, or pip install --no-deps mooncake-transfer-engine-non-cuda "
    "and install the system libraries libibverbs1 librdmacm1 libnuma1 liburing2"
)
# Mooncake refuses more copies than its queue for a peer has space for: 2048 with TCP.
MAX_COPIES = 1024
LOG_LEVEL, ERRORS = "MC_LOG_LEVEL", "ERROR"
TELLS_MORE = f"{LOG_LEVEL}=INFO logs more"
# glog's minimum level, which Mooncake's variable sets when the library is loaded; and glog's numbers of levels.
MIN_LOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
GLOG_ERROR, GLOG_FATAL = 2, 3


class _MooncakeOffer(msgspec.Struct, frozen=True, array_like=True):
    address: int
    engine: str


class MooncakeBackend(Backend):
    """Backend that reads regions registered with Mooncake. ``host`` is the address of this machine for senders."""

    name = "mooncake"
    stages = False

    def __init__(self, region: KVRegion, host: str) -> None:
        self._ours = RegisteredRegion(region)
        self._reads = ReadEngine(self._ours, host)
        self._engine: Any = begin_engine(self._ours, host)
        self._host = host
        try:
            MooncakeReader(self._reads, self._ours, region.shape, self._own_offer()).require_own_word(self.name)
        except TransferFailed as error:
            self.close()
            raise BackendUnavailable(f"{error.message}; {TELLS_MORE}") from error

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._own_offer())

    def connect(self, offer: bytes, sender: SendingPeer) -> MooncakeReader:
        return MooncakeReader(self._reads, self._ours, sender.shape, understood(self.name, offer, _MooncakeOffer))

    def close(self) -> None:
        """Destroy both engines, with their threads, ports and registrations; this takes up to two seconds."""
        self._engine = None
        self._reads.close()

    def _own_offer(self) -> _MooncakeOffer:
        return _MooncakeOffer(self._ours.address, f"{self._host}:{self._engine.get_rpc_port()}")


class ReadEngine:
    """The engine that all readers of a rank share: made when needed, destroyed after a failed read."""

    def __init__(self, region: RegisteredRegion, host: str) -> None:
        self._region, self._host = region, host
        self._engine: Any = None
        self._users = 0
        self._failed = False
        self._changed = threading.Condition()

    def read(self, engine: str, there: Sequence[int], here: Sequence[int], sizes: Sequence[int]) -> None:
        """Read from addresses ``there`` of another engine to addresses ``here``.

        Raises :class:`TransferFailed` after the last write.
        """
        used = self._enter()
        status = -1
        try:
            status = used.batch_transfer_sync_read(engine, here, there, sizes)
        finally:
            del used  # the last reference must be the one dropped here
            self._leave(failed=status != 0)
        if status != 0:
            raise TransferFailed(f"mooncake: cannot read the sender's memory: status {status}")

    def close(self) -> None:
        """Destroy the engine; all readers must have ended."""
        with self._changed:
            self._engine = None

    def _enter(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: not self._failed)
            if self._engine is None:
                self._engine = begin_engine(self._region, self._host)
            self._users += 1
            return self._engine

    def _leave(self, *, failed: bool) -> None:
        """Leave a read. After a failed read, the last reader that leaves destroys the engine."""
        with self._changed:
            self._users -= 1
            self._failed |= failed
            if self._failed and not self._users:
                self._engine = None
                self._failed = False
                self._changed.notify_all()
            elif failed:
                self._changed.wait_for(lambda: not self._failed)


class MooncakeReader(RegisteredReader):
    """Reader that shares its engine with other readers."""

    def __init__(self, reads: ReadEngine, ours: RegisteredRegion, theirs: RegionShape, offer: _MooncakeOffer) -> None:
        super().__init__(ours, theirs)
        self._reads, self._offer = reads, offer

    def copy(self, copies: Copies) -> None:
        theirs, ours = self._offer.address, self._ours.address
        for start in range(0, len(copies), MAX_COPIES):
            sizes, there, here = (copies[start : start + MAX_COPIES] + np.array([0, theirs, ours])).T.tolist()
            self._reads.read(self._offer.engine, there, here, sizes)


def begin_engine(region: RegisteredRegion, host: str) -> Any:
    """Return an engine with the region registered; raise :class:`BackendUnavailable` if that fails."""
    os.environ.setdefault(LOG_LEVEL, ERRORS)  # otherwise it writes a line for each transfer
    try:
        mooncake = importlib.import_module("mooncake.engine")
        engine: Any = mooncake.TransferEngine()
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailable(f"mooncake: cannot be loaded: {error}; {REMEDY}") from error
    protocol = "rdma" if has_rdma() else "tcp"
    with _no_false_alarms(str(mooncake.__file__)):
        failed = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if failed:
        raise BackendUnavailable(f"mooncake: the engine does not start on {host} over {protocol}; {TELLS_MORE}")
    if engine.register_memory(region.address, region.size):
        raise BackendUnavailable("mooncake: the KV cannot be registered; raise the limit of locked memory (ulimit -l)")
    return engine


@contextlib.contextmanager
def _no_false_alarms(library: str) -> Generator[None]:
    """Silence Mooncake's log while entered, unless its variable asks for more than errors.

    At each successful start it logs an error that it does not find its own segment yet.
    """
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(library), MIN_LOG_LEVEL)
    except (OSError, ValueError):  # another build: its line stays
        yield
        return
    if level.value != GLOG_ERROR:
        yield
        return
    level.value = GLOG_FATAL
    try:
        yield
    finally:
        level.value = GLOG_ERROR
