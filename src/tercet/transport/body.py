"""What follows a header, while it arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from tercet.transport.frames import Header

# In one system call. Linux takes 1024, but who offers many small ones pays for each, and few are filled at a time.
MAX_BUFFERS = 128
Receive = Callable[[Sequence[memoryview]], int]


class Body:
    """A header's bytes, which come next, and where they go: ``buffers``, which hold just as many.

    ``lease`` is set while they go into KV. ``dropped``: they were refused, and go nowhere.
    """

    def __init__(self, header: Header, buffers: Sequence[memoryview], lease: str | None = None) -> None:
        self.header = header
        self.lease = lease
        self.dropped = False
        self.left = header.nbytes
        self._buffers = deque(buffers)

    def buffers(self) -> list[memoryview]:
        """What is still to be filled, in order; not more than one system call takes."""
        return list(islice(self._buffers, MAX_BUFFERS))

    def advance(self, count: int) -> None:
        """``count`` bytes have been filled."""
        self.left -= count
        while count:
            first = self._buffers.popleft()
            size = len(first)
            if size > count:
                self._buffers.appendleft(first[count:])
                return
            count -= size

    def divert(self, scratch: memoryview) -> None:
        """Let the rest go nowhere."""
        self.lease, self.dropped = None, True
        self._buffers.clear()
        left = self.left
        while left:
            self._buffers.append(scratch[:left])
            left -= min(left, scratch.nbytes)


def dropped(header: Header, scratch: memoryview) -> Body:
    """A body that is refused from its first byte on."""
    body = Body(header, [])
    body.divert(scratch)
    return body
