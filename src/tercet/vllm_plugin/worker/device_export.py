"""A worker's KV on an accelerator, shared with its agent: memory by handle, and events that signal finished layers.

Relies on PyTorch's way to share CUDA memory between processes (``UntypedStorage._share_cuda_``), which its
``torch.multiprocessing`` uses, and on events for which another process can wait (``interprocess=True``).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tercet.transport import AUTO, DeviceHandles
from tercet.transport.backends import BackendUnavailable
from tercet.transport.backends.nixl import RegisteredPlanes
from tercet.transport.backends.reading import has_rdma
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes

logger = logging.getLogger(__name__)
# Number of layer notes in flight, after which a later note reuses the event of an earlier one.
EVENTS = 64


class DeviceExport:
    """The handles of one rank's KV, and its ring of events.

    With ``transport`` ``nixl``, or ``auto`` if there is an RDMA device, KV is also registered with NIXL, and ``rdma``
    has the handles by which other processes read it. Raises :class:`~tercet.transport.backends.BackendUnavailable` if
    the registration is required and fails.
    """

    def __init__(self, planes: LayerPlanes, transport: str = "tcp") -> None:
        self._device = planes.device
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(EVENTS)]
        self._next = 0
        storages: dict[int, tuple[int, tuple[Any, ...]]] = {}
        places: list[tuple[int, int, int]] = []
        for plane in planes.tensors:
            storage: Any = plane.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = len(storages), _shared(storage)
            number, _ = storages[storage.data_ptr()]
            begin = int(plane.storage_offset()) * plane.itemsize
            places.append((number, begin, planes.block_stride(plane)))
        handles = [_handle(event) for event in self._events]
        self.handles = DeviceHandles(
            self._device.index or 0, tuple(found for _, found in storages.values()), tuple(places), tuple(handles)
        )
        # vLLM's earlier work on its cache, above all zeroing it, must end before other processes see the cache.
        torch.cuda.current_stream(self._device).synchronize()
        self._registered = _registered(planes, self.handles, transport)
        self.rdma = self._registered and self._registered.handles

    def computed(self) -> int:
        """Record an event for the present work of the current stream; return its number."""
        number, self._next = self._next, (self._next + 1) % EVENTS
        self._events[number].record()
        return number


def _registered(planes: LayerPlanes, handles: DeviceHandles, transport: str) -> RegisteredPlanes | None:
    if transport != "nixl" and not (transport == AUTO and has_rdma()):
        return None
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in planes.tensors}
    places = [(each.data_ptr(), planes.block_stride(each)) for each in planes.tensors]
    try:
        return RegisteredPlanes(list(storages.items()), places, "VRAM", handles.device)
    except BackendUnavailable as error:
        if transport != AUTO:
            raise
        logger.warning("auto continues without %s", error.message)
        return None


def _shared(storage: Any) -> tuple[Any, ...]:
    """Return the arguments of ``UntypedStorage._new_shared_cuda`` in another process, without the device's number."""
    try:
        _, *found, _event_to_wait_for = storage._share_cuda_()
    except RuntimeError as error:
        raise UnsupportedVLLM(
            f"this engine's KV cannot be shared with the process that moves it (CUDA IPC): {error}; "
            "PYTORCH_CUDA_ALLOC_CONF must not contain expandable_segments:True, and --enable-sleep-mode and "
            "--enable-cumem-allocator must be off"
        ) from error
    # The other process need not wait, and the event to wait for belongs to a device that it may not see.
    return (*found, False)


def _handle(event: Any) -> bytes:
    return event.ipc_handle()
