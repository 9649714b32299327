"""One rank as both of its sides need it: its memory, its settings, whom it trusts, and what it counts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tercet.protocol import BadRequest
from tercet.transport.backends import AUTO, Backend
from tercet.transport.backends.tcp import MAX_STREAMS
from tercet.transport.block_sizes import BlockShape
from tercet.transport.region import KVRegion

MAX_PORT = 65535


@dataclass(frozen=True)
class TransportSettings:
    """How a rank sends and receives.

    ``transport``: ``auto`` or a backend's name. ``hosts``: addresses to listen on; a sender spreads its connections
    over them. ``ports``: which to try, any if empty. ``streams``: connections per peer that ``tcp`` reads over.
    ``secret``: what all ranks of a fleet must know. ``timeout``: seconds without progress after which a send fails.
    ``receive_limit``: bytes per second that are taken in at most, 0 for any number.
    """

    transport: str = AUTO
    hosts: tuple[str, ...] = ("127.0.0.1",)
    ports: tuple[int, ...] = ()
    streams: int = 2
    secret: str = ""
    timeout: float = 30.0
    receive_limit: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` naming the setting that is wrong."""
        if not self.hosts:
            raise BadRequest("hosts: give one address to listen on at least", "hosts")
        if not all(0 < port <= MAX_PORT for port in self.ports):
            raise BadRequest(f"ports: give ports from 1 to {MAX_PORT}, or none at all", "ports")
        if not 0 < self.streams <= MAX_STREAMS:
            raise BadRequest(f"streams: {self.streams} is not from 1 to {MAX_STREAMS}", "streams")
        if not self.timeout > 0:
            raise BadRequest(f"timeout: {self.timeout} s must be greater than 0", "timeout")
        if not self.receive_limit >= 0:
            raise BadRequest(f"receive_limit: {self.receive_limit} bytes/s must be 0 or greater", "receive_limit")


class TransportCounters:
    """What a rank has sent, taken in and refused since its start. Thread-safe."""

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
        """All of them."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True)
class LocalRank:
    """``fingerprint`` and the settings' secret must be a peer's, too. ``backends`` come best first.

    ``block`` tells how this rank's blocks can be cut between tokens, if they can.
    """

    region: KVRegion
    fingerprint: str
    settings: TransportSettings
    backends: Sequence[Backend]
    block: BlockShape | None = None
    counters: TransportCounters = field(default_factory=TransportCounters)
