"""Which block of memory holds which contents: slots by name, the least recently used first, and pins. Without I/O.

A slot is free, taken by an owner that writes it, or an entry, whose contents do not change::

    free ── take ──▶ taken ── enter ──▶ entry, pinned ◀── pin / unpin ──▶ entry, idle ── evicted by take ──▶ taken
      ▲── give_back ──┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from tercet.protocol import NoSpace

Name = TypeVar("Name", bound=Hashable)


class MemoryPool(Generic[Name]):
    """``slots`` blocks of memory; ``on_evicted`` gets the name of each entry that makes room for another one."""

    def __init__(self, slots: int, on_evicted: Callable[[Name], object] = lambda _: None) -> None:
        self.slots = slots
        self._on_evicted = on_evicted
        self._free = list(reversed(range(slots)))
        self._slot_of: dict[Name, int] = {}
        self._entries: dict[int, Name] = {}
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        return name in self._slot_of

    def __iter__(self) -> Iterator[Name]:
        return iter(self._slot_of)

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def slot(self, name: Name) -> int | None:
        return self._slot_of.get(name)

    def take(self, count: int) -> list[int]:
        """Return ``count`` slots for the caller to write; entries without a pin are evicted if needed.

        Raises :class:`~tercet.protocol.NoSpace`, and then evicts nothing.
        """
        if count > self.available:
            raise NoSpace(
                f"{count} blocks are needed, and {self.available} of {self.slots} are available: others are pinned"
            )
        while len(self._free) < count:
            slot, _ = self._idle.popitem(last=False)
            name = self._entries.pop(slot)
            del self._slot_of[name]
            self._free.append(slot)
            self._on_evicted(name)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    def enter(self, slot: int, name: Name) -> None:
        """Make a taken slot the entry ``name``, which must not exist; it is pinned once."""
        self._slot_of[name] = slot
        self._entries[slot] = name
        self._pins[slot] = 1

    def touch(self, name: Name) -> None:
        """Note a use of an entry, if there is one of this name."""
        slot = self._slot_of.get(name)
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep entries until each is unpinned as often."""
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1
            self._idle.pop(slot, None)

    def unpin(self, slots: Sequence[int]) -> None:
        """Unpin the entries of a prompt, given in its order: it loses its end before its beginning."""
        for slot in reversed(slots):
            left = self._pins.pop(slot) - 1
            if left:
                self._pins[slot] = left
            else:
                self._idle[slot] = None
