"""Cuts a stream of bytes into frames."""

from __future__ import annotations

from tercet.streams.messages import LENGTH_BYTES


class FrameTooLong(Exception):
    """The peer announced a frame that nobody sends."""


class Splitter:
    """Collects bytes until frames are whole; refuses frames longer than ``longest`` bytes before they arrive."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._left = bytearray()

    def split(self, data: bytes) -> list[bytes]:
        """The bodies of the frames that are whole now; raises :class:`FrameTooLong`."""
        if not self._left and len(data) >= LENGTH_BYTES:
            # Most of what arrives is exactly one frame.
            length = int.from_bytes(data[:LENGTH_BYTES], "big")
            if length == len(data) - LENGTH_BYTES and length <= self.longest:
                return [data[LENGTH_BYTES:]]
        left, begin, frames = self._left, 0, list[bytes]()
        left += data
        while len(left) - begin >= LENGTH_BYTES:
            body = begin + LENGTH_BYTES
            length = int.from_bytes(left[begin:body], "big")
            if length > self.longest:
                raise FrameTooLong(f"a frame of {length} bytes; at most {self.longest} are allowed")
            if len(left) - body < length:
                break
            begin = body + length
            frames.append(bytes(left[body:begin]))
        del left[:begin]
        return frames
