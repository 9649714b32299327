"""Host memory as a device that carries out work as late as CUDA may, and streams in any order: a missing wait is seen.

What is given to a stream is kept, and done in the stream's order, by and by, whenever somebody looks at an event; work
of other streams may be done before it. Results that are not there yet are noise. Host memory is read and written when
the copy is carried out, not when it is given.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tercet.transport.region import Numbers
from tercet.transport.staged import IsOver
from tercet.transport.torch_blocks import CopyDevice, Stream

NOISE = 0x5A


class LazyDevice(CopyDevice):
    """``seed`` decides what is done when. ``given`` counts the work of all streams."""

    where = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.streams: list[LazyStream] = []
        self._lock = threading.RLock()
        self.given = 0
        self.fails: Callable[[], Exception | None] = lambda: None

    def attach(self) -> None:
        pass

    def stream(self) -> LazyStream:
        self.streams.append(LazyStream(self))
        return self.streams[-1]

    def host_room(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), NOISE, dtype=torch.uint8)

    def numbers(self, found: Numbers) -> torch.Tensor:
        held, there = torch.as_tensor(found.astype(np.int64)), torch.zeros(len(found), dtype=torch.int64)
        entered = next(each for each in self.streams if each.thread == threading.get_ident())
        entered.give(lambda: there.copy_(held))
        return there

    def work(self) -> None:
        """Somebody looks: perhaps something is done, of whatever stream."""
        with self._lock:
            for _ in range(self._random.randrange(3)):
                waiting = [each for each in self.streams if each.waiting]
                if waiting:
                    self._random.choice(waiting).do_one()


class LazyStream(Stream):
    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.waiting: deque[Callable[[], object]] = deque()
        self._given = self._done = 0
        self.thread = 0

    def give(self, work: Callable[[], object]) -> None:
        error = self._device.fails()
        if error is not None:
            raise error
        with self._device._lock:
            self.waiting.append(work)
            self._given += 1
            self._device.given += 1

    def do_one(self) -> None:
        with _disable_current_modes():  # whoever looks may have a stream entered
            self.waiting.popleft()()
        self._done += 1

    @contextmanager
    def entered(self) -> Generator[None]:
        self.thread = threading.get_ident()
        try:
            with _Given(self):
                yield
        finally:
            self.thread = 0

    def mark(self) -> IsOver:
        until = self._given

        def is_over() -> bool:
            if self._done < until:
                self._device.work()
            return self._done >= until

        return is_over


class _Given(TorchDispatchMode):
    """What this thread does with tensors is given to a stream; views are made at once, as on a device."""

    def __init__(self, stream: LazyStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        returned = [each.alias_info for each in func._schema.returns]
        if func._schema.is_mutable:
            self._stream.give(lambda: func(*args, **named))
            return named.get("out", args[0])
        if any(each is not None for each in returned):
            return func(*args, **named)
        like = tree_map_only(torch.Tensor, torch.zeros_like, (args, named))
        result = func(*like[0], **like[1])
        result.view(torch.uint8).fill_(NOISE)
        self._stream.give(lambda: result.copy_(func(*args, **named)))
        return result
