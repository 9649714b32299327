"""Prompts of recorded traces: the ids of blocks, from which tokens are made when they are read.

Mooncake's trace has 145 million tokens and 290,000 ids. Simulated engines compare and keep ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast, overload

HASHED_TEXT = 65_536
"""Number of tokens in the text from which blocks are cut."""
SCATTER = 0x9E3779B97F4A7C15
Tokens = tuple[int, ...]


class BlockText:
    """The tokens that ids of blocks represent: equal tokens for equal ids, different tokens for different ids.

    A block has ``size`` tokens. It begins with its id, written with ``digits`` (tokens) in ``places`` places, and
    continues with a part of ``text``, which has :data:`HASHED_TEXT` tokens and at least ``size`` more.
    """

    __slots__ = ("_digits", "_hashes", "_text", "places", "size")

    def __init__(self, size: int, digits: Tokens, places: int, text: Tokens) -> None:
        self.size, self.places = size, places
        self._digits, self._text = digits, text
        self._hashes: dict[int, list[int | None]] = {}  # of parts of the text, by length and place

    def start(self, block_id: int) -> int:
        """Return the place in the text at which a block would begin if its name were cut off."""
        return block_id * SCATTER % 2**64 % HASHED_TEXT - self.places

    def hashes(self, length: int) -> list[int | None]:
        """Return the known hashes of parts of the text of this length, by their places."""
        found = self._hashes.get(length)
        if found is None:
            found = self._hashes[length] = [None] * (HASHED_TEXT + self.size)
        return found

    def part(self, begin: int, end: int) -> Tokens:
        """Return the tokens ``[begin, end)`` of the text."""
        return self._text[begin:end]

    def tokens(self, block_id: int, begin: int, end: int) -> Tokens:
        """Return the tokens ``[begin, end)`` of a block."""
        places, start = self.places, self.start(block_id)
        if begin >= places:
            return self._text[start + begin : start + end]
        rest, base, name = block_id, len(self._digits), list[int]()
        for _ in range(places):
            rest, digit = divmod(rest, base)
            name.append(self._digits[digit])
        return (*name[begin:end], *self._text[start + places : start + max(places, end)])


class BlockTokens(Sequence[int]):
    """The tokens ``[begin, end)`` of the blocks with these ids, equal to the tuple of them.

    A slice is a tuple; :meth:`part` makes no tokens.
    """

    __slots__ = ("_begin", "_end", "_ids", "_text")

    def __init__(self, text: BlockText, ids: tuple[int, ...], begin: int, end: int) -> None:
        self._text, self._ids, self._begin, self._end = text, ids, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Tokens: ...
    def __getitem__(self, index: int | slice) -> int | Tokens:
        length = self._end - self._begin
        if isinstance(index, int):
            place = index + length if index < 0 else index
            if not 0 <= place < length:
                raise IndexError(f"{index} is outside of {length} tokens")
            return self._made(self._begin + place, self._begin + place + 1)[0]
        begin, end, step = index.indices(length)
        if step != 1:
            return self._made(self._begin, self._end)[index]
        return self._made(self._begin + begin, self._begin + end) if begin < end else ()

    def _made(self, begin: int, end: int) -> Tokens:
        text, ids = self._text, self._ids
        size = text.size
        first, last = begin // size, (end - 1) // size
        if first == last:
            return text.tokens(ids[first], begin - first * size, end - first * size)
        whole = (text.tokens(block_id, 0, size) for block_id in ids[first + 1 : last])
        head, tail = text.tokens(ids[first], begin - first * size, size), text.tokens(ids[last], 0, end - last * size)
        return tuple(chain(head, chain.from_iterable(whole), tail))

    def part(self, begin: int, end: int) -> BlockTokens:
        """Return the tokens ``[begin, end)`` of these, without making them."""
        return BlockTokens(self._text, self._ids, self._begin + begin, min(self._begin + end, self._end))

    def begins_like(self, other: BlockTokens, count: int) -> bool:
        """True if the first ``count`` tokens of both are equal."""
        size, begin = self._text.size, self._begin
        if self._text is not other._text or begin % size != other._begin % size:
            return self[:count] == other[:count]
        first, last, ahead = begin // size, (begin + count - 1) // size, other._begin // size - begin // size
        mine, theirs = self._ids[first : last + 1], other._ids[first + ahead : last + 1 + ahead]
        if mine == theirs:
            return True
        # Blocks of different ids differ in the tokens that name them. At both ends, these may be cut off.
        for place, (one, another) in enumerate(zip(mine, theirs, strict=True), start=first):
            if one != another:
                here = max(begin, place * size) - place * size, min(begin + count, (place + 1) * size) - place * size
                if self._text.tokens(one, *here) != self._text.tokens(another, *here):
                    return False
        return True

    def hashes(self, block_size: int, blocks: int) -> list[int]:
        """Return the hashes of the tuples of the first blocks of ``block_size`` tokens.

        Parts of the text recur, since it is short: their hashes are kept. The others contain the name of a block.
        """
        text, found, known = self._text, list[int](), self._text.hashes(block_size)
        for begin in range(self._begin, self._begin + blocks * block_size, block_size):
            place, offset = divmod(begin, text.size)
            if offset < text.places or offset + block_size > text.size:
                found.append(hash(self._made(begin, begin + block_size)))
                continue
            start = text.start(self._ids[place]) + offset
            each = known[start]
            if each is None:
                each = known[start] = hash(text.part(start, start + block_size))
            found.append(each)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._made(self._begin, self._end) if self else ())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockTokens):
            return len(self) == len(other) and (not self or self.begins_like(other, len(self)))
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[int]) -> Tokens:
        return (*self, *other)

    def __radd__(self, other: Sequence[int]) -> Tokens:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))


def part_of(tokens: Tokens | BlockTokens, begin: int, end: int) -> Tokens | BlockTokens:
    """Return the tokens ``[begin, end)``; those of a trace stay ids."""
    return tokens[begin:end] if type(tokens) is tuple else cast("BlockTokens", tokens).part(begin, end)


def begin_alike(one: Tokens | BlockTokens, other: Tokens | BlockTokens, count: int) -> bool:
    """True if the first ``count`` tokens, at least one, of both are equal."""
    if type(one) is BlockTokens and type(other) is BlockTokens:
        return one.begins_like(other, count)
    return one[:count] == other[:count]
