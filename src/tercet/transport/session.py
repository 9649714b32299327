"""What the connections of one sender have in common on the receiver's side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tercet.transport.backends import Reader
from tercet.transport.frames import ProtocolViolation
from tercet.transport.recut import BlockShape
from tercet.transport.region import RegionShape

REMEMBERED_REFUSED = 1024
MAX_STREAMS = 64

Answer = Callable[[bytes], None]


@dataclass(eq=False)
class Session:
    """One sender, from its first connection to its last. Its connections have threads of their own.

    ``answer`` writes to stream 0, from any thread. ``reader`` is how its memory is read, ``None`` when bytes travel
    through the connections. ``block`` is set if the sender's blocks have another size than ours.
    """

    name: str
    answer: Answer
    reader: Reader | None = None
    shape: RegionShape | None = None
    block: BlockShape | None = None
    streams: int = 1
    refused: dict[int, None] = field(default_factory=dict[int, None])  # the latest sends that were refused
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def refuse(self, send: int) -> bool:
        """Take nothing more of a send; whether that is news."""
        with self._lock:
            if send in self.refused:
                return False
            self.refused[send] = None
            if len(self.refused) > REMEMBERED_REFUSED:
                del self.refused[next(iter(self.refused))]
            return True


class Sessions:
    """All sessions of one receiver. Thread-safe."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_name)

    def begin(self, session: Session) -> None:
        """A sender's first connection; raises :class:`ProtocolViolation` if its name is taken."""
        with self._lock:
            if session.name in self._by_name:
                raise ProtocolViolation("a session begins once")
            self._by_name[session.name] = session

    def join(self, name: str) -> Session:
        """A further connection of a session; raises :class:`ProtocolViolation` if there is none, or too many are.

        A session with a reader has one connection, since readers belong to one thread.
        """
        with self._lock:
            session = self._by_name.get(name)
            if session is None or session.streams >= MAX_STREAMS:
                raise ProtocolViolation("no such session, or too many streams of it")
            if session.reader is not None:
                raise ProtocolViolation("a session whose KV is read has one connection")
            session.streams += 1
            return session

    def leave(self, session: Session) -> bool:
        """A connection is over; whether it was the last one, with which the reader is closed."""
        with self._lock:
            session.streams -= 1
            if session.streams:
                return False
            self._by_name.pop(session.name, None)
        if session.reader is not None:
            session.reader.close()
        return True
