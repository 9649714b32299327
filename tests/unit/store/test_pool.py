"""The pool of memory: every slot has one state, pins are kept, and the least recently used entry goes first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tercet.protocol import NoSpace
from tercet.store.pool import MemoryPool

SLOTS = 5
NAMES = st.integers(0, 9).map(lambda number: bytes([number]))


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model that is slow and plain: lists of what is taken, entered, pinned, and its order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[bytes] = []
        self.pool = MemoryPool(SLOTS, self.gone.append)
        self.taken: list[int] = []
        self.entries: dict[bytes, int] = {}
        self.pins: dict[bytes, int] = {}
        self.idle: list[bytes] = []  # the least recently used first

    @rule(count=st.integers(0, SLOTS + 1))
    def take(self, count: int) -> None:
        self.gone.clear()
        free = SLOTS - len(self.taken) - len(self.entries)
        if count > free + len(self.idle):
            with pytest.raises(NoSpace):
                self.pool.take(count)
            assert not self.gone
            return
        found = self.pool.take(count)
        expected = self.idle[: max(0, count - free)]
        assert self.gone == expected
        for name in expected:
            self.idle.remove(name)
            del self.entries[name]
        assert len({*found}) == count
        assert not {*found} & {*self.taken, *self.entries.values()}
        self.taken += found

    @rule(name=NAMES)
    def enter(self, name: bytes) -> None:
        if self.taken and name not in self.entries:
            slot = self.taken.pop()
            self.pool.enter(slot, name)
            self.entries[name], self.pins[name] = slot, 1

    @rule()
    def give_back(self) -> None:
        self.pool.give_back(self.taken)
        self.taken.clear()

    @rule(name=NAMES)
    def pin(self, name: bytes) -> None:
        if name in self.entries:
            self.pool.pin([self.entries[name]])
            self.pins[name] = self.pins.get(name, 0) + 1
            if name in self.idle:
                self.idle.remove(name)

    @rule()
    def unpin_all(self) -> None:
        names = [name for name, pins in self.pins.items() if pins]
        self.pool.unpin([self.entries[name] for name in names])
        for name in reversed(names):
            self.pins[name] -= 1
            if not self.pins[name]:
                del self.pins[name]
                self.idle.append(name)

    @rule(name=NAMES)
    def touch(self, name: bytes) -> None:
        self.pool.touch(name)
        if name in self.idle:
            self.idle.remove(name)
            self.idle.append(name)

    @invariant()
    def agrees(self) -> None:
        assert len(self.pool) == len(self.entries)
        assert self.pool.available == SLOTS - len(self.taken) - len(self.entries) + len(self.idle)
        for name, slot in self.entries.items():
            assert name in self.pool
            assert self.pool.slot(name) == slot


TestPool = PoolMachine.TestCase
