"""Sorts what an engine's stream brings by sequence: in order, exactly once, or not at all."""

from __future__ import annotations

from collections.abc import Iterable

from tercet.protocol import EngineUnreachable, OutputStream, TercetError
from tercet.streams.messages import Item


class _Sequence:
    __slots__ = ("position", "stream")

    def __init__(self, position: int, stream: OutputStream) -> None:
        self.position = position
        self.stream = stream


class Inbox:
    """The sequences of one engine. Decides without I/O; ``engine`` is its name in messages.

    Every sequence that was opened gets outputs whose positions follow each other, until one is the last, or one error.
    What was there already is dropped. A gap is an error: nobody gets a token that does not follow the one before.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._open: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def open(self, number: int, position: int, stream: OutputStream) -> None:
        """Put the outputs of a sequence into ``stream``; its first token here is at ``position``."""
        self._open[number] = _Sequence(position, stream)

    def close(self, number: int) -> bool:
        """Nobody waits for the sequence any more; whether it was still open."""
        return self._open.pop(number, None) is not None

    def take(self, items: Iterable[Item]) -> list[int]:
        """Deliver a message's items; returns the numbers of sequences that the engine should not work on."""
        unwanted: list[int] = []
        for item in items:
            sequence = self._open.get(item.number)
            if sequence is None:
                if item.ending is None or not item.ending.is_last:
                    unwanted.append(item.number)
            elif item.position == sequence.position:
                self._deliver(sequence, item)
            elif not _is_repeated(item, sequence):
                unwanted.append(item.number)
                self._fail(item.number, self._gap(item, sequence))
        return unwanted

    def lose(self, error: TercetError) -> None:
        """The stream is lost: every open sequence ends with ``error``."""
        for number in list(self._open):
            self._fail(number, error)

    def _deliver(self, sequence: _Sequence, item: Item) -> None:
        sequence.position += len(item.token_ids)
        if item.ending is not None and item.ending.is_last:
            del self._open[item.number]
        try:
            output = item.to_output()
        except TercetError as error:
            sequence.stream.fail(error)
        else:
            sequence.stream.put(output)

    def _fail(self, number: int, error: TercetError) -> None:
        self._open.pop(number).stream.fail(error)

    def _gap(self, item: Item, sequence: _Sequence) -> EngineUnreachable:
        return EngineUnreachable(
            f"{self._engine} lost tokens: output position {sequence.position} was due, {item.position} came"
        )


def _is_repeated(item: Item, sequence: _Sequence) -> bool:
    """Whether all of it was delivered already."""
    is_last = item.ending is not None and item.ending.is_last
    return not is_last and item.position + len(item.token_ids) <= sequence.position
