"""Where a rank's KV lies, as copies need it: a CUDA device with streams of ours, or the host in its role.

Work that is given to a stream is carried out later, in order, and beside what other streams do. So whoever gives it
keeps what it reads from as it is until :meth:`Stream.mark` says that it is over. Tests have a third kind, which carries
work out as late as CUDA may.
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
from tercet.transport.region import Numbers


class Stream(Protocol):
    """A queue of a device's work."""

    def entered(self) -> AbstractContextManager[object]:
        """While entered, this thread's work on the device is given to this stream."""
        ...

    def mark(self) -> IsOver:
        """Whether all that it was given until now is over; raises :class:`~.staged.DeviceLost` if nobody can say."""
        ...


class CopyDevice(Protocol):
    """One device, as this process sees it. ``where`` is what PyTorch calls it."""

    where: torch.device

    def attach(self) -> None:
        """Have this thread's calls that name no device mean this one.

        CUDA begins each thread with device 0. What such a thread touches gets a context there: hundreds of MiB of a
        device that may be somebody else's.
        """
        ...

    def stream(self) -> Stream:
        """A new stream, which waits for no other."""
        ...

    def host_room(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to without a detour, and without anybody's waiting."""
        ...

    def numbers(self, found: Numbers) -> torch.Tensor:
        """Numbers, there for the stream that is entered, without waiting for it."""
        ...


class HostStream(Stream):
    """What it is given is over when it has begun."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> IsOver:
        return lambda: True


class HostDevice(CopyDevice):
    """Host memory in a device's role."""

    where = torch.device("cpu")

    def attach(self) -> None:
        """Threads need nothing for it."""

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
        # From pinned memory, which PyTorch does not give to anybody else before the copy is over. From other memory it
        # would wait for all that the stream was given before.
        return torch.as_tensor(found.astype(np.int64)).pin_memory().to(self.where, non_blocking=True)


class CudaStream(Stream):
    """One of PyTorch's streams, none of which waits for the default one."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device.where)

    @contextmanager
    def entered(self) -> Generator[None]:
        self._device.attach()  # else leaving the stream would go back to device 0, and make a context there
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> IsOver:
        event = torch.cuda.Event()
        try:
            event.record(self._stream)
        except RuntimeError as error:
            raise DeviceLost(f"the device does nothing more for this process: {error}") from error
        return answers(self._device, event.query)


def answers(device: CopyDevice, query: Callable[[], bool]) -> IsOver:
    """Ask an event from whatever thread; an error of the device's is no answer, and never will be one."""

    def is_over() -> bool:
        device.attach()
        try:
            return query()
        except RuntimeError as error:
            raise DeviceLost(f"the device does nothing more for this process: {error}") from error

    return is_over


class Direction:
    """One direction's stream, and its room for ``nbytes``: one copy's, then the next one's, as the stream goes."""

    def __init__(self, device: CopyDevice, nbytes: int) -> None:
        self._stream = device.stream()
        self.room = torch.empty(nbytes, dtype=torch.uint8, device=device.where)
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Generator[torch.Tensor]:
        """Begin copies behind those that have begun: the stream keeps their order, so the room may be used again.

        If one cannot begin (no memory on the device, say), those before it are over before
        :class:`~tercet.protocol.TransferFailed` is raised: nothing is written after that.
        """
        with self._lock, self._stream.entered():
            try:
                yield self.room
            except RuntimeError as error:
                wait_until(self._stream.mark())
                raise TransferFailed(f"the device did not copy KV: {error}") from error

    def mark(self) -> IsOver:
        """Whether all that has begun until now is over."""
        return self._stream.mark()


def device_of(where: torch.device) -> CopyDevice:
    """The device that tensors there are on."""
    return HostDevice() if where.type == "cpu" else CudaDevice(where.index or 0)
