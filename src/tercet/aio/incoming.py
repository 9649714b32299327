"""Limits on the requests of one HTTP connection: size and time of a head, and the minimum rate of a body.

A client can hold a connection open at little cost: it sends nothing, never ends a head, or sends a body very slowly.
The server pays with memory for as long as the connection lasts. The server's protocol reports the bytes that it has
read; :class:`Incoming` decides when to close the connection.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

LONGEST_HEAD = 64 * 1024
"""Maximum bytes of a request head, and of the data between two pieces of a body (chunk extensions, trailers)."""
SECONDS = 10.0
"""Time limit in seconds: of a connection's first byte, of a head from its first byte, and between body checks."""
LEAST_OF_BODY = 32 * 1024
"""Minimum number of bytes of a body within :data:`SECONDS`, unless the body ends before."""
Part = Literal["nothing", "head", "body"]


class Expires(Protocol):
    """An object that waits for something until a deadline."""

    def expired(self) -> None:
        """Handle the end of the deadline; called when it has passed."""
        ...


class Deadlines:
    """Deadlines: :meth:`Expires.expired` is called on each object that is not discarded within ``seconds``.

    The calls run on the event loop on which this object was made.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._at: dict[Expires, float] = {}  # in order: each deadline is later than those before it
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._at)

    def set(self, waiting: Expires) -> None:
        """Set the deadline of ``waiting`` to ``seconds`` from now; an earlier deadline of it is replaced."""
        self._at.pop(waiting, None)
        self._at[waiting] = at = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._look)

    def discard(self, waiting: Expires) -> None:
        self._at.pop(waiting, None)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        over = list[Expires]()
        for waiting, at in self._at.items():
            if at > now:
                self._timer = self._loop.call_at(at, self._look)
                break
            over.append(waiting)
        # Not while iterating: an object that expires changes the table.
        for waiting in over:
            # An object that expires may discard others, or set them again.
            if self._at.get(waiting, now + 1) <= now:
                del self._at[waiting]
                waiting.expired()


class Breach(Enum):
    """Reasons for closing a connection."""

    SILENT = "no request arrived"
    LONG_HEAD = f"the request's head has more than {LONGEST_HEAD} bytes"
    SLOW_HEAD = f"the request's head took more than {SECONDS:g} s"
    SLOW_BODY = f"less than {LEAST_OF_BODY} bytes of the request's body arrived within {SECONDS:g} s"


class ServedConnection(Protocol):
    """The server's end of a connection."""

    def refuse(self, breach: Breach) -> None: ...

    def is_held(self) -> bool:
        """True if the server itself has stopped reading: that time does not count against the client."""
        ...


class Incoming:
    """The unfinished part of the request that ``connection`` sends. A part that is too large or too slow is refused."""

    __slots__ = ("_connection", "_deadlines", "_part", "_seen", "unfinished")

    def __init__(self, connection: ServedConnection, deadlines: Deadlines) -> None:
        self._connection = connection
        self._deadlines = deadlines
        self._part: Part | Literal["silence", "rest"] = "silence"
        self._seen = 0
        self.unfinished = 0  # bytes since the last one of a body, or the last end of a head or a request
        deadlines.set(self)

    def fed(self, size: int, part: Part, progressed: bool) -> None:
        """Record that ``size`` bytes were read, and that ``part`` is now the unfinished part.

        ``progressed``: these bytes contain a part of a body, or the end of a head or of a request.
        """
        if part == "nothing":
            self.unfinished = 0
            self.closed()
            return
        self.unfinished = 0 if progressed else self.unfinished + size
        # A head without an end, or extensions of chunks that never become a body.
        if self.unfinished > LONGEST_HEAD:
            self._fail(Breach.LONG_HEAD)
        elif self._part == "rest" and part == "body":
            return
        # A new part, or the next head of the same connection: its time begins now.
        elif part != self._part or (part == "head" and progressed):
            self._part, self._seen = part, 0
            self._deadlines.set(self)
        elif progressed:
            self._seen += size

    def answered(self) -> None:
        """Record that the request is answered. The rest of its body is read and dropped, for a limited time."""
        if self._part == "body":
            self._part = "rest"
            self._deadlines.set(self)

    def closed(self) -> None:
        """Stop the timer: the request is complete, or the server no longer owns the connection."""
        if self._part != "nothing":
            self._part = "nothing"
            self._deadlines.discard(self)

    def expired(self) -> None:
        """Refuse the connection if its part was too slow, else set the next deadline. Called after :data:`SECONDS`."""
        # Fast enough since the last look, or the server has stopped reading.
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
    """Return the deadlines of all connections on the running event loop."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = Deadlines(SECONDS)
    return found
