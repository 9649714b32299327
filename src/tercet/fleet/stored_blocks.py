"""What engines say they hold, copy by copy: the prefix index that KV events feed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import msgspec

from tercet.fleet.prefix_index import Holders
from tercet.protocol.block_hashes import Extras, chain, root_of


class _Unplaced(msgspec.Struct, frozen=True):
    """A block that waits for its parent; of one without ``tokens`` the engine has said the name alone."""

    parent: Hashable | None = None
    tokens: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()


class _Held(msgspec.Struct):
    """What one engine holds.

    ``places`` has the hash of each block that is placed, ``unplaced`` the others, ``children`` those of them that wait
    for a block to be placed. ``spare`` counts the copies of a block besides the first.
    """

    places: dict[Hashable, int] = {}
    unplaced: dict[Hashable, _Unplaced] = {}
    children: dict[Hashable, set[Hashable]] = {}
    spare: dict[Hashable, int] = {}


class StoredBlocks(Holders):
    """What engines say they hold, in blocks of one size: fed with their KV events.

    Engines name blocks by hashes of their own, which mean nothing elsewhere; the tokens that come with them are hashed
    again. A name stands for the same tokens, and the same ones before them, wherever it is said.

    An engine may hold several copies of a block, and says of each that it is stored and removed: the block is found
    until the last copy is gone. A block whose parent is not known waits until the parent is stored: no prompt finds it
    before, as it has a gap in front. Those are counted in ``orphans``.
    """

    def __init__(self, rows: Callable[[], int], block_size: int) -> None:
        super().__init__(rows)
        self._block_size = block_size
        self._rows_held: dict[int, _Held] = {}
        # One block of tokens may be held under several names: with layers of several kinds, say.
        self._names: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        """Whether any engine holds anything, placed or not."""
        return bool(self._rows_held)

    @property
    def orphans(self) -> int:
        """The blocks that no prompt finds, as what is before them is not known."""
        return sum(len(held.unplaced) for held in self._rows_held.values())

    def store(
        self,
        row: int,
        names: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        salt: str | None = None,
        adapter: str | None = None,
        extras: Extras | None = None,
    ) -> None:
        """The engine stored a copy of consecutive blocks, which it calls ``names``, after the one it calls ``parent``.

        ``tokens`` are theirs, ``extras`` say what images and the like are in them; ``salt`` and ``adapter`` are those
        of the request they came from. Without tokens for all of them, or with more, it is not known which are whose:
        then the names alone are known.
        """
        if not names:
            return
        held = self._rows_held.setdefault(row, _Held())
        size, told = self._block_size, tuple(tokens)
        if len(told) != len(names) * size:
            for name in names:
                self._add_unplaced(held, name, _Unplaced())
            return
        place = root_of(salt, adapter) if parent is None else held.places.get(parent)
        if place is not None:
            for name, block in zip(names, chain(place, told, size, extras=extras), strict=True):
                self._add_placed(row, held, name, block)
            return
        for index, name in enumerate(names):
            block = told[index * size : (index + 1) * size]
            self._add_unplaced(held, name, _Unplaced(parent, block, (extras or {}).get(index, ())))
            parent = name

    def hold(self, row: int, hashes: Sequence[int]) -> None:
        """The engine stored blocks that it calls by the hashes that are used here; of such blocks it has no copies."""
        held = self._rows_held.setdefault(row, _Held())
        for block in hashes:
            if block not in held.places:
                self._place(row, held, block, block)

    def _add_placed(self, row: int, held: _Held, name: Hashable, place: int) -> None:
        """One more copy of a block whose place is known."""
        if name in held.places:
            self._add_copy(held, name)
            return
        if name in held.unplaced:
            self._add_copy(held, name)
            self._wait_no_more(held, name)
        self._place(row, held, name, place)

    def _add_unplaced(self, held: _Held, name: Hashable, block: _Unplaced) -> None:
        """One more copy of a block whose place this event does not tell."""
        known = held.unplaced.get(name)
        if known is not None or name in held.places:
            self._add_copy(held, name)
        if name in held.places or (known is not None and (known.tokens or not block.tokens)):
            return
        held.unplaced[name] = block
        if block.tokens:
            held.children.setdefault(block.parent, set()).add(name)

    @staticmethod
    def _add_copy(held: _Held, name: Hashable) -> None:
        held.spare[name] = held.spare.get(name, 0) + 1

    def _place(self, row: int, held: _Held, name: Hashable, place: int) -> None:
        """The block is found from now on, and with it those that wait for it, and for these."""
        self._find(row, held, name, place)
        placed = [(name, place)] if held.children else []
        while placed:
            name, place = placed.pop()
            for child in held.children.pop(name, ()):
                block = held.unplaced.pop(child)
                (found,) = chain(place, block.tokens, self._block_size, extras={0: block.extra})
                self._find(row, held, child, found)
                placed.append((child, found))

    def _find(self, row: int, held: _Held, name: Hashable, place: int) -> None:
        held.places[name] = place
        self._names[row, place] = self._names.get((row, place), 0) + 1
        self.add(row, place)

    def _wait_no_more(self, held: _Held, name: Hashable) -> None:
        block = held.unplaced.pop(name)
        siblings = held.children.get(block.parent)
        if siblings is not None:
            siblings.discard(name)
            if not siblings:
                del held.children[block.parent]

    def remove(self, row: int, names: Sequence[Hashable]) -> None:
        """The engine dropped a copy of these blocks; names that it never announced are ignored."""
        held = self._rows_held.get(row)
        if held is None:
            return
        for name in names:
            spare = held.spare.pop(name, 0)
            if spare > 1:
                held.spare[name] = spare - 1
            elif not spare:
                self._drop(row, held, name)
        if not held.places and not held.unplaced:
            del self._rows_held[row]

    def _drop(self, row: int, held: _Held, name: Hashable) -> None:
        """The last copy is gone. What comes after the block keeps its place: the block may come back before it goes."""
        if name in held.unplaced:
            self._wait_no_more(held, name)
        place = held.places.pop(name, None)
        if place is None:
            return
        left = self._names.pop((row, place)) - 1
        if left:
            self._names[row, place] = left
        else:
            self.discard(row, place)

    def forget(self, row: int) -> None:
        """The engine dropped everything, or is gone."""
        held = self._rows_held.pop(row, None)
        for place in () if held is None else held.places.values():
            if self._names.pop((row, place), None) is not None:
                self.discard(row, place)
