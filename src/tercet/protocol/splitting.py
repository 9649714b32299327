"""Splitters of byte streams into items: frames with a length, lines, or events. The chunks may be cut anywhere.

A splitter does no I/O: it takes bytes and returns complete items, and holds an incomplete item of bounded size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct

LENGTH = Struct(">I")


class ItemTooLong(Exception):
    """Error: the stream has an item that is longer than allowed."""


class BrokenFrame(Exception):
    """Error: the stream has other bytes at the place where a frame must begin."""


class Splitter(ABC):
    """Base of splitters. Items have at most ``longest`` bytes, delimiters not counted; the incomplete item is held."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Number of bytes of the incomplete item."""
        return len(self._held)

    def split(self, data: bytes) -> list[bytes]:
        """Return the items that ``data`` completes. Raise :class:`ItemTooLong`."""
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
        """Return the end of the item that begins at ``begin``; None if it is incomplete.

        The first ``seen`` bytes of the text contain no end of an item.
        """

    @abstractmethod
    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        """Return the part of ``[begin, end)`` that the caller gets."""

    @abstractmethod
    def _check_held(self, held: bytearray) -> None:
        """Raise an error if the incomplete item is already too long."""


class FrameSplitter(Splitter):
    """Splitter for frames: a header with the length of the body, then the body. It returns bodies.

    ``header`` packs ``magic``, if it is not empty, and the length. A frame that is too long is refused when its header
    has arrived; :class:`BrokenFrame` is raised for another magic.
    """

    def __init__(self, longest: int, header: Struct = LENGTH, magic: bytes = b"") -> None:
        super().__init__(longest)
        self._header = header
        self._magic = magic

    def split(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that ``data`` completes."""
        # Mostly one whole frame; a router of 100 engines reads a thousand a second, also when it is idle.
        if not self._held and self._end(data, 0, 0) == len(data):
            return [data[self._header.size :]]
        return super().split(data)

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        body = begin + self._header.size
        if len(text) < body:
            return None
        *magic, length = self._header.unpack_from(text, begin)
        if self._magic and magic[0] != self._magic:
            raise BrokenFrame(f"the header begins with {magic[0]!r} instead of {self._magic!r}")
        if length > self.longest:
            raise ItemTooLong(f"a message of {length} bytes, which is more than {self.longest}")
        return body + length if len(text) >= body + length else None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        return bytes(text[begin + self._header.size : end])

    def _check_held(self, held: bytearray) -> None:
        """Do nothing: ``_end`` has checked the length."""


class LineSplitter(Splitter):
    r"""Splitter for lines that end with ``\n``. It returns them without it."""

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        return text.find(b"\n", max(begin, seen)) + 1 or None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        line = bytes(text[begin : end - 1])
        self._check_held(line)
        return line

    def _check_held(self, held: bytes | bytearray) -> None:
        if len(held) > self.longest:
            raise ItemTooLong(f"a line of more than {self.longest} bytes")
