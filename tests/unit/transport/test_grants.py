"""The grant table: whatever arrives in whatever order, only whole claims are valid, and an ended lease is over."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.protocol import BadRequest, Conflict, Content, LeaseEnded, TercetError, TransferFailed, content_of, packed
from tercet.transport import Grant
from tercet.transport.backends.reading import NOWHERE
from tercet.transport.grants import (
    MAX_PARTS,
    MAX_SENDS,
    REMEMBERED_ENDED,
    REPORT_SECONDS,
    GrantTable,
    ReceiveEnd,
    SendKey,
)
from tercet.transport.peer_messages import ReadDescriptors, SendBegin, SendEnd
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.models import LEASE, LeaseModel, a_grant, chunk, ending, whose

LAYERS, SIZE = 3, 16
SEND: SendKey = ("sender", 1)
TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BROKEN = TransferFailed("broken")


class BegunTable(GrantTable):
    """Where a send that has not begun begins by itself, with the lease's tokens, for the layers that it ``fills``."""

    def __init__(self, *groups: int) -> None:
        super().__init__(*groups, on_receive_end=lambda end: self.over.append(end))
        self.fills: dict[SendKey, range] = {}
        self.begun = 0
        self.over: list[ReceiveEnd] = []

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        self._begun(send, chunk.lease)
        return super().arrived(send, chunk)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        self._begun(send, end.lease)
        return super().ended(send, end)

    def _begun(self, send: SendKey, lease: str) -> None:
        opened = self._open.get(lease)
        if opened is not None and send not in opened.sends:
            some = self.fills.setdefault(send, range(opened.num_layers))
            self.begin(send, SendBegin(1, lease, whose(opened.grant.end), ((some.start, some.stop),), TRACED))
            self.begun += 1


def unreachable() -> None:
    raise AssertionError("a lease that is over is not written")


def opened(begin: int = 32, end: int = 100) -> BegunTable:
    table = BegunTable(LAYERS)
    table.grant(a_grant(LEASE, tuple(range(10, 10 - (begin - end) // SIZE)), begin, end, SIZE))
    return table


def fill(table: GrantTable, begin: int, end: int, send: SendKey = SEND, layers: int = LAYERS) -> list[int | None]:
    return [table.arrived(send, chunk(layer, begin, end)) for layer in range(layers)]


@pytest.fixture
def table() -> BegunTable:
    return opened()


# ---- granting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "begin", "end"), [((1, 2), 0, 16), ((1,), 0, 17), ((1,), 8, 16), ((), 0, 16)])
def test_a_grant_must_fit_its_blocks(blocks: tuple[int, ...], begin: int, end: int) -> None:
    with pytest.raises(BadRequest, match="blocks"):
        GrantTable(LAYERS).grant(a_grant(LEASE, blocks, begin, end, SIZE))


def test_an_ended_lease_says_so_and_is_not_granted_again(table: BegunTable) -> None:
    with pytest.raises(Conflict):
        table.grant(a_grant(LEASE, (1,), 0, 16, SIZE))
    table.revoke(LEASE)
    with pytest.raises(Conflict):
        table.grant(a_grant(LEASE, (1,), 0, 16, SIZE))
    assert table.revoke(LEASE) is None
    calls: list[Callable[[str], object]] = [
        lambda lease: table.locate(chunk(0, 0, 1, lease=lease)),
        lambda lease: table.locate_tokens(chunk(0, 0, 1, unit=32, lease=lease)),
        lambda lease: table.overwriting(chunk(0, 0, 1, lease=lease)),
        lambda lease: table.arrived(SEND, chunk(0, 0, 1, lease=lease)),
        lambda lease: table.ended(SEND, ending(32, 48, 1, lease=lease)),
        lambda lease: table.write(lease, unreachable),
    ]
    for call in calls:
        with pytest.raises(LeaseEnded, match="has ended"):
            call(LEASE)
        with pytest.raises(LeaseEnded, match="never granted"):
            call("cd" * 16)
    assert (len(table), table.receives) == (0, 0)


def test_ended_leases_are_remembered_up_to_a_limit() -> None:
    table = GrantTable(LAYERS)
    for number in range(REMEMBERED_ENDED + 1):
        table.grant(a_grant(f"{number:032x}", (1,), 0, 16, SIZE))
        table.revoke(f"{number:032x}")
    with pytest.raises(LeaseEnded, match="ended long ago"):
        table.locate(chunk(0, 0, 1, lease=f"{0:032x}"))
    with pytest.raises(LeaseEnded, match="has ended"):
        table.locate(chunk(0, 0, 1, lease=f"{1:032x}"))


# ---- chunks --------------------------------------------------------------------------------------------------


def test_a_piece_goes_to_the_blocks_of_its_slots() -> None:
    assert opened().locate(chunk(1, 1, 4)).tolist() == [11, 12, 13]


@pytest.mark.parametrize(
    "piece",
    [
        chunk(-1, 0, 1), chunk(LAYERS, 0, 1), chunk(0, -1, 1), chunk(0, 1, 1), chunk(0, 2, 1), chunk(0, 4, 6),
        chunk(0, 9, 10), chunk(0, 0, 2**32 - 1), chunk(0, 0, 1, 1, 1), chunk(0, 0, 1, 0, 0), chunk(0, 0, 1, -1, 2),
        chunk(0, 0, 1, 0, MAX_PARTS + 1), chunk(0, 2, 4, unit=32), chunk(0, 0, 2, unit=1000), chunk(0, 80, 81, unit=1),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_outside_the_lease_go_nowhere(table: BegunTable, piece: ReadDescriptors) -> None:
    for locate in (table.locate, table.locate_tokens):
        with pytest.raises(BadRequest, match="outside the lease"):
            locate(piece)


def test_slots_of_another_size_count_from_the_block_that_the_lease_begins_in(table: BegunTable) -> None:
    """The lease's tokens are [32, 112); blocks of 24 begin at 24, 48, 72 and 96."""
    found = table.locate_tokens(chunk(0, 0, 4, unit=24))
    assert [(move.slot, move.source, move.block, move.target, move.tokens) for move in found] == [
        (0, 8, 10, 0, 16), (1, 0, 11, 0, 16), (1, 16, 12, 0, 8),
        (2, 0, 12, 8, 8), (2, 8, 13, 0, 16), (3, 0, 14, 0, 16),
    ]  # fmt: skip


# ---- claims --------------------------------------------------------------------------------------------------


def test_a_claim_holds_with_the_last_piece_whichever_comes_last(table: BegunTable) -> None:
    assert fill(table, 0, 5) == [None] * LAYERS
    assert table.ended(SEND, ending(32, 100, LAYERS)) == 100
    table = opened()
    assert table.ended(SEND, ending(32, 100, LAYERS)) is None
    assert fill(table, 0, 5) == [None, None, 100]
    assert table.receives == 0


def test_a_claim_needs_every_layer_of_every_slot(table: BegunTable) -> None:
    fill(table, 0, 5, layers=LAYERS - 1)
    table.arrived(SEND, chunk(LAYERS - 1, 1, 5))
    with pytest.raises(TransferFailed, match="slot 0 lacks 1 of 3 layers"):
        table.ended(SEND, ending(32, 100, LAYERS))
    assert table.receives == 0
    assert table.revoke(LEASE) == 32


def test_a_piece_of_another_send_does_not_help(table: BegunTable) -> None:
    fill(table, 0, 1, ("sender", 2))
    with pytest.raises(TransferFailed):
        table.ended(SEND, ending(32, 48, 0))
    assert table.ended(("sender", 2), ending(32, 48, LAYERS)) == 48


def test_a_duplicate_stands_for_no_other_piece(table: BegunTable) -> None:
    table.ended(SEND, ending(32, 48, LAYERS))
    table.arrived(SEND, chunk(0, 0, 1))
    table.arrived(SEND, chunk(0, 0, 1))
    with pytest.raises(TransferFailed, match="lacks 1 of"):
        table.arrived(SEND, chunk(1, 0, 1))
    assert table.revoke(LEASE) == 32


def test_claims_join_in_any_order_and_the_first_gap_counts() -> None:
    table, ends = opened(), list[int | None]()
    for number, (begin, end) in enumerate([(64, 80), (80, 100), (48, 64), (32, 48)]):
        send = ("sender", number)
        fill(table, begin // SIZE - 2, -(-end // SIZE) - 2, send)
        ends.append(table.ended(send, ending(begin, end, LAYERS)))
    assert ends == [32, 32, 32, 100]


@pytest.mark.parametrize(("begin", "end", "last"), [(32, 100, 5), (40, 96, 4), (32, 48, 2), (72, 73, 4)])
def test_a_claim_of_blocks_of_another_size_needs_all_that_it_touches(begin: int, end: int, last: int) -> None:
    """The lease begins at 32; blocks of 24 begin at 24, 48, 72 and 96."""
    first = begin // 24 - 1
    for missing in (None, first, last - 2):
        table = opened()
        for layer, slot in ((layer, slot) for layer in range(LAYERS) for slot in range(first, last - 1)):
            if (layer, slot) != (LAYERS - 1, missing):
                table.arrived(SEND, chunk(layer, slot, slot + 1, unit=24))
        claim = ending(begin, end, 0, unit=24)
        if missing is None:
            assert table.ended(SEND, claim) == (end if first == 0 else 32)
        else:
            with pytest.raises(TransferFailed, match=f"slot {missing} lacks 1 of 3"):
                table.ended(SEND, claim)


@pytest.mark.parametrize(("begin", "end"), [(0, 100), (31, 100), (32, 101), (64, 64), (80, 64), (100, 100)])
def test_a_claim_outside_the_lease_is_refused(begin: int, end: int) -> None:
    with pytest.raises(BadRequest, match="outside the lease"):
        opened().ended(SEND, ending(begin, end, 0))


@pytest.mark.parametrize(("part", "parts"), [(1, 1), (0, 0), (2, 2), (0, MAX_PARTS + 1)])
def test_a_claim_of_no_part_leaves_nothing_behind(table: BegunTable, part: int, parts: int) -> None:
    with pytest.raises(BadRequest, match="the same part"):
        table.ended(SEND, ending(32, 48, 1, part, parts))
    assert table.receives == 0


def test_a_send_ends_once_for_one_part(table: BegunTable) -> None:
    table.ended(SEND, ending(32, 48, 9))
    with pytest.raises(BadRequest, match="must end only once"):
        table.ended(SEND, ending(32, 48, 9))
    for other in (chunk(0, 0, 1, 0, 2), chunk(0, 0, 1, unit=32)):
        with pytest.raises(BadRequest, match="the same part"):
            table.arrived(SEND, other)


def test_all_parts_of_one_cut_make_kv_valid() -> None:
    table, ends = opened(), list[int | None]()
    for number, (part, parts) in enumerate([(0, 2), (1, 4), (1, 2)]):
        send = ("sender", number)
        for layer in range(LAYERS):
            table.arrived(send, chunk(layer, 0, 5, part, parts))
        ends.append(table.ended(send, ending(32, 100, LAYERS, part, parts)))
    assert ends == [32, 32, 100]


def test_what_is_being_overwritten_is_not_valid_until_its_own_send_is_in_place() -> None:
    """Only what may be prefix cache stays: whole blocks from the beginning on."""
    table, again = opened(), ("sender", 2)
    fill(table, 1, 5)
    assert table.ended(SEND, ending(48, 100, LAYERS)) == 32
    table.overwriting(chunk(0, 2, 3))
    fill(table, 0, 1, again)
    assert table.ended(again, ending(32, 48, LAYERS)) == 64
    fill(table, 2, 3, again)
    assert table.ended(again, ending(64, 80, LAYERS)) == 100
    table.overwriting(chunk(1, 4, 5), in_place=4)
    assert table.revoke(LEASE) == 96


def test_what_may_be_prefix_cache_is_not_written_again() -> None:
    table, again = opened(), ("sender", 2)
    fill(table, 0, 3)
    assert table.ended(SEND, ending(32, 80, LAYERS)) == 80
    table.begin(again, SendBegin(2, LEASE, whose(100)))
    in_place = table.in_place(again, LEASE)
    assert in_place == 3
    assert table.locate(chunk(1, 1, 5), in_place).tolist() == [NOWHERE, NOWHERE, 13, 14]
    moves = table.locate_tokens(chunk(0, 0, 4, unit=24), in_place)
    assert [(move.slot, move.block, move.tokens) for move in moves] == [(2, 13, 16), (3, 14, 16)]
    table.overwriting(chunk(1, 1, 5), in_place)
    table.overwriting(chunk(1, 0, 3), in_place)
    with pytest.raises(TransferFailed, match="up to token 80 has arrived from another sender"):
        table.overwriting(chunk(1, 2, 5), in_place=2)
    assert table.revoke(LEASE) == 80


def test_what_is_being_overwritten_counts_by_the_senders_slots_and_its_part(table: BegunTable) -> None:
    for part in range(2):
        for layer in range(LAYERS):
            table.arrived(("sender", part), chunk(layer, 0, 5, part=part, parts=2))
        table.ended(("sender", part), ending(32, 100, LAYERS, part=part, parts=2))
    table.overwriting(chunk(0, 1, 2, unit=64, part=3, parts=4), in_place=4)
    assert table.revoke(LEASE) == 96


def test_sends_under_a_lease_are_limited(table: BegunTable) -> None:
    for number in range(MAX_SENDS):
        table.arrived(("sender", number), chunk(0, 0, 1))
    with pytest.raises(BadRequest, match="64 sends"):
        table.arrived(("sender", MAX_SENDS), chunk(0, 0, 1))
    table.forget(LEASE, ("sender", 0), BROKEN)
    table.arrived(("sender", MAX_SENDS), chunk(0, 0, 1))
    assert table.receives == MAX_SENDS


def test_what_is_there_in_every_layer_is_kept_of_a_send_that_is_lost(table: BegunTable) -> None:
    fill(table, 0, 2, ("lost", 1))
    fill(table, 2, 5, ("lost", 2), layers=LAYERS - 1)
    fill(table, 2, 3, ("other", 1))
    assert table.forget_sender("lost") == [(LEASE, 64), (LEASE, 64)]
    assert table.receives == 1
    with pytest.raises(TransferFailed):
        table.ended(("lost", 2), ending(64, 100, 0))
    table.forget(LEASE, ("other", 1), BROKEN)
    table.forget("cd" * 16, ("nobody", 1), BROKEN)
    assert table.revoke(LEASE) == 80


def complete(table: GrantTable) -> None:
    table.ended(SEND, ending(32, 100, LAYERS))


def lacking_a_layer(table: GrantTable) -> None:
    again = chunk(0, 0, 5)
    table.begin(("again", 1), SendBegin(2, LEASE, whose(100), traceparent=TRACED))
    table.arrived(("again", 1), again)
    with pytest.raises(TransferFailed):
        table.ended(("again", 1), ending(32, 100, 1))


@pytest.mark.parametrize(
    ("over", "code", "layers"),
    [
        (complete, "", LAYERS),
        (lacking_a_layer, "transfer_failed", 1),
        (lambda table: table.forget(LEASE, SEND, BROKEN), "transfer_failed", LAYERS),
        (lambda table: table.forget_sender("sender"), "transfer_failed", LAYERS),
        (lambda table: table.revoke(LEASE), "lease_ended", LAYERS),
    ],
    ids=["complete", "lacking", "refused", "lost", "revoked"],
)
def test_a_traced_receive_tells_how_it_ended(
    table: BegunTable, over: Callable[[GrantTable], object], code: str, layers: int
) -> None:
    size = sum(chunk(layer, 0, 5).nbytes for layer in range(layers))
    fill(table, 0, 5)
    over(table)
    (end,) = table.over
    assert (end.lease, end.traceparent, end.code, end.bytes) == (LEASE, TRACED, code, size)
    assert 0 < end.began_ns <= end.ended_ns


def test_a_receive_without_a_trace_is_not_told_of(table: BegunTable) -> None:
    table.begin(SEND, SendBegin(1, LEASE, whose(100)))
    fill(table, 0, 5)
    complete(table)
    assert not table.over


def test_no_more_is_kept_than_the_send_was_for(table: BegunTable) -> None:
    table.begin(SEND, SendBegin(1, LEASE, whose(90)))
    fill(table, 0, 5)
    assert table.forget_sender("sender") == [(LEASE, 90)]
    assert table.forget_sender("sender") == []


def test_how_far_it_is_is_told_now_and_then(table: BegunTable) -> None:
    now = time.monotonic()
    assert table.progress(LEASE, now) is None, "it was granted just now"
    fill(table, 0, 2)
    assert table.progress(LEASE, now + REPORT_SECONDS + 1) == 64
    assert table.progress(LEASE, now + REPORT_SECONDS + 1) is None
    assert table.progress("cd" * 16, now + 60) is None


# ---- whose KV it is ------------------------------------------------------------------------------------------


def test_kv_of_other_tokens_is_refused_before_anything_is_located(table: BegunTable) -> None:
    others = packed([*range(60), 1, *range(61, 100)])
    for wrong in (content_of(others, None), content_of(packed(range(100)), "salt"), Content(99, whose(100).digest)):
        with pytest.raises(Conflict, match="of other tokens"):
            table.begin(SEND, SendBegin(1, LEASE, wrong))
        with pytest.raises(BadRequest, match="must begin with the content"):
            table.in_place(SEND, LEASE)
    table.begin(SEND, SendBegin(1, LEASE, content_of(others, None, 60)))
    assert table.in_place(SEND, LEASE) == 0
    with pytest.raises(BadRequest, match="first 60 tokens cannot end at token 61"):
        table.ended(SEND, ending(32, 61, 0))


@pytest.mark.parametrize("end", [0, 32, 101])
def test_a_send_begins_inside_its_lease_and_once(table: BegunTable, end: int) -> None:
    with pytest.raises(BadRequest, match="outside the lease"):
        table.begin(SEND, SendBegin(1, LEASE, whose(end)))
    table.begin(SEND, SendBegin(1, LEASE, whose(100)))
    with pytest.raises(BadRequest, match="must begin only once"):
        table.begin(SEND, SendBegin(1, LEASE, whose(100)))


# ---- extending -----------------------------------------------------------------------------------------------


def test_an_extended_lease_keeps_what_it_has_and_takes_more() -> None:
    table = opened(32, 56)
    fill(table, 0, 2)
    assert table.ended(SEND, ending(32, 56, LAYERS)) == 56
    table.arrived(("early", 1), chunk(0, 1, 2))
    table.extend(a_grant(LEASE, (10, 11, 12, 13), 32, 90, SIZE))
    again = ("sender", 2)
    table.begin(again, SendBegin(2, LEASE, whose(90)))
    assert table.in_place(again, LEASE) == 1
    table.overwriting(chunk(0, 1, 4), 1)
    fill(table, 1, 4, again)
    assert table.ended(again, ending(48, 90, LAYERS)) == 90
    fill(table, 1, 2, ("early", 1))
    assert table.ended(("early", 1), ending(48, 56, LAYERS)) == 90
    assert table.revoke(LEASE) == 90


@pytest.mark.parametrize(
    "wrong",
    [
        a_grant(LEASE, (10, 12, 13), 32, 80, SIZE), a_grant(LEASE, (10,), 32, 48, SIZE),
        a_grant(LEASE, (9, 10, 11), 16, 56, SIZE),
        msgspec.structs.replace(a_grant(LEASE, (10, 11), 32, 56, SIZE), salt="salt"),
        msgspec.structs.replace(a_grant(LEASE, (10, 11), 32, 56, SIZE), tokens=packed(range(1, 57))),
    ],
)  # fmt: skip
def test_a_lease_is_extended_to_more_of_the_same_only(wrong: Grant) -> None:
    table = opened(32, 56)
    with pytest.raises(BadRequest):
        table.extend(wrong)
    fill(table, 0, 2)
    assert table.ended(SEND, ending(32, 56, LAYERS)) == 56
    table.revoke(LEASE)
    with pytest.raises(LeaseEnded):
        table.extend(a_grant(LEASE, (10, 11), 32, 56, SIZE))


@given(st.lists(st.integers(1, 120), min_size=1, max_size=5), st.integers(0, 5))
def test_extended_step_by_step_a_lease_is_as_one_that_was_granted_at_once(ends: list[int], seed: int) -> None:
    steps = sorted({32 + end for end in ends})
    blocks = tuple(range(20))
    extended, at_once = BegunTable(LAYERS), BegunTable(LAYERS)
    for end in steps:
        more = a_grant(LEASE, blocks[: -(-(end - 32) // SIZE)], 32, end, SIZE)
        (extended.grant if end == steps[0] else extended.extend)(more)
    grant = a_grant(LEASE, blocks[: -(-(steps[-1] - 32) // SIZE)], 32, steps[-1], SIZE)
    at_once.grant(grant)
    choose = random.Random(seed)
    for table in (extended, at_once):
        choose.seed(seed)
        for number in range(6):
            first = choose.randrange(len(grant.blocks[0]))
            fill(
                table,
                first,
                choose.randrange(first, len(grant.blocks[0])) + 1,
                ("s", number),
                choose.randint(2, LAYERS),
            )
    assert extended.locate(chunk(0, 0, len(grant.blocks[0]))).tolist() == list(grant.blocks[0])
    assert extended.forget_sender("s") == at_once.forget_sender("s")
    assert extended.revoke(LEASE) == at_once.revoke(LEASE)


# ---- revoking ------------------------------------------------------------------------------------------------


def test_a_revocation_waits_for_all_who_write() -> None:
    table, order = opened(), list[str]()
    inside, may_end = threading.Barrier(3), [threading.Event(), threading.Event()]

    def write(number: int) -> None:
        def step() -> None:
            inside.wait(LONGEST_WAIT_S)
            may_end[number].wait(LONGEST_WAIT_S)
            order.append("written")

        table.write(LEASE, step)

    def revoke() -> None:
        table.revoke(LEASE)
        order.append("revoked")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in writers:
        thread.start()
    inside.wait(LONGEST_WAIT_S)
    revoker = threading.Thread(target=revoke)
    revoker.start()
    while len(table):  # until it waits
        revoker.join(0.001)
    with pytest.raises(LeaseEnded):
        table.write(LEASE, unreachable)
    for number, thread in enumerate(writers):
        assert order == ["written"] * number
        may_end[number].set()
        thread.join(LONGEST_WAIT_S)
    revoker.join(LONGEST_WAIT_S)
    assert order == ["written", "written", "revoked"]


def test_a_writer_that_fails_holds_nothing_back() -> None:
    def fail() -> None:
        raise OSError("broke")

    table = opened()
    with pytest.raises(OSError, match="broke"):
        table.write(LEASE, fail)
    assert table.revoke(LEASE) == 32


@pytest.fixture
def busy_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("busy_switching")
def test_nothing_is_written_once_revoke_has_returned() -> None:
    """Writers that never stop, a lease after the other: a block that changed hands is not written by the former."""
    table, block = GrantTable(1), bytearray(1)
    stop, refusals = threading.Event(), list[int]()

    def write(mark: int) -> None:
        refused = 0
        while not stop.is_set():
            try:
                table.write(f"{mark:032x}", partial(block.__setitem__, 0, mark))
            except LeaseEnded:
                refused += 1
        refusals.append(refused)

    writers = [threading.Thread(target=write, args=(mark,)) for mark in (1, 2, 3)]
    for mark in (1, 2, 3):
        table.grant(a_grant(f"{mark:032x}", (0,), 0, SIZE, SIZE))
    for thread in writers:
        thread.start()
    try:
        for mark in (1, 2, 3):
            table.revoke(f"{mark:032x}")
            block[0] = 0
            for _ in range(2000):
                assert block[0] not in range(1, mark + 1)
    finally:
        stop.set()
        for thread in writers:
            thread.join(LONGEST_WAIT_S)
    assert len(refusals) == 3
    assert block[0] == 0


# ---- anything, in any order ----------------------------------------------------------------------------------

UNITS = st.sampled_from([0, 8, 24, 48])
SENDERS = st.sampled_from(["a", "b"])


class AnythingIsSaid(RuleBasedStateMachine):
    """Sends whose frames come mixed, twice or never, and wild ones, while leases come and go; beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BegunTable(LAYERS)
        self.models: dict[str, LeaseModel] = {}
        self.ended: list[str] = []
        self.under_way: list[tuple[str, SendKey, list[ReadDescriptors | SendEnd]]] = []
        self.numbers = 0

    @rule(count=st.integers(1, 4), first=st.integers(0, 3), short=st.integers(0, SIZE - 1))
    def grant(self, count: int, first: int, short: int) -> None:
        self.numbers += 1
        begin = first * SIZE
        grant = a_grant(f"{self.numbers:032x}", tuple(range(count)), begin, begin + count * SIZE - short, SIZE)
        self.table.grant(grant)
        self.models[grant.lease] = LeaseModel(grant, LAYERS, self.table.fills)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), sender=SENDERS, unit=UNITS, parts=st.integers(1, 2), lost=st.integers(0, 6))
    def begin_send(self, data: st.DataObject, sender: str, unit: int, parts: int, lost: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[lease]
        begin = data.draw(st.integers(model.grant.begin, model.grant.end - 1))
        end = data.draw(st.integers(begin + 1, model.grant.end))
        held = [n for n, slot in enumerate(model.slots(unit)) if slot.stop > begin and slot.start < end]
        part = data.draw(st.integers(0, parts - 1))
        cut = data.draw(st.integers(held[0], held[-1]))
        ranges = [each for each in ((held[0], cut), (cut, held[-1] + 1)) if each[0] < each[1]]
        first = data.draw(st.integers(0, LAYERS - 1))
        layers = data.draw(st.sampled_from([range(LAYERS), range(first + 1), range(first, LAYERS)]))
        pieces = [chunk(layer, *each, part, parts, unit) for layer in layers for each in ranges]
        claim = ending(begin, end, len(pieces), part, parts, unit)
        frames: list[ReadDescriptors | SendEnd] = data.draw(st.permutations([*pieces, claim]))
        if lost == 1:
            frames.pop()
        if lost == 2:
            frames.append(frames[0])
        if lost == 3:
            frames[frames.index(pieces[-1])] = pieces[0]
        self.numbers += 1
        # A wild frame that was refused may have begun a send of this number, for all layers.
        self.table.fills.setdefault((sender, self.numbers), layers)
        self.under_way.append((lease, (sender, self.numbers), frames))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), count=st.integers(1, 20))
    def deliver(self, data: st.DataObject, count: int) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        lease, key, frames = self.under_way[at]
        for said in frames[:count]:
            self.say(lease, key, said)
        del frames[:count]
        if not frames:
            del self.under_way[at]

    @precondition(lambda self: self.models or self.ended)
    @rule(data=st.data(), sender=SENDERS, number=st.integers(0, 12), numbers=st.tuples(*[st.integers(-1, 6)] * 5))
    def say_anything(
        self, data: st.DataObject, sender: str, number: int, numbers: tuple[int, int, int, int, int]
    ) -> None:
        lease = data.draw(st.sampled_from([*sorted(self.models), *self.ended, "never"]))
        if data.draw(st.booleans()):
            layer, begin, end, part, parts = numbers
            said: ReadDescriptors | SendEnd = chunk(layer, begin, end, part, parts, data.draw(UNITS))
        else:
            begin, end, frames, part, parts = numbers
            said = ending(begin * 10, end * 10, frames, part, parts, data.draw(UNITS))
        self.say(lease, (sender, number), said)

    def say(self, lease: str, key: SendKey, said: ReadDescriptors | SendEnd) -> None:
        said = msgspec.structs.replace(said, lease=lease)
        real = outcome(lambda: self.say_to_table(lease, key, said))
        model = outcome(lambda: self.say_to_model(lease, key, said))
        assert real == model

    def say_to_table(self, lease: str, key: SendKey, said: ReadDescriptors | SendEnd) -> int | None:
        if isinstance(said, SendEnd):
            return self.table.ended(key, said)
        blocks = {move.block for move in self.table.locate_tokens(said)} if said.unit else set[int]()
        blocks |= set() if said.unit else set(self.table.locate(said).tolist())
        assert blocks <= set(self.models[lease].grant.blocks[0])
        return self.table.arrived(key, said)

    def say_to_model(self, lease: str, key: SendKey, said: ReadDescriptors | SendEnd) -> int | None:
        model = self.models.get(lease)
        if model is None:
            raise LeaseEnded("ended")
        if isinstance(said, SendEnd):
            return model.claim(key, said)
        model.require_inside(said)
        return model.arrive(key, said)

    @rule(sender=SENDERS)
    def lose_sender(self, sender: str) -> None:
        lost = [(model, key) for model in self.models.values() for key in model.sends if key[0] == sender]
        found = self.table.forget_sender(sender)
        for model, key in lost:
            model.lose(key)
        assert found == [(model.grant.lease, model.valid_end()) for model, _ in lost]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        lease, key, _ = data.draw(st.sampled_from(self.under_way))
        self.table.forget(lease, key, BROKEN)
        if lease in self.models and key in self.models[lease].sends:
            self.models[lease].lose(key)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models.pop(lease)
        for key in list(model.sends):
            model.lose(key)
        assert self.table.revoke(lease) == model.valid_end()
        self.ended.append(lease)

    @invariant()
    def as_many_receives_and_leases(self) -> None:
        assert self.table.receives == sum(len(model.sends) for model in self.models.values())
        assert len(self.table) == len(self.models)

    @invariant()
    def each_traced_receive_is_told_of_once(self) -> None:
        under_way = sum(len(opened.sends) for opened in self.table._open.values())
        assert len(self.table.over) + under_way == self.table.begun


def outcome(call: Callable[[], int | None]) -> int | type[TercetError] | None:
    try:
        return call()
    except TercetError as error:
        return type(error)


TestAnythingIsSaid = AnythingIsSaid.TestCase
TestAnythingIsSaid.settings = settings(max_examples=settings().max_examples * 6 // 5, stateful_step_count=40)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=12))
def test_the_valid_end_is_where_the_first_gap_is(claims: list[tuple[int, int]]) -> None:
    table = opened(0, 160)
    covered: set[int] = set()
    for number, (first, length) in enumerate(claims):
        last = min(first + length, 10)
        covered |= set(range(first, last))
        fill(table, first, last, ("sender", number))
        end = table.ended(("sender", number), ending(first * SIZE, last * SIZE, LAYERS))
        assert end == next(slot for slot in range(11) if slot not in covered) * SIZE


# ---- sends that fill some layers -----------------------------------------------------------------------------------


def test_what_some_layers_have_is_valid_once_the_others_have_it_too(table: BegunTable) -> None:
    table.fills = {("first", 1): range(1), ("second", 1): range(1, LAYERS)}
    assert table.arrived(("first", 1), chunk(0, 0, 5)) is None
    assert table.ended(("first", 1), ending(32, 100, 1)) == 32
    for layer in range(1, LAYERS):
        table.arrived(("second", 1), chunk(layer, 0, 3))
    assert table.forget_sender("second") == [(LEASE, 80)]
    assert table.revoke(LEASE) == 80


def test_a_send_fills_no_other_layers_than_it_said(table: BegunTable) -> None:
    table.fills = {SEND: range(1, 2)}
    with pytest.raises(BadRequest, match="planes of its begin message"):
        table.arrived(SEND, chunk(0, 0, 5))
    with pytest.raises(BadRequest, match="planes of its begin message"):
        table.arrived(SEND, chunk(1, 0, 5, layers=2))


@pytest.mark.parametrize("planes", [(0, 0), (2, 1), (0, LAYERS + 1), (LAYERS, LAYERS + 1)], ids=str)
def test_a_send_of_layers_that_there_are_not_is_refused(planes: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match="fills planes"):
        opened().begin(SEND, SendBegin(1, LEASE, whose(100), (planes,)))


def test_what_is_overwritten_in_one_layer_is_not_valid(table: BegunTable) -> None:
    fill(table, 0, 5)
    assert table.ended(SEND, ending(32, 100, LAYERS)) == 100
    table._open[LEASE].valid.remove(0, 1, range(1, 2), (64, 80))
    assert table.revoke(LEASE) == 64


# ---- layers that do not look back at all tokens --------------------------------------------------------------------


def windowed() -> BegunTable:
    """Two layers that want four slots, and one that wants the last two of them."""
    table = BegunTable(2, 1)
    blocks = ((10, 11, 12, 13), (NOWHERE, NOWHERE, 20, 21))
    table.grant(Grant(LEASE, blocks, 0, 4 * SIZE, SIZE, packed(range(4 * SIZE)), None))
    return table


def test_each_layer_has_the_blocks_of_its_group() -> None:
    table = windowed()
    assert table.locate(chunk(0, 1, 4, layers=2)).tolist() == [11, 12, 13]
    assert table.locate(chunk(2, 2, 4)).tolist() == [20, 21]


@pytest.mark.parametrize("piece", [chunk(2, 1, 3), chunk(2, 0, 1), chunk(1, 2, 4, layers=2)], ids=str)
def test_nothing_goes_where_a_group_has_no_blocks(piece: ReadDescriptors) -> None:
    table = windowed()
    with pytest.raises(BadRequest, match="no blocks"):
        table.locate(piece)


def test_what_no_layer_looks_back_at_is_not_missed() -> None:
    table = windowed()
    assert table.arrived(SEND, chunk(0, 0, 4, layers=2)) is None
    assert table.arrived(SEND, chunk(2, 2, 4)) is None
    assert table.ended(SEND, ending(0, 4 * SIZE, 2)) == 4 * SIZE
    assert table.revoke(LEASE) == 4 * SIZE


def test_what_a_window_wants_is_missed() -> None:
    table = windowed()
    table.arrived(SEND, chunk(0, 0, 4, layers=2))
    table.arrived(SEND, chunk(2, 3, 4))
    with pytest.raises(TransferFailed, match="slot 2 lacks 1 of 3 layers"):
        table.ended(SEND, ending(0, 4 * SIZE, 2))


def test_of_half_a_send_that_is_valid_which_came_in_every_layer_that_wants_it() -> None:
    table = windowed()
    table.arrived(SEND, chunk(0, 0, 4, layers=2))
    assert table.revoke(LEASE) == 2 * SIZE


def test_a_lease_with_windows_is_extended() -> None:
    table = windowed()
    table.arrived(SEND, chunk(0, 0, 4, layers=2))
    table.arrived(SEND, chunk(2, 2, 4))
    blocks = ((10, 11, 12, 13, 14), (NOWHERE, NOWHERE, 20, 21, 22))
    more = Grant(LEASE, blocks, 0, 5 * SIZE, SIZE, packed(range(5 * SIZE)), None)
    table.extend(more)
    later = ("sender", 2)
    table.arrived(later, chunk(0, 4, 5, layers=2))
    table.arrived(later, chunk(2, 4, 5))
    assert table.revoke(LEASE) == 5 * SIZE


@pytest.mark.parametrize("blocks", [((1, 2),), ((1, 2), (1,)), ((1, 2), (1, 2), (1, 2))], ids=str)
def test_a_grant_has_blocks_for_each_group(blocks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(BadRequest, match="blocks"):
        GrantTable(2, 1).grant(Grant(LEASE, blocks, 0, 2 * SIZE, SIZE, packed(range(2 * SIZE)), None))
