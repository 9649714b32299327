"""The published table, read while it is written: whole and true, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.engine.block_tables import (
    WORD_BYTES,
    BlockTableReader,
    BlockTableWriter,
    Residence,
    TablePlace,
    TableShape,
    create_table,
    open_table,
)

SHAPE = TableShape(3, 4)
OWNERS = range(1, 6)
FIRST_EPOCH = 7

Contents = dict[int, tuple[int, list[int]]]
contents = st.dictionaries(
    st.sampled_from(OWNERS),
    st.tuples(st.integers(1, 99), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    max_size=SHAPE.rows,
)
# What the table shall have after each round, and whether blocks were handed out before it.
rounds = st.lists(st.tuples(st.booleans(), contents), min_size=1, max_size=6)


class Recorded:
    """Memory that remembers every store."""

    def __init__(self) -> None:
        self.words = [0] * (SHAPE.nbytes // WORD_BYTES)
        self.stores: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.stores.append((index, value))


@dataclass
class Run:
    """A writer that went through some rounds; ``ends`` has how many stores each took, its epoch, and the contents."""

    memory: Recorded = field(default_factory=Recorded)
    ends: list[tuple[int, int, Contents]] = field(default_factory=list)
    turned: list[tuple[int, int]] = field(default_factory=list)  # after how many stores, to which epoch

    def __post_init__(self) -> None:
        self.writer = BlockTableWriter(self.memory, SHAPE, self._turn, FIRST_EPOCH)
        self._rows: dict[int, int] = {}

    def _turn(self, epoch: int) -> None:
        self.turned.append((len(self.memory.stores), epoch))

    @property
    def epoch(self) -> int:
        return self.turned[-1][1]

    def publish(self, wanted: Contents) -> None:
        self.writer.begin()
        for owner in [*self._rows]:
            if owner not in wanted:
                self.writer.leave(self._rows.pop(owner))
        for owner, (computed, blocks) in wanted.items():
            if owner not in self._rows:
                row = self.writer.enter(owner)
                assert row is not None
                self._rows[owner] = row
            assert self.writer.blocks(self._rows[owner], 0, blocks)
            self.writer.computed(self._rows[owner], computed)
        self.writer.end()
        self.ends.append((len(self.memory.stores), self.epoch, wanted))


def run_of(wanted: list[tuple[bool, Contents]]) -> Run:
    run = Run()
    for handed_out, contents_then in wanted:
        if handed_out:
            run.writer.revoke()
        run.publish(contents_then)
    return run


def after(stores: list[tuple[int, int]]) -> list[int]:
    words = [0] * (SHAPE.nbytes // WORD_BYTES)
    for index, value in stores:
        words[index] = value
    return words


def all_of(words: list[int]) -> Mapping[int, Residence]:
    reader = BlockTableReader(words, SHAPE)
    return {owner: found for owner in OWNERS if (found := reader.find(owner)) is not None}


def as_found(epoch: int, found: Contents) -> Mapping[int, Residence]:
    return {owner: Residence(epoch, computed, blocks) for owner, (computed, blocks) in found.items()}


@given(rounds)
def test_a_writer_that_stops_at_any_store_leaves_what_it_said_last_or_nothing(
    wanted: list[tuple[bool, Contents]],
) -> None:
    run = run_of(wanted)
    ends = {end: as_found(epoch, found) for end, epoch, found in run.ends}
    last: Mapping[int, Residence] = {}
    for count in range(len(run.memory.stores) + 1):
        found = all_of(after(run.memory.stores[:count]))
        if count in ends:
            last = ends[count]
            assert found == last
        else:
            assert not found or found == last


class Interleaved:
    """Memory to which somebody stores some more before each read."""

    def __init__(self, stores: list[tuple[int, int]], done: int, steps: Iterator[int]) -> None:
        self._words = after(stores[:done])
        self._stores = iter(stores[done:])
        self._steps = steps

    def __getitem__(self, index: int) -> int:
        for _ in range(next(self._steps, 0)):
            store = next(self._stores, None)
            if store is not None:
                self._words[store[0]] = store[1]
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        raise AssertionError("a reader does not write")


@given(rounds, st.data())
def test_what_is_read_while_it_is_written_was_true_as_a_whole(
    wanted: list[tuple[bool, Contents]], data: st.DataObject
) -> None:
    run = run_of(wanted)
    stores = run.memory.stores
    done = data.draw(st.integers(0, len(stores)))
    steps = data.draw(st.lists(st.integers(0, 3), max_size=100))
    owner = data.draw(st.sampled_from(OWNERS))
    found = BlockTableReader(Interleaved(stores, done, iter(steps)), SHAPE).find(owner)
    said = [as_found(epoch, contents_then).get(owner) for _, epoch, contents_then in run.ends]
    assert found is None or found in said


def test_words_turn_before_anything_is_said_of_their_epoch_and_each_epoch_is_new() -> None:
    run = run_of([(False, {1: (5, [1])}), (True, {1: (6, [1])}), (True, {}), (True, {2: (1, [2])})])
    epochs = [epoch for _, epoch in run.turned]
    assert epochs == sorted(set(epochs))
    for (end, epoch, _), (turned_after, turned_to) in zip(run.ends, run.turned, strict=True):
        assert turned_after < end
        assert turned_to == epoch


def test_what_is_revoked_is_not_found_and_is_said_again_in_another_epoch() -> None:
    run = run_of([(False, {1: (5, [1, 2])})])
    run.writer.revoke()
    assert not all_of(run.memory.words)
    assert run.epoch == FIRST_EPOCH + 1
    run.writer.revoke()
    assert run.epoch == FIRST_EPOCH + 1, "once is enough"
    run.publish({1: (6, [1, 2])})
    assert all_of(run.memory.words) == {1: Residence(FIRST_EPOCH + 1, 6, [1, 2])}


def test_rows_and_blocks_that_there_is_no_room_for() -> None:
    run = run_of([(False, {owner: (1, [owner]) for owner in (1, 2, 3)})])
    assert run.writer.enter(4) is None
    assert not run.writer.blocks(0, 0, [1, 2, 3, 4, 5])
    assert run.writer.blocks(0, 3, [4])


def test_another_process_finds_the_file() -> None:
    words, place = create_table(SHAPE)
    try:
        writer = BlockTableWriter(words, SHAPE, lambda epoch: None, 3)
        reader = open_table(place)
        assert reader.find(9) is None
        writer.begin()
        row = writer.enter(9)
        assert row is not None
        writer.blocks(row, 0, [4, 5])
        writer.computed(row, 20)
        writer.end()
        assert reader.find(9) == Residence(3, 20, [4, 5])
    finally:
        os.close(int(place.path.rpartition("/")[2]))
    with pytest.raises(FileNotFoundError):
        open_table(TablePlace(place.path, SHAPE))
