"""What follows a header, while it arrives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tercet.transport.frames import Header
from tercet.transport.vectors import Bytes, Vector, address_of

Receive = Callable[[Bytes], int]


class Body:
    """A header's bytes, which come next, and where they go: ``into``, which takes just as many.

    ``lease`` is set while they go into KV. ``dropped``: they were refused, and go nowhere.
    """

    def __init__(self, header: Header, into: Bytes, lease: str | None = None) -> None:
        self.header = header
        self.into = into
        self.lease = lease
        self.dropped = False

    @property
    def left(self) -> int:
        """Bytes that have not come yet."""
        return self.into.left

    def divert(self, scratch: memoryview) -> None:
        """Let the rest go nowhere."""
        self.lease, self.dropped = None, True
        if self.left:
            self.into = _nowhere(self.left, scratch)


def dropped(header: Header, scratch: memoryview) -> Body:
    """A body that is refused from its first byte on."""
    body = Body(header, _nowhere(header.nbytes, scratch))
    body.dropped = True
    return body


def _nowhere(nbytes: int, scratch: memoryview) -> Vector:
    """The same few bytes, over and over."""
    whole, rest = divmod(nbytes, scratch.nbytes)
    lengths = [scratch.nbytes] * whole + [rest] * (rest > 0)
    return Vector(np.array([(address_of(scratch), length) for length in lengths], dtype=np.uint64), scratch, nbytes)
