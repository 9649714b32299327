"""``ipc``: engines with KV on devices of one machine map each other's KV (CUDA IPC), and the receiver copies it.

Blocks go from device to device, or within one device, in batches, on a stream of the receiver. As with ``host`` the
sender passes a descriptor through a Unix socket, here of the file with its generation words; its offer opens the memory
of the worker next to it. If a device cannot be mapped (another container, devices without access to each other), the
next backend is used.
"""

from __future__ import annotations

import numpy as np

from tercet.transport.backends.host import HostBackend
from tercet.transport.backends.reading import Batch, Fence, Reader, SendingPeer
from tercet.transport.memory.staged import Places, StagedMemory
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import KVRegion, Numbers


class IpcBackend(HostBackend):
    """Backend that reads KV on devices of other processes of this machine."""

    name = "ipc"
    stages = False

    def __init__(self, region: KVRegion, memory: StagedMemory) -> None:
        super().__init__(region)
        self._memory = memory

    def offer(self) -> bytes:
        return self._memory.device.offer

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        words = super().connect(b"", sender)
        try:
            return IpcReader(words, self._memory, self._memory.device.opened(offer, sender.shape))
        except BaseException:
            words.close()
            raise


class IpcReader(Reader):
    """Reader of ``theirs``, the sender's mapped device memory; ``words`` reads the sender's generation words."""

    def __init__(self, words: Reader, ours: StagedMemory, theirs: object) -> None:
        self._words, self._ours = words, ours
        self._theirs: object | None = theirs

    def read(self, batch: Batch, fence: Fence) -> bool:
        chunks = [_places(chunk, blocks) for chunk, blocks in zip(batch.chunks, batch.blocks, strict=True)]
        if chunks:
            fence(lambda: self._ours.copy_across(self._theirs, chunks, batch.order))
        return self._words.read(Batch(batch.send, batch.lease, memoryview(b"")), fence)

    def close(self) -> None:
        # The mapping ends with its last user. Until then the memory of a dead worker may stay allocated, and
        # its replacement may find too little.
        self._theirs = None
        self._words.close()


def _places(chunk: ReadDescriptors, blocks: Numbers) -> tuple[Places, Places, int]:
    """Return a chunk's places there, its places here, and the bytes of each block."""
    sources = np.frombuffer(chunk.blocks, BLOCK_NUMBER).astype(np.int64)
    layers = range(chunk.layer, chunk.layer + chunk.layers)
    return (chunk.sources, sources, chunk.offset), (layers, blocks, chunk.part * chunk.size), chunk.size
