"""The grant table: whatever arrives in whatever order, nothing is written outside an open lease's slots."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.protocol import BadRequest, Conflict, LeaseEnded, TercetError, TransferFailed, UnknownSequence
from tercet.transport import Grant, GrantTable

LAYERS, SIZE = 3, 16
LEASE = "ab" * 16


def opened(begin: int = 32, end: int = 100, blocks: tuple[int, ...] | None = None) -> GrantTable:
    table = GrantTable(LAYERS)
    count = -(-(end - begin) // SIZE)
    table.grant(Grant(LEASE, blocks or tuple(range(10, 10 + count)), begin, end, SIZE))
    return table


def fill(table: GrantTable, slots: range, layers: range = range(LAYERS)) -> None:
    for layer in layers:
        table.write(LEASE, layer, slots.start, slots.stop, lambda _: None)


def test_runs_are_physical_blocks_in_slot_order() -> None:
    table, seen = opened(0, 80, (7, 8, 3, 4, 9)), []
    table.write(LEASE, 0, 0, 5, seen.extend)
    table.write(LEASE, 0, 1, 3, seen.extend)
    assert seen == [(7, 2), (3, 2), (9, 1), (8, 1), (3, 1)]


@pytest.mark.parametrize(
    ("layer", "begin", "end"), [(-1, 0, 1), (LAYERS, 0, 1), (0, -1, 1), (0, 1, 1), (0, 2, 1), (0, 4, 6), (0, 9, 10)]
)
def test_outside_the_lease_nothing_is_copied(layer: int, begin: int, end: int) -> None:
    with pytest.raises(BadRequest):
        opened().write(LEASE, layer, begin, end, lambda _: pytest.fail("copied"))


def test_a_claim_needs_every_layer_of_every_slot() -> None:
    table = opened()
    fill(table, range(0, 5), range(LAYERS - 1))
    with pytest.raises(TransferFailed, match="slot 0 lacks 1 of 3 layers"):
        table.finish(LEASE, 32, 100)
    fill(table, range(0, 4), range(LAYERS - 1, LAYERS))
    assert table.finish(LEASE, 32, 96) == 96
    with pytest.raises(TransferFailed, match="slot 4"):
        table.finish(LEASE, 96, 100)
    assert table.revoke(LEASE) == 96


def test_intervals_join_in_any_order() -> None:
    table = opened()
    fill(table, range(0, 5))
    assert table.finish(LEASE, 64, 80) == 32
    assert table.finish(LEASE, 85, 100) == 32
    assert table.finish(LEASE, 32, 64) == 100


@pytest.mark.parametrize(("begin", "end"), [(0, 100), (31, 100), (32, 101), (64, 64), (80, 64), (100, 100)])
def test_a_claim_outside_the_lease_is_refused(begin: int, end: int) -> None:
    table = opened()
    fill(table, range(0, 5))
    with pytest.raises(BadRequest):
        table.finish(LEASE, begin, end)


def test_an_ended_lease_says_so_and_is_not_granted_again() -> None:
    table = opened()
    table.revoke(LEASE)
    with pytest.raises(LeaseEnded, match="has ended"):
        table.write(LEASE, 0, 0, 1, lambda _: pytest.fail("copied"))
    with pytest.raises(LeaseEnded):
        table.finish(LEASE, 32, 48)
    with pytest.raises(UnknownSequence):
        table.revoke(LEASE)
    with pytest.raises(Conflict):
        table.grant(Grant(LEASE, (1,), 0, 16, SIZE))
    with pytest.raises(LeaseEnded, match="never granted"):
        table.finish("cd" * 16, 0, 16)


@pytest.mark.parametrize(("blocks", "begin", "end"), [((1, 2), 0, 16), ((1,), 0, 17), ((1,), 8, 16), ((), 0, 16)])
def test_a_grant_must_fit_its_blocks(blocks: tuple[int, ...], begin: int, end: int) -> None:
    with pytest.raises(BadRequest):
        GrantTable(LAYERS).grant(Grant(LEASE, blocks, begin, end, SIZE))


def test_after_revoke_returned_no_copy_runs() -> None:
    """A copy that is under way holds revoke back; one that comes later is refused."""
    table, copying, may_end = opened(), threading.Event(), threading.Event()
    order: list[str] = []

    def slow(_: object) -> None:
        copying.set()
        may_end.wait(30)
        order.append("copied")

    writer = threading.Thread(target=lambda: table.write(LEASE, 0, 0, 1, slow))
    writer.start()
    assert copying.wait(30)
    revoker = threading.Thread(target=lambda: (table.revoke(LEASE), order.append("revoked")))
    revoker.start()
    may_end.set()
    writer.join(30)
    revoker.join(30)
    assert order == ["copied", "revoked"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=12))
def test_the_valid_end_is_where_the_first_gap_is(claims: list[tuple[int, int]]) -> None:
    table = opened(0, 160)
    fill(table, range(0, 10))
    covered: set[int] = set()
    for first, length in claims:
        last = min(first + length, 10)
        covered |= set(range(first, last))
        end = table.finish(LEASE, first * SIZE, last * SIZE)
        assert end == next(i for i in range(11) if i not in covered) * SIZE


class Hostile(RuleBasedStateMachine):
    """Peers that say anything about any lease, while leases come and go and blocks change hands."""

    def __init__(self) -> None:
        super().__init__()
        self.table = GrantTable(LAYERS)
        self.leases: dict[str, tuple[int, ...]] = {}
        self.made = 0
        self.owner: dict[int, str] = {}

    @rule(count=st.integers(1, 5))
    def grant(self, count: int) -> None:
        free = [block for block in range(20) if block not in self.owner][:count]
        if not free:
            return
        self.made += 1
        lease = f"{self.made:032x}"
        self.table.grant(Grant(lease, tuple(free), 0, len(free) * SIZE, SIZE))
        self.leases[lease] = tuple(free)
        self.owner.update(dict.fromkeys(free, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.table.revoke(lease)
        for block in self.leases.pop(lease):
            del self.owner[block]

    @rule(which=st.integers(0, 12), layer=st.integers(-1, 4), begin=st.integers(-2, 7), end=st.integers(-2, 9))
    def write(self, which: int, layer: int, begin: int, end: int) -> None:
        lease = f"{which:032x}"
        touched: list[tuple[int, int]] = []
        try:
            self.table.write(lease, layer, begin, end, touched.extend)
        except TercetError:
            assert not touched
            return
        blocks = [block for first, count in touched for block in range(first, first + count)]
        assert tuple(blocks) == self.leases[lease][begin:end]
        assert all(self.owner[block] == lease for block in blocks)

    @rule(which=st.integers(0, 12), begin=st.integers(-20, 100), end=st.integers(-20, 100))
    def finish(self, which: int, begin: int, end: int) -> None:
        lease = f"{which:032x}"
        try:
            valid_end = self.table.finish(lease, begin, end)
        except TercetError:
            return
        assert valid_end <= len(self.leases[lease]) * SIZE

    @invariant()
    def open_leases_are_counted(self) -> None:
        assert len(self.table) == len(self.leases)


TestHostile = Hostile.TestCase
