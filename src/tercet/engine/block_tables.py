"""Tables of running sequences' KV, in shared memory, which an engine's core publishes with each step.

The process that serves the verbs reads a table when the core is stuck, perhaps in the middle of a write. A writer
therefore makes :data:`VERSION` odd while it changes anything, and a reader accepts its data only if the version was
even before and is the same after. A writer that is stopped within a change leaves the version odd, and then nothing is
found.

:data:`EPOCH` shows how long the table is true. It is the number of the core's words
(:mod:`tercet.transport.region`) that guarantee all blocks in the table, and 0 from the time when the core allocates
a block again until it has updated the table: a block of the table may be among those, since the table still has
sequences that ended after its last change.

That process knows the tokens of every sequence that decodes here, since they passed through it. It lacks the place of
their KV, which is in the table. The blocks are not pinned: a send by :class:`Bypass` uses one of the core's words, so
that a receiver accepts nothing from a block that the core has reallocated after it continued.

One table, in words of 8 bytes:

    VERSION  EPOCH  | OWNER  COMPUTED  COUNT  block block block ... | OWNER  COMPUTED  COUNT  block ... | ...
    ─── HEAD ────── | ───── ROW_HEAD ───────  ──── row_blocks ───── |   one row for each sequence and group
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from tercet.protocol import EngineError
from tercet.transport import CORE_WORDS, Push, core_word, create_sealed_file

if TYPE_CHECKING:
    from tercet.engine.interface import SendPlan

VERSION, EPOCH, HEAD = 0, 1, 2
# Words of a row: its owner (0: none), the number of computed tokens, and the number of blocks that follow.
OWNER, COMPUTED, COUNT, ROW_HEAD = 0, 1, 2, 3
WORD_BYTES = 8
TRIES = 100


class TableWords(Protocol):
    """Integers in shared memory; each is read and written as a whole, and in program order."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class TableShape(msgspec.Struct, frozen=True):
    """``rows`` of at most ``row_blocks`` blocks; a sequence has a row for each of the ``groups`` of layers."""

    rows: int
    row_blocks: int
    groups: int = 1

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes; only written parts use memory."""
        return (HEAD + self.rows * (ROW_HEAD + self.row_blocks)) * WORD_BYTES

    def row(self, number: int) -> int:
        return HEAD + number * (ROW_HEAD + self.row_blocks)


class TablePlace(msgspec.Struct, frozen=True):
    """The file and the shape of a table."""

    path: str
    shape: TableShape


@dataclass(frozen=True)
class Residence:
    """The place of one sequence's KV, or of one group of its layers: ``computed`` tokens have their KV in ``blocks``.

    It is true as long as the words are those of ``epoch``.
    """

    epoch: int
    computed: int
    blocks: list[int]


class BlockTableWriter:
    """The core's side of a table. ``turn(epoch)`` gives its words the numbers of that epoch, first of ``epoch``."""

    def __init__(self, words: TableWords, shape: TableShape, turn: Callable[[int], None], epoch: int) -> None:
        self._words, self._shape, self._turn, self._epoch = words, shape, turn, epoch
        self._version = 0
        self._free = list(reversed(range(shape.rows)))
        self.stands = False
        turn(epoch)

    def revoke(self) -> None:
        """Stop guaranteeing blocks until :meth:`end`: a block is about to be allocated."""
        if self.stands:
            self.stands = False
            # First: a reader that sees it does not begin a send; then the words of sends that have begun change.
            self._words[EPOCH] = 0
            self._epoch += 1
            self._turn(self._epoch)

    def begin(self) -> None:
        self._version += 1
        self._words[VERSION] = self._version

    def end(self) -> None:
        """End changes, and guarantee the whole table: all of it is true."""
        self.stands = True
        self._words[EPOCH] = self._epoch
        self._version += 1
        self._words[VERSION] = self._version

    def enter(self, owner: int) -> int | None:
        """Add a row for a sequence, with nothing computed, and return its number; None if no row is free."""
        if not self._free:
            return None
        row = self._free.pop()
        at = self._shape.row(row)
        self._words[at + OWNER], self._words[at + COMPUTED], self._words[at + COUNT] = owner, 0, 0
        return row

    def leave(self, row: int) -> None:
        self._words[self._shape.row(row) + OWNER] = 0
        self._free.append(row)

    def computed(self, row: int, tokens: int) -> None:
        self._words[self._shape.row(row) + COMPUTED] = tokens

    def blocks(self, row: int, first: int, blocks: Iterable[int]) -> bool:
        """Set the row's blocks from index ``first`` on; return False if there is no room for them."""
        at, count = self._shape.row(row), first
        for block in blocks:
            if count == self._shape.row_blocks:
                return False
            self._words[at + ROW_HEAD + count] = block
            count += 1
        self._words[at + COUNT] = count
        return True


class BlockTableReader:
    """The API server's side of a table."""

    def __init__(self, words: TableWords, shape: TableShape) -> None:
        self._words, self._shape = words, shape

    def find_all(self, owner: int) -> list[Residence] | None:
        """Return the places of a sequence's KV, by group of layers; None unless the table has all in one epoch."""
        found = list[Residence]()
        for group in range(self._shape.groups):
            one = self.find(row_owner(owner, group, self._shape))
            if one is None or one.epoch != (found or [one])[0].epoch:
                return None
            found.append(one)
        return found

    def find(self, owner: int) -> Residence | None:
        """Return the contents of an owner's row; None if it has no row, or the table cannot be read now."""
        words = self._words
        for _ in range(TRIES):
            version = words[VERSION]
            # The writer is changing the table.
            if version % 2:
                continue
            found = self._find(owner, words[EPOCH])
            # Otherwise the row may be a mixture of before and after.
            if words[VERSION] == version:
                return found
        return None

    def _find(self, owner: int, epoch: int) -> Residence | None:
        words = self._words
        for row in range(self._shape.rows) if epoch else ():
            at = self._shape.row(row)
            if words[at + OWNER] == owner:
                count = min(words[at + COUNT], self._shape.row_blocks)
                blocks = [words[at + ROW_HEAD + index] for index in range(count)]
                return Residence(epoch, words[at + COMPUTED], blocks)
        return None


def row_owner(sequence: int, group: int, shape: TableShape) -> int:
    """Return the owner in the row of a sequence's group."""
    return sequence * shape.groups + group


def create_table(shape: TableShape) -> tuple[TableWords, TablePlace]:
    """Make a table of this process, all zero; other processes can open it as long as this process lives."""
    fd = create_sealed_file("tercet-tables", shape.nbytes)
    return memoryview(mmap.mmap(fd, shape.nbytes)).cast("q"), TablePlace(f"/proc/{os.getpid()}/fd/{fd}", shape)


def open_table(place: TablePlace) -> BlockTableReader:
    """Open the table of another process. Raises ``OSError`` or ``ValueError`` if it does not exist."""
    fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, place.shape.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return BlockTableReader(memoryview(mapped).cast("q"), place.shape)


# The null block never contains KV: it stands for tokens that a model no longer looks back at.
NULL_BLOCK = 0


class Bypass:
    """A look-up of KV in the tables that the core has published, with blocks of ``block_size`` tokens."""

    def __init__(self, tables: BlockTableReader, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._epoch, self._used = 0, 0

    def find(self, owners: Iterable[int], plan: SendPlan) -> tuple[list[Push], int]:
        """Return the pushes of a send of KV that one of ``owners`` has, and the core's word for the send.

        The send may begin at once. Raises :class:`~tercet.protocol.EngineError` if the core has not published the place
        of the KV.
        """
        for owner in owners:
            found = self._tables.find_all(owner)
            pushes = None if found is None else self._pushes(found, plan)
            if found and pushes is not None:
                # Each word of the epoch is used for one send.
                epoch = found[0].epoch
                if epoch != self._epoch:
                    self._epoch, self._used = epoch, 0
                if self._used == CORE_WORDS:
                    raise EngineError(f"{CORE_WORDS} sends have bypassed the stuck core, which is the limit")
                self._used += 1
                return pushes, core_word(epoch, self._used - 1)
        raise EngineError("the engine's core does not answer, and has not published the place of these tokens' KV")

    def _pushes(self, found: list[Residence], plan: SendPlan) -> list[Push] | None:
        """Return a push for each group with requested KV; None if some of it is missing."""
        base, until, pushes = plan.base // self._block_size, -(-plan.end // self._block_size), list[Push]()
        for group, each in enumerate(found):
            first = plan.first_block(group, self._block_size)
            blocks = tuple(each.blocks[first:until])
            # Blocks are assigned before their tokens are computed.
            if each.computed < plan.end or len(blocks) < until - first or NULL_BLOCK in blocks:
                return None
            if blocks:
                pushes.append(Push(plan.send_id, first - base, blocks, group))
        return pushes
