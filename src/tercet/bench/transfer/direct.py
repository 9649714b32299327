"""NIXL and Mooncake called directly, for comparison with the same libraries behind our transport."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tercet.bench.transfer.cases import Case
from tercet.bench.transfer.libraries import LIBRARIES
from tercet.bench.transfer.receiving_process import ReceivingProcess
from tercet.bench.transfer.ways import Way
from tercet.protocol import TransferFailed
from tercet.transport import KVRegion


def direct_ways(
    case: Case, source: KVRegion, peer: ReceivingProcess, backends: Sequence[str]
) -> list[tuple[str, Callable[[], Way]]]:
    """The libraries among ``backends``, each as a way of its own."""
    return [
        (f"{name} direct", lambda name=name: Direct(name, case, source, peer)) for name in backends if name in LIBRARIES
    ]


class Direct:
    """The other process reads all chunks with the library alone, when it is told which, and tells when it has them.

    Nothing is granted or checked: no protocol on top of the library can do with less.
    """

    def __init__(self, library: str, case: Case, source: KVRegion, peer: ReceivingProcess) -> None:
        self.name = f"{library} direct"
        self._case, self._source, self._peer, self._library = case, source, peer, library
        self._choose = random.Random(0)
        self._offering = LIBRARIES[library](source)
        peer.call("direct_connect", library, msgspec.msgpack.encode(self._offering.offer()))
        self._checked = False

    def move(self) -> float:
        """See :class:`~tercet.bench.transfer.ways.Way`; the first time, what arrived is compared."""
        sources, targets = self._case.scattered(self._choose), self._case.scattered(self._choose)
        there, here = np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32)
        began = time.perf_counter()
        self._peer.call("direct_read", self._library, there.tobytes(), here.tobytes())
        took = time.perf_counter() - began
        if not self._checked:
            self._compare(sources, targets)
            self._checked = True
        return took

    def _compare(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        for layer in range(self._case.layers):
            sent = b"".join(bytes(self._source.blocks(layer, block)) for block in sources[:4])
            if self._peer.call("content", layer, targets[:4]) != sent:
                raise TransferFailed(f"{self.name}: layer {layer} arrived with other bytes than were sent")

    def close(self) -> None:
        """See :class:`~tercet.bench.transfer.ways.Way`."""
        self._peer.call("direct_close", self._library)
        del self._offering
