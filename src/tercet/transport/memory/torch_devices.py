"""Devices as copies of KV need them: a CUDA device with separate streams, or the host in its role.

Work on a stream runs later, in order, and concurrently with other streams. So the caller keeps the source unchanged
until :meth:`Stream.mark` reports the end. Tests have a third kind, which runs work as late as CUDA may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch

from tercet.protocol import TransferFailed
from tercet.transport.memory.staged import DeviceLost, IsOver, wait_until
from tercet.transport.memory.torch_planes import Side, as_items
from tercet.transport.region import Numbers


class Stream(Protocol):
    """A queue of a device's work."""

    def entered(self) -> AbstractContextManager[object]:
        """Use this stream for the thread's work on the device while entered."""
        ...

    def mark(self) -> IsOver:
        """Return a check for the end of all work so far; the check raises :class:`~.staged.DeviceLost` if it fails."""
        ...


class CopyDevice(Protocol):
    """One device, as this process sees it. ``where`` is PyTorch's name for it."""

    where: torch.device

    def attach(self) -> None:
        """Make this device the default for this thread.

        CUDA starts each thread with device 0. A thread that touches it gets a context there: hundreds of MiB of a
        device that another process may own.
        """
        ...

    def stream(self) -> Stream:
        """Return a new stream, which waits for no other stream."""
        ...

    def host_room(self, nbytes: int) -> torch.Tensor:
        """Return host memory that the device copies from and to directly, and asynchronously."""
        ...

    def numbers(self, found: Numbers) -> torch.Tensor:
        """Return numbers on the device for the entered stream, copied without waiting for the stream."""
        ...

    def copy(self, source: Side, target: Side, size: int) -> None:
        """Begin to copy ``size`` bytes of each block on the entered stream, by PyTorch's kernels."""
        wanted = (target.blocks >= 0).nonzero()[0]
        there, here = self.numbers(source.blocks[wanted]), self.numbers(target.blocks[wanted])
        for their_layer, layer in zip(source.layers, target.layers, strict=True):
            found, place = as_items(source.rows(their_layer, size), target.rows(layer, size))
            place.index_copy_(0, here, found.index_select(0, there))


class HostStream(Stream):
    """A stream whose work ends at once."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> IsOver:
        return lambda: True


class HostDevice(CopyDevice):
    """Host memory in a device's role."""

    where = torch.device("cpu")

    def attach(self) -> None:
        """Do nothing: threads need no preparation."""

    def stream(self) -> Stream:
        return HostStream()

    def host_room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def numbers(self, found: Numbers) -> torch.Tensor:
        return torch.as_tensor(found.astype(np.int64))


class CudaDevice(CopyDevice):
    """A GPU, by its number among those that this process sees."""

    def __init__(self, index: int) -> None:
        self.where = torch.device("cuda", index)

    def attach(self) -> None:
        torch.cuda.set_device(self.where)

    def stream(self) -> Stream:
        self.attach()
        return CudaStream(self)

    def host_room(self, nbytes: int) -> torch.Tensor:
        self.attach()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def numbers(self, found: Numbers) -> torch.Tensor:
        # From pinned memory, which PyTorch does not reuse before the copy has ended. A copy from other memory would
        # wait for all earlier work of the stream.
        return torch.as_tensor(found.astype(np.int64)).pin_memory().to(self.where, non_blocking=True)

    def copy(self, source: Side, target: Side, size: int) -> None:
        """Begin the copy by one kernel for all layers (:mod:`.cuda_copies`)."""
        try:
            from tercet.transport.memory.cuda_copies import begin_copy
        except ImportError as error:
            raise TransferFailed(
                f"copies of KV on a GPU need Triton, which cannot be imported: {error}; pip install triton in the "
                "version that this PyTorch requires"
            ) from error
        begin_copy(source, target, size, self.numbers)


class CudaStream(Stream):
    """One of PyTorch's streams, which does not wait for the default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device.where)

    @contextmanager
    def entered(self) -> Generator[None]:
        self._device.attach()  # otherwise leaving the stream would switch to device 0, and create a context there
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> IsOver:
        event = torch.cuda.Event()
        try:
            event.record(self._stream)
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer works for this process: {error}") from error
        return answers(self._device, event.query)


def answers(device: CopyDevice, query: Callable[[], bool]) -> IsOver:
    """Return a check that queries an event from any thread; an error of the device is raised, not returned."""

    def is_over() -> bool:
        device.attach()
        try:
            return query()
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer works for this process: {error}") from error

    return is_over


class Direction:
    """One direction's stream, and its space for ``nbytes``, which copies reuse one after the other, in stream order."""

    def __init__(self, device: CopyDevice, nbytes: int) -> None:
        self._stream = device.stream()
        self.room = torch.empty(nbytes, dtype=torch.uint8, device=device.where)
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Generator[torch.Tensor]:
        """Begin copies after those that have begun: the stream keeps their order, so the space may be reused.

        If one cannot begin (for example without memory on the device), earlier ones end before
        :class:`~tercet.protocol.TransferFailed` is raised: no byte is written after that.
        """
        with self._lock, self._stream.entered():
            try:
                yield self.room
            except RuntimeError as error:
                wait_until(self._stream.mark())
                raise TransferFailed(f"the device did not copy KV: {error}") from error

    def mark(self) -> IsOver:
        """Return a check for the end of all copies so far."""
        return self._stream.mark()


def device_of(where: torch.device) -> CopyDevice:
    """Return the device of the tensors at ``where``."""
    return HostDevice() if where.type == "cpu" else CudaDevice(where.index or 0)
