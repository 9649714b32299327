"""CUDA's rules about processes, threads, handles and capture, over host memory: what breaks one fails here, too.

A *process* is whoever calls while :meth:`FakeCuda.process` is entered; it sees some of the machine's devices, by
numbers of its own. Each of its threads begins with device 0, and gets a context of the device that it uses.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

MAGIC = b"\0" * 60


class FakeCuda:
    """``contexts`` are the devices that each process has a context on, by their numbers in the machine."""

    def __init__(self) -> None:
        self._process, self._sees = "", ()
        self._current: dict[tuple[str, int], int] = {}
        self._memory: dict[bytes, tuple[str, int, torch.UntypedStorage]] = {}
        self._events: dict[bytes, tuple[str, FakeEvent]] = {}
        self.contexts: set[tuple[str, int]] = set()
        self.capturing = False
        self.synchronized: list[str] = []

    @contextmanager
    def process(self, name: str, *sees: int) -> Generator[None]:
        before = self._process, self._sees
        self._process, self._sees = name, sees
        try:
            yield
        finally:
            self._process, self._sees = before

    # ---- devices -----------------------------------------------------------------------------------------------------

    @property
    def _me(self) -> tuple[str, int]:
        return self._process, threading.get_ident()

    def current(self) -> int:
        return self._current.get(self._me, 0)

    def use(self) -> None:
        """A call that needs a context has one, on this thread's device."""
        self.contexts.add((self._process, self._sees[self.current()]))

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        if not 0 <= index < len(self._sees):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._current[self._me] = index
        self.use()  # as from CUDA 12 on

    # ---- memory ------------------------------------------------------------------------------------------------------

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        self.use()
        handle = MAGIC + len(self._memory).to_bytes(4, "little")
        self._memory[handle] = self._process, self._sees[self.current()], storage
        event = FakeEvent(interprocess=True)
        return self.current(), handle, storage.nbytes(), 0, b"/torch_1_2", 0, event.ipc_handle(), True

    def open(
        self, device: int, handle: bytes, size: int, offset: int, counter: bytes, at: int, event: bytes, wait: bool
    ) -> torch.UntypedStorage:
        self.use()
        owner, where, storage = self._memory[handle]
        if owner == self._process:
            raise RuntimeError("CUDA error: invalid device context")  # what cudaIpcOpenMemHandle says of one's own
        if device != self.current():
            raise RuntimeError("CUDA error: it is mapped for the current device, and this is another one")
        if wait:
            FakeEvent.from_ipc_handle(device, event)
            if where not in self._sees:
                raise RuntimeError("CUDA error: invalid resource handle")
        assert (size, offset, type(counter), at) == (storage.nbytes(), 0, bytes, 0)
        return storage


class FakeEvent:
    cuda: FakeCuda

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        assert not (interprocess and enable_timing), "an event that processes share keeps no time"
        self._interprocess, self._opened = interprocess, False
        self.recorded = 0
        self.over = True

    def record(self, stream: Any = None) -> None:
        if self.cuda.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self._opened:
            raise RuntimeError("this process has not made it")
        self.cuda.use()
        self.recorded += 1
        self.over = False

    def query(self) -> bool:
        if self.cuda.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.cuda.use()
        return self.over

    def ipc_handle(self) -> bytes:
        if not self._interprocess:
            raise RuntimeError("CUDA error: invalid resource handle")
        self.cuda.use()
        handle = MAGIC + len(self.cuda._events).to_bytes(4, "big")
        self.cuda._events[handle] = self.cuda._process, self
        return handle

    @classmethod
    def from_ipc_handle(cls, device: int, handle: bytes) -> FakeEvent:
        owner, event = cls.cuda._events[handle]
        if owner == cls.cuda._process:
            raise RuntimeError("CUDA error: invalid resource handle")  # one's own cannot be opened
        cls.cuda.use()
        return event


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        if FakeEvent.cuda.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        FakeEvent.cuda.synchronized.append(FakeEvent.cuda._process)


@contextmanager
def entered(stream: FakeStream) -> Generator[None]:
    """As ``torch.cuda.stream``: it goes to the stream's device, and in the end back to where the thread was."""
    cuda = FakeEvent.cuda
    before = cuda.current()
    cuda.set_device(stream.device)
    try:
        yield
    finally:
        cuda.set_device(before)


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Have PyTorch's CUDA be this one."""
    cuda = FakeCuda()
    patch.setattr(FakeEvent, "cuda", cuda, raising=False)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(torch.cuda, "current_stream", lambda _=None: FakeStream(torch.device("cuda", cuda.current())))
    patch.setattr(torch.cuda, "set_device", cuda.set_device)
    patch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: cuda.share(storage), raising=False)
    patch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(cuda.open), raising=False)
    return cuda
