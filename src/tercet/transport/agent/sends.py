"""Sends as the engine means them: one id, perhaps several receiving ranks, one report at the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tercet.protocol import TercetError
from tercet.transport.agent.messages import Completion, Push, Report, SendDone, SendOpening
from tercet.transport.base import KVTransport, SendReport, Target

REMEMBERED_CANCELLED = 4096


@dataclass
class _Sending:
    """One send: the ids of its parts, how many have not ended, and what the others moved."""

    parts: tuple[str, ...]
    notify: str
    left: int
    bytes: int = 0
    chunks: int = 0
    transports: set[str] = field(default_factory=set[str])
    error: str | None = None


class Sends:
    """This rank's sends. Thread-safe: they are opened by steps, and cancelled from the control channel."""

    def __init__(self, rank: int, transport: KVTransport, report: Callable[[str, Report], None]) -> None:
        self._rank = rank
        self._transport = transport
        self._report = report
        self._sending: dict[str, _Sending] = {}
        self._cancelled: deque[str] = deque(maxlen=REMEMBERED_CANCELLED)
        self._lock = threading.Lock()

    def open(self, opening: SendOpening) -> None:
        """Begin a send, unless it was cancelled before the step that opens it came here."""
        parts = tuple(f"{opening.send_id}/{number}" for number in range(len(opening.destinations)))
        with self._lock:
            if opening.send_id in self._cancelled:
                return
            self._sending[opening.send_id] = _Sending(parts, opening.notify, len(parts))
        if not parts:  # other ranks hold the same heads, and send them
            self._finish(opening.send_id)
        for part, destination in zip(parts, opening.destinations, strict=True):
            target = Target(destination.addresses, opening.lease, destination.head_slice)
            self._transport.open(part, target, lambda outcome: self._ended(opening.send_id, outcome))
        with self._lock:
            cancelled = opening.send_id in self._cancelled
        # A cancel that came meanwhile found nothing to end in the transport.
        for part in parts if cancelled else ():
            self._transport.cancel(part)

    def push(self, pushes: Sequence[Push], planes: Sequence[int]) -> None:
        """Push blocks of some planes."""
        together = list(neighbouring(planes))
        for push in pushes:
            for part in self._parts(push.send_id):
                for layers in together:
                    self._transport.push(part, layers, push.slot, push.blocks)

    def complete(self, completion: Completion) -> None:
        """Everything of a send has been pushed."""
        for part in self._parts(completion.send_id):
            self._transport.finish(part, completion.begin, completion.end)

    def cancel(self, send_id: str) -> None:
        """End a send; once this returns its blocks are not read."""
        with self._lock:
            self._cancelled.append(send_id)
        for part in self._parts(send_id):
            self._transport.cancel(part)

    def _parts(self, send_id: str) -> tuple[str, ...]:
        found = self._sending.get(send_id)
        return found.parts if found is not None else ()

    def _ended(self, send_id: str, outcome: SendReport | TercetError) -> None:
        with self._lock:
            found = self._sending.get(send_id)
            if found is None:
                return
            found.left -= 1
            if isinstance(outcome, TercetError):
                found.error = found.error or outcome.message
            else:
                found.bytes += outcome.bytes
                found.chunks += outcome.chunks
                found.transports.add(outcome.transport)
            failed_first = isinstance(outcome, TercetError) and found.left > 0
            others = found.parts if failed_first else ()
        # With one receiving rank lost the rest is of no use.
        for part in others:
            self._transport.cancel(part)
        if not found.left:
            self._finish(send_id)

    def _finish(self, send_id: str) -> None:
        with self._lock:
            found = self._sending.pop(send_id, None)
        if found is not None:
            done = SendDone(
                send_id, self._rank, found.bytes, found.chunks, "+".join(sorted(found.transports)), found.error
            )
            self._report(found.notify, done)


def neighbouring(planes: Sequence[int]) -> Iterator[range]:
    """Planes as ranges: ``[4, 5, 6, 1]`` as ``[4, 7)`` and ``[1, 2)``."""
    begin = 0
    for at in range(1, len(planes) + 1):
        if at == len(planes) or planes[at] != planes[at - 1] + 1:
            yield range(planes[begin], planes[at - 1] + 1)
            begin = at
