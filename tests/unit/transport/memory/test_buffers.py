"""Staging buffers: one owner at a time, never given out while a device copies, and always back in the end."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tercet.protocol import TransferFailed
from tercet.transport import staged
from tercet.transport.staged import BufferLedger, BufferPool
from tests.longest_wait import LONGEST_WAIT_S


class Ledger(RuleBasedStateMachine):
    """Against a model: who owns which buffer, and which a device still copies."""

    @initialize(count=st.integers(1, 5))
    def begin(self, count: int) -> None:
        self.count = count
        self.ledger = BufferLedger(count)
        self.owned: set[int] = set()
        self.copying: set[int] = set()

    @rule()
    def take(self) -> None:
        found = self.ledger.take()
        if found is None:
            assert len(self.owned | self.copying) == self.count, "there was one"
        else:
            assert 0 <= found < self.count
            assert found not in self.owned | self.copying, "somebody uses it"
            self.owned.add(found)

    @precondition(lambda self: self.owned - self.copying)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.owned - self.copying)))
        self.ledger.copy_begins(number)
        self.copying.add(number)

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.copying)))
        self.ledger.copy_ended(number)
        self.copying.remove(number)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Also in the middle of a copy: the send was cancelled."""
        number = data.draw(st.sampled_from(sorted(self.owned)))
        self.ledger.give_back(number)
        self.owned.remove(number)

    @precondition(lambda self: len(self.owned) < self.count)
    @rule(data=st.data())
    def wrong_use_is_refused(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(range(self.count)) - self.owned)))
        with pytest.raises(RuntimeError):
            self.ledger.give_back(number)
        with pytest.raises(RuntimeError):
            self.ledger.copy_begins(number)

    @invariant()
    def every_buffer_is_somewhere(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.free == self.count - len(self.owned | self.copying)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=settings().max_examples * 3 // 5, stateful_step_count=40, deadline=None)


def pool(count: int = 2, nbytes: int = 64) -> BufferPool:
    return BufferPool([memoryview(bytearray(nbytes)) for _ in range(count)])


def test_buffers_are_apart() -> None:
    found = pool()
    first, second = found.take(), found.take()
    first.bytes[:] = b"\1" * 64
    assert bytes(second.bytes) == bytes(64)
    assert found.take_at_once() is None
    first.give_back()
    assert found.free == 1


def test_who_waits_gets_what_is_given_back() -> None:
    found = pool(1)
    held = found.take()
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(found.take().number))
    waiting.start()
    held.give_back()
    waiting.join(LONGEST_WAIT_S)
    assert got == [held.number]


def test_who_waits_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "WAIT_SECONDS", 0.01)
    found = pool(1)
    found.take()
    with pytest.raises(TransferFailed, match="no staging buffer"):
        found.take()


def test_a_buffer_that_was_given_up_during_its_copy_is_of_use_again_when_that_is_over() -> None:
    found, over = pool(1), False
    buffer = found.take()
    with pytest.raises(TransferFailed), buffer.copying(lambda: over):
        raise TransferFailed("the device is late")
    buffer.give_back()
    assert found.take_at_once() is None, "the device still writes there"
    over = True
    assert found.take_at_once() is not None
