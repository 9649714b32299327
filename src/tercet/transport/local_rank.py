"""One rank's memory, settings, secret and counters, which both directions need."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from tercet.settings import Settings
from tercet.settings.declaration import FixedPort
from tercet.transport.backends import AUTO, Backend
from tercet.transport.backends.tcp import MAX_STREAMS
from tercet.transport.block_sizes import BlockShape
from tercet.transport.memory.kv_memory import HostPages, KVMemory
from tercet.transport.memory.staged import StagedMemory
from tercet.transport.region import KVRegion


class TransportSettings(Settings, frozen=True, rename=lambda name: name):
    """Settings of sending and receiving.

    ``transport``: ``auto`` or a backend's name. ``hosts``: addresses to listen on; a sender spreads its connections
    over them. ``ports``: those to try, any if empty. ``streams``: number of connections per peer over which ``tcp``
    reads. ``secret``: the fleet's secret. ``timeout``: seconds without progress after which a send fails.
    ``receive_limit``: maximum bytes per second that are received, 0 for no limit.
    """

    transport: str = AUTO
    hosts: Annotated[tuple[str, ...], Meta(min_length=1)] = ("127.0.0.1",)
    ports: tuple[FixedPort, ...] = ()
    streams: Annotated[int, Meta(ge=1, le=MAX_STREAMS)] = 2
    secret: str = ""
    timeout: Annotated[float, Meta(gt=0)] = 30.0
    receive_limit: Annotated[float, Meta(ge=0)] = 0.0


class TransportCounters:
    """Counters of a rank since its start: bytes, chunks and sends that it has sent, received or refused.

    Thread-safe.
    """

    NAMES: tuple[str, ...] = (
        "bytes_sent", "chunks_sent", "sends_done", "sends_failed", "sessions_lost",
        "bytes_received", "chunks_received", "chunks_refused", "receives_done", "receives_refused",
        "receives_dropped", "connections_refused",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(self.NAMES, 0)

    def count(self, **increments: int) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, increment in increments.items():
                self._values[name] += increment

    def read(self) -> Mapping[str, int]:
        """Return all counters."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True)
class LocalRank:
    """One rank. A peer must have the same ``fingerprint`` and secret. ``backends`` come best first.

    ``block`` describes how this rank's blocks can be cut between tokens, or is None. ``staged`` is the memory that
    holds KV if that is not the region itself; the region has the generation words in any case.
    """

    region: KVRegion
    fingerprint: str
    settings: TransportSettings
    backends: Sequence[Backend]
    block: BlockShape | None = None
    staged: StagedMemory | None = None
    counters: TransportCounters = field(default_factory=TransportCounters)

    @property
    def memory(self) -> KVMemory:
        """The memory that holds the rank's KV."""
        return self.staged or HostPages(self.region)
