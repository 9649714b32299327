"""Splits a stream of bytes into items, however it is divided into chunks: frames with a length, lines, events.

A machine without I/O: bytes go in, complete items come out, and an incomplete item of bounded size is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct

LENGTH = Struct(">I")


class ItemTooLong(Exception):
    """The stream has an item that is longer than allowed."""


class BrokenFrame(Exception):
    """The stream has other bytes where a frame must begin."""


class Splitter(ABC):
    """Holds the incomplete item; items have at most ``longest`` bytes, without what delimits them."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Bytes of the incomplete item."""
        return len(self._held)

    def split(self, data: bytes) -> list[bytes]:
        """Return the items that are complete now; raises :class:`ItemTooLong`."""
        seen, text = len(self._held), data
        if seen:
            self._held += data
            text = self._held
        found, begin = list[bytes](), 0
        while begin < len(text) and (end := self._end(text, begin, seen)) is not None:
            found.append(self._item(text, begin, end))
            begin = end
        if seen:
            del self._held[:begin]
        elif begin < len(data):
            self._held += data[begin:] if begin else data
        if self._held:
            self._check_held(self._held)
        return found

    def rest(self) -> bytes:
        """Return and drop the incomplete item, at the end of a stream."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    @abstractmethod
    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        """Where the item ends that begins at ``begin``; None if it is incomplete.

        The first ``seen`` bytes of the text contain no end of an item.
        """

    @abstractmethod
    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        """What is returned of the item in ``[begin, end)``."""

    @abstractmethod
    def _check_held(self, held: bytearray) -> None:
        """Raise an error if the incomplete item is too long already."""


class FrameSplitter(Splitter):
    """Frames: a header with the length of the body, then the body. Returns bodies.

    ``header`` packs ``magic``, if it is not empty, and the length. A frame that is too long is refused before it
    arrives, and :class:`BrokenFrame` is raised for another magic.
    """

    def __init__(self, longest: int, header: Struct = LENGTH, magic: bytes = b"") -> None:
        super().__init__(longest)
        self._header = header
        self._magic = magic

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        body = begin + self._header.size
        if len(text) < body:
            return None
        *magic, length = self._header.unpack_from(text, begin)
        if self._magic and magic[0] != self._magic:
            raise BrokenFrame(f"the header begins with {magic[0]!r}")
        if length > self.longest:
            raise ItemTooLong(f"a message of {length} bytes, which is more than {self.longest}")
        return body + length if len(text) >= body + length else None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        return bytes(text[begin + self._header.size : end])

    def _check_held(self, held: bytearray) -> None:
        """``_end`` has checked it."""


class LineSplitter(Splitter):
    r"""Lines that end with ``\n``. Returns them without it."""

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        return text.find(b"\n", max(begin, seen)) + 1 or None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        line = bytes(text[begin : end - 1])
        self._check_held(line)
        return line

    def _check_held(self, held: bytes | bytearray) -> None:
        if len(held) > self.longest:
            raise ItemTooLong(f"a line of more than {self.longest} bytes")
