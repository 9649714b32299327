"""Limits on what one HTTP connection sends to a server: heads have a size and a time limit, bodies a minimum rate.

A connection that sends nothing, never ends its head, or sends its body very slowly costs its client little, and takes
the server's memory as long as it lasts. The server's protocol reports what it has read; :class:`Incoming` decides.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

from tercet.aio.deadlines import Deadlines

LONGEST_HEAD = 64 * 1024
"""Most bytes of a request's head, and of other data between two pieces of its body: chunk extensions, trailers."""
SECONDS = 10.0
"""Time limit of a whole head from its first byte, of a connection's first byte, and the interval of body checks."""
LEAST_OF_BODY = 32 * 1024
"""Fewest bytes of a body in :data:`SECONDS`, unless it ends before."""

Part = Literal["nothing", "head", "body"]


class Breach(Enum):
    """Why a connection is closed."""

    SILENT = "no request came"
    LONG_HEAD = f"the request's head has more than {LONGEST_HEAD} bytes"
    SLOW_HEAD = f"the request's head took more than {SECONDS:g} s"
    SLOW_BODY = f"less than {LEAST_OF_BODY} bytes of the request's body came within {SECONDS:g} s"


class ServedConnection(Protocol):
    """The server's end of a connection."""

    def refuse(self, breach: Breach) -> None:
        """Close it."""
        ...

    def is_held(self) -> bool:
        """Whether the server itself has stopped reading; that time does not count against the client."""
        ...


class Incoming:
    """The part of a request that a ``connection`` sends now; it is refused if it takes too long or is too large."""

    __slots__ = ("_connection", "_deadlines", "_part", "_seen", "unfinished")

    def __init__(self, connection: ServedConnection, deadlines: Deadlines) -> None:
        self._connection = connection
        self._deadlines = deadlines
        self._part: Part | Literal["silence", "rest"] = "silence"
        self._seen = 0
        self.unfinished = 0  # bytes since the last one of a body, or the last end of a head or a request
        deadlines.set(self)

    def fed(self, size: int, part: Part, progressed: bool) -> None:
        """Record that ``size`` bytes were read, after which ``part`` is the unfinished one.

        ``progressed``: a head or a request ended among them, or they contained a part of a body.
        """
        if part == "nothing":
            self.unfinished = 0
            self.closed()
            return
        self.unfinished = 0 if progressed else self.unfinished + size
        if self.unfinished > LONGEST_HEAD:
            self._fail(Breach.LONG_HEAD)
        elif self._part == "rest" and part == "body":
            return
        elif part != self._part or (part == "head" and progressed):
            self._part, self._seen = part, 0
            self._deadlines.set(self)
        elif progressed:
            self._seen += size

    def answered(self) -> None:
        """The request is answered: the rest of its body is dropped, for a limited time."""
        if self._part == "body":
            self._part = "rest"
            self._deadlines.set(self)

    def closed(self) -> None:
        """Stop waiting: the request is whole, or the connection does not belong to the server any more."""
        if self._part != "nothing":
            self._part = "nothing"
            self._deadlines.discard(self)

    def expired(self) -> None:
        """Called when :data:`SECONDS` have passed."""
        if self._connection.is_held() or (self._part == "body" and self._seen >= LEAST_OF_BODY):
            self._seen = 0
            self._deadlines.set(self)
            return
        self._fail(_BREACHES[self._part])

    def _fail(self, breach: Breach) -> None:
        self.closed()
        self._connection.refuse(breach)


_BREACHES = {
    "silence": Breach.SILENT,
    "head": Breach.SLOW_HEAD,
    "body": Breach.SLOW_BODY,
    "rest": Breach.SLOW_BODY,
    "nothing": Breach.SILENT,
}
_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Deadlines] = WeakKeyDictionary()


def deadlines_of_connections() -> Deadlines:
    """The deadlines of all connections on the running event loop."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = Deadlines(SECONDS)
    return found
