"""One ``remote_send``: what its chunks book on the links, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tercet.protocol import TercetError, TransferFailed
from tercet.sim.profile import Transfer

if TYPE_CHECKING:
    from tercet.sim.engine import SimEngine


class Receiver(Protocol):
    """The other end of a send: an engine of this process, or of another one."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    @property
    def transfer(self) -> Transfer:
        """How fast KV reaches it."""
        ...

    def expects(self, lease: str) -> bool:
        """Whether KV under this lease is still accepted, as far as is known here."""
        ...

    def receive(self, lease: str, begin: int, end: int, answer: Callable[[bool], None]) -> None:
        """KV of ``[begin, end)`` is there; ``answer`` is told, at once or later, whether the lease took it."""
        ...


class Send:
    """KV of ``[begin, end)`` on its way from ``sender`` into a lease of ``receiver``."""

    def __init__(self, sender: SimEngine, receiver: Receiver, lease: str, begin: int, end: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender = sender
        self._receiver = receiver
        self._lease = lease
        self._begin = begin
        self._end = end
        self._arrives = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.bytes = 0
        self.chunks = 0

    def chunk(self, begin: int, end: int, from_time: float, to_time: float) -> None:
        """A step from ``from_time`` to ``to_time`` has the KV of ``[begin, end)``; equal times: it is there already."""
        tokens = min(end, self._end) - max(begin, self._begin)
        if tokens <= 0 or self.done.done():
            return
        if not self._receiver.expects(self._lease):
            self.fail(self._refused())
            return
        model = self._sender.profile.model
        size = tokens * model.kv_bytes_per_token
        first = from_time + (to_time - from_time) / model.layers
        network = self._sender.network
        self._arrives = max(self._arrives, network.book(self._sender, self._receiver, size, first, to_time))
        self.bytes += size
        self.chunks += model.layers

    def computed(self) -> None:
        """All of it has left, or waits for its link."""
        if not self.done.done():
            self._timer = self._loop.call_at(max(self._arrives, self._loop.time()), self._arrived)

    def _arrived(self) -> None:
        if self.done.done():
            return
        if self._sender.loses_a_transfer():
            self.fail(TransferFailed(f"the KV from {self._sender.name} to {self._receiver.name} was lost"))
        else:
            self._receiver.receive(self._lease, self._begin, self._end, self._answered)

    def _answered(self, accepted: bool) -> None:
        if not accepted:
            self.fail(self._refused())
        elif not self.done.done():
            self.done.set_result(None)

    def _refused(self) -> TransferFailed:
        return TransferFailed(f"{self._receiver.name} does not expect KV under this lease any more")

    def fail(self, error: TercetError) -> None:
        """End the send with an error; nothing of it arrives any more."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.done.done():
            self.done.set_exception(error)
