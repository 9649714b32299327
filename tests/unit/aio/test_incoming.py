"""What connections may send, decided without one: sizes of heads, times of heads and bodies, and silence."""

from __future__ import annotations

import asyncio

import pytest

from tercet.aio.incoming import LEAST_OF_BODY, LONGEST_HEAD, Breach, Deadlines, Incoming, Part
from tests.longest_wait import LONGEST_WAIT_S


class Played:
    """A connection; ``breaches`` are what it was refused for."""

    def __init__(self) -> None:
        self.held = False
        self.breaches: list[Breach] = []

    def refuse(self, breach: Breach) -> None:
        self.breaches.append(breach)

    def is_held(self) -> bool:
        return self.held


@pytest.fixture
async def deadlines() -> Deadlines:
    return Deadlines(3600.0)


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
async def incoming(played: Played, deadlines: Deadlines) -> Incoming:
    return Incoming(played, deadlines)


async def test_whoever_says_nothing_is_refused(incoming: Incoming, played: Played, deadlines: Deadlines) -> None:
    assert len(deadlines) == 1
    incoming.expired()
    assert played.breaches == [Breach.SILENT]
    assert not len(deadlines)


@pytest.mark.parametrize("pieces", [1, 7, 4096])
async def test_a_head_is_refused_by_the_byte_that_is_too_much(pieces: int, incoming: Incoming, played: Played) -> None:
    whole, rest = divmod(LONGEST_HEAD, pieces)
    for size in [whole] * pieces + [rest] * (rest > 0):
        incoming.fed(size, "head", False)
    assert not played.breaches
    incoming.fed(1, "head", False)
    assert played.breaches == [Breach.LONG_HEAD]


async def test_what_is_between_pieces_of_a_body_is_bounded_too(incoming: Incoming, played: Played) -> None:
    incoming.fed(100, "body", True)
    for _ in range(100):
        incoming.fed(LONGEST_HEAD, "body", False)  # chunk extensions
        if played.breaches:
            break
        incoming.fed(LONGEST_HEAD, "body", True)
    assert not played.breaches
    incoming.fed(LONGEST_HEAD + 1, "body", False)
    assert played.breaches == [Breach.LONG_HEAD]


async def test_dripping_a_head_does_not_move_its_deadline(
    incoming: Incoming, played: Played, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Incoming] = []
    incoming.fed(1, "head", False)
    monkeypatch.setattr(deadlines, "set", moved.append)
    for _ in range(50):
        incoming.fed(1, "head", False)
    assert not moved
    incoming.expired()
    assert played.breaches == [Breach.SLOW_HEAD]


@pytest.mark.parametrize(("came", "refused"), [(LEAST_OF_BODY - 1, True), (LEAST_OF_BODY, False)])
async def test_bodies_come_at_a_pace(came: int, refused: bool, incoming: Incoming, played: Played) -> None:
    incoming.fed(100, "body", True)
    for _ in range(3):
        incoming.fed(came, "body", True)
        incoming.expired()
    assert bool(played.breaches) is refused
    if not refused:
        incoming.expired()
    assert played.breaches == [Breach.SLOW_BODY] * len(played.breaches) != []


@pytest.mark.parametrize("part", ["head", "body"])
async def test_time_counts_against_nobody_while_the_server_does_not_read(
    part: Part, incoming: Incoming, played: Played
) -> None:
    incoming.fed(100, part, part == "body")
    played.held = True
    incoming.expired()
    assert not played.breaches
    played.held = False
    incoming.expired()
    assert len(played.breaches) == 1


async def test_the_rest_of_a_body_that_nobody_reads_is_dropped_for_a_while_only(
    incoming: Incoming, played: Played
) -> None:
    incoming.fed(100, "body", True)
    incoming.answered()
    for _ in range(10):
        incoming.fed(10 * LEAST_OF_BODY, "body", True)
    incoming.expired()
    assert played.breaches == [Breach.SLOW_BODY]


async def test_a_whole_request_has_no_deadline(incoming: Incoming, deadlines: Deadlines) -> None:
    incoming.fed(100, "head", False)
    incoming.fed(100, "nothing", True)
    assert not len(deadlines)
    incoming.answered()
    assert not len(deadlines)
    incoming.fed(100, "head", False)
    assert len(deadlines) == 1
    incoming.closed()
    assert not len(deadlines)


# ---- deadlines -------------------------------------------------------------------------------------------------------


class Waiting:
    """Notes that its deadline has passed."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.also: list[Waiting] = []
        self.deadlines: Deadlines | None = None

    def expired(self) -> None:
        self.over.set()
        for each in self.also:
            assert self.deadlines is not None
            self.deadlines.discard(each)


async def test_deadlines_pass_in_their_order_and_those_discarded_never() -> None:
    deadlines = Deadlines(0.01)
    first, second, never, last = Waiting(), Waiting(), Waiting(), Waiting()
    for each in (first, second, never, last):
        deadlines.set(each)
    deadlines.discard(second)
    deadlines.set(second)
    first.also, first.deadlines = [never], deadlines
    async with asyncio.timeout(LONGEST_WAIT_S):
        for each in (first, last, second):
            await each.over.wait()
    assert not never.over.is_set()
    assert not len(deadlines)
    deadlines.set(never)
    async with asyncio.timeout(LONGEST_WAIT_S):
        await never.over.wait()
