"""What all connections of a receiver share."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tercet.transport.backends import Backend
from tercet.transport.base import OnFinished
from tercet.transport.grants import GrantTable
from tercet.transport.recut import BlockShape
from tercet.transport.region import KVRegion
from tercet.transport.session import Sessions
from tercet.transport.threads import Pace


@dataclass
class InboundCounters:
    """What was taken and refused, over all connections. Thread-safe through :meth:`count`."""

    bytes_received: int = 0
    chunks_received: int = 0
    chunks_refused: int = 0
    chunks_by_reference: int = 0
    claims_accepted: int = 0
    claims_refused: int = 0
    receives_dropped: int = 0
    connections_refused: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count(self, **increments: int) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, increment in increments.items():
                setattr(self, name, getattr(self, name) + increment)

    def read(self) -> Mapping[str, int]:
        """All of them."""
        with self._lock:
            return asdict(self)


@dataclass
class Rules:
    """One receiver's region and leases, whom it takes KV from, and by which ways.

    ``fingerprint`` and ``secret`` must be the sender's, too. ``block`` tells how our blocks can be cut between tokens,
    if they can. ``pace`` is how fast KV is taken in. ``on_finished(lease, valid_end)`` hears of every claim that holds,
    before it is acknowledged.
    """

    region: KVRegion
    grants: GrantTable
    fingerprint: str
    secret: str
    on_finished: OnFinished
    backends: Sequence[Backend] = ()
    tcp_allowed: bool = True
    block: BlockShape | None = None
    pace: Pace = field(default_factory=Pace)
    counters: InboundCounters = field(default_factory=InboundCounters)
    sessions: Sessions = field(default_factory=Sessions)
