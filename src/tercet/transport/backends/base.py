"""How a receiver gets at a sender's memory without the bytes passing through a socket.

A backend lets others read this rank's region (:meth:`Backend.offer`), and reads theirs (:meth:`Backend.connect`).
The receiver reads and the sender never writes: so the fence around a lease is the receiver's own affair, and a peer
that is late, stuck or hostile cannot touch memory that was given to somebody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.region import RegionShape

# A row for each copy: bytes, where in the sender's region, where in ours.
Copies = NDArray[np.int64]


class BackendUnavailable(TransferFailed):
    """A backend is missing or failed its self-check here; the message names it and says what to do."""

    code = "backend_unavailable"


@dataclass(frozen=True)
class Sender:
    """The sender at a connection's other end. ``holds(pid)``: whether that process has the other end open."""

    shape: RegionShape
    holds: Callable[[int], bool]


class Reader(Protocol):
    """Reads one sender's region. Belongs to one thread at a time.

    ``at_a_time``: bytes that it is best given at a time. A lease's revocation waits until they are in place.
    """

    @property
    def at_a_time(self) -> int:
        """See above."""
        ...

    def read(self, copies: Copies) -> None:
        """Copy each row's bytes in; all is in place when this returns.

        Nothing is written to our region after it has returned or raised. Raises
        :class:`~tercet.protocol.TransferFailed` or ``OSError``.
        """
        ...

    def word(self, there: int) -> int:
        """An aligned word of 8 bytes, read after everything that :meth:`read` copied before."""
        ...

    def close(self) -> None:
        """Give back what reading needs."""
        ...


class Backend(Protocol):
    """One way to read memory of other ranks; one object per rank."""

    @property
    def name(self) -> str:
        """As settings and addresses call it."""
        ...

    def offer(self) -> bytes:
        """What another rank's backend needs to read our region."""
        ...

    def connect(self, offer: bytes, sender: Sender) -> Reader:
        """A reader of the region that ``offer`` is about; raises :class:`BackendUnavailable` if it cannot be had."""
        ...

    def close(self) -> None:
        """Give back what it took; readers are closed before."""
        ...
