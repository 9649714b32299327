"""A store's blocks: names that are equal for equal KV alone, slots of memory that each have one state, and a disk that
gives what was written, or nothing.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tercet.engine.interface import Adapter, KeyedPrompt
from tercet.protocol import BadRequest, MultiModalFeature, NoSpace
from tercet.store.contents import BlockContent, contents_of
from tercet.store.disk import DiskFolder, DiskIndex
from tercet.store.pool import MemoryPool

KIND, OTHER = "tercet-0123456789abcdef", "tercet-fedcba9876543210"
BYTES, PARTS = 3000, 3


def blocks(count: int, seed: int = 0) -> list[BlockContent]:
    return contents_of(KeyedPrompt([seed, *range(4 * count)]), 4)[:count]


def kv(seed: int) -> list[memoryview]:
    choose = random.Random(seed)
    return [memoryview(bytearray(choose.randbytes(BYTES // PARTS))) for _ in range(PARTS)]


def empty() -> list[memoryview]:
    return [memoryview(bytearray(BYTES // PARTS)) for _ in range(PARTS)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    found = DiskFolder(tmp_path, KIND, BYTES)
    yield found
    found.close()


def test_what_is_read_is_what_was_written(folder: DiskFolder) -> None:
    for number, content in enumerate(blocks(3)):
        assert folder.write(content, kv(number)) == folder.size_of(content)
    for number, content in enumerate(blocks(3)):
        found = empty()
        assert folder.read(content, found)
        assert found == kv(number)
    with pytest.raises(FileNotFoundError):
        folder.read(blocks(4)[3], empty())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(st.data())
def test_a_file_of_which_one_bit_is_another_is_never_read_as_the_block(folder: DiskFolder, data: st.DataObject) -> None:
    (content,) = blocks(1)
    path = folder.root / folder.file(content.name)
    folder.write(content, kv(1))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, 200), label="byte")
    whole[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path.write_bytes(whole)
    assert not folder.read(content, empty())
    assert not path.exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(min_value=0))
def test_a_file_that_was_cut_is_never_read_and_is_deleted_by_a_scan(folder: DiskFolder, cut: int) -> None:
    (content,) = blocks(1)
    path = folder.root / folder.file(content.name)
    size = folder.write(content, kv(1))
    os.truncate(path, cut % size)
    assert list(folder.scan()) == []
    assert not path.exists()


def test_a_scan_finds_what_was_written_by_age_and_other_weights_first(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, KIND, BYTES)
    for number, content in enumerate(blocks(3)):
        folder.write(content, kv(number))
        os.utime(tmp_path / folder.file(content.name), (5 - number, 5 - number))
    folder.close()
    newer = DiskFolder(tmp_path, OTHER, BYTES)
    newer.write(blocks(1)[0], kv(0))
    (tmp_path / OTHER / f"{'0' * 32}.part").write_bytes(b"half")
    found = list(newer.scan())
    assert [content and content.name for _, _, content in found] == [None, None, None, blocks(1)[0].name]
    assert [name for name, _, _ in found[:3]] == [f"{KIND}/{content.name.hex()}" for content in reversed(blocks(3))]
    assert all(size == (tmp_path / name).stat().st_size for name, size, _ in found)
    newer.delete([name for name, _, _ in found[:3]])
    assert sorted(path.name for path in tmp_path.iterdir()) == [OTHER, "tercet.lock"]
    newer.close()


def test_files_of_others_stay(folder: DiskFolder, tmp_path: Path) -> None:
    for name in ("notes.txt", "photos/0123", f"{KIND}/readme", f"{KIND}x/{'0' * 32}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    assert list(folder.scan()) == []
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 4 + 1  # and the lock


def test_a_header_that_names_another_block_is_not_believed(folder: DiskFolder) -> None:
    one, other = blocks(2)
    folder.write(one, kv(1))
    (folder.root / folder.file(one.name)).rename(folder.root / folder.file(other.name))
    assert not folder.read(other, empty())
    folder.write(one, kv(1))
    (folder.root / folder.file(one.name)).rename(folder.root / folder.file(other.name))
    assert list(folder.scan()) == []


def test_a_folder_has_one_store(folder: DiskFolder, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"disk: .* is another store's"):
        DiskFolder(tmp_path, OTHER, BYTES)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadRequest, match=r"disk: .*file cannot be used: Not a directory"):
        DiskFolder(tmp_path / "file", KIND, BYTES)


def test_a_write_that_fails_leaves_no_file(folder: DiskFolder) -> None:
    (content,) = blocks(1)
    closed = memoryview(bytearray(10))
    closed.release()
    with pytest.raises(ValueError, match="released"):
        folder.write(content, [closed])
    assert list((folder.root / KIND).iterdir()) == []


@pytest.mark.parametrize("after", [0, 50, 1000, 2999])
def test_a_disk_that_is_full_in_the_middle_of_a_write_keeps_what_it_had(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    one, other = blocks(2)
    folder.write(one, kv(1))
    write, left = os.write, after

    def some(fd: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(fd, data[:left])
        left -= count
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", some)
        for content in (one, other):
            left = after
            with pytest.raises(OSError, match="No space left"):
                folder.write(content, kv(2))
            assert not left
    assert [path.name for path in (folder.root / KIND).iterdir()] == [one.name.hex()]
    found = empty()
    assert folder.read(one, found)
    assert found == kv(1)


def test_a_disk_that_may_only_be_read_is_read(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (content,) = blocks(1)
    folder.write(content, kv(1))
    path = folder.root / folder.file(content.name)
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refused)
        patched.setattr(Path, "unlink", refused)
        found = empty()
        assert folder.read(content, found)
        assert found == kv(1)
        assert folder.delete([folder.file(content.name)]) == []
        path.write_bytes(path.read_bytes()[:-1])
        assert not folder.read(content, empty())  # damaged, which is no reason to fail
    assert folder.delete([folder.file(content.name)]) == [folder.file(content.name)]


@pytest.mark.parametrize(("code", "stays"), [(errno.EIO, False), (errno.EMFILE, True), (errno.ENOMEM, True)])
def test_a_file_on_a_bad_sector_is_damaged_and_one_that_was_not_tried_stays(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, code: int, stays: bool
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    (content,) = blocks(1)
    for scans in (False, True):
        folder.write(content, kv(1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "readv", fails)
            if scans:
                assert list(folder.scan()) == []
            elif stays:
                with pytest.raises(OSError, match=os.strerror(code)):
                    folder.read(content, empty())
            else:
                assert not folder.read(content, empty())
        assert (folder.root / folder.file(content.name)).exists() is stays
        assert len(list(folder.scan())) == stays


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 20), st.booleans())))
def test_the_index_keeps_its_limit_and_forgets_the_least_recently_used(
    limit: int, steps: list[tuple[str, int, bool]]
) -> None:
    index, model = DiskIndex(limit), dict[str, int]()
    for file, size, touches in steps:
        if touches:
            index.touch(file)
            if file in model:
                model[file] = model.pop(file)
            continue
        surplus, gone = index.surplus(size), index.make_room(size)
        assert gone == surplus
        assert (gone is None) == (size > limit)
        if gone is None:
            continue
        for each in gone:
            assert each == next(iter(model))
            del model[each]
        index.add(file, size)
        model.pop(file, None)
        model[file] = size
        assert index.nbytes == sum(model.values()) <= limit
        assert len(index) == len(model)
        assert all(each in index for each in model)


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


SIZE = 4
TOKENS = st.lists(st.integers(0, 2), max_size=20)


def names(prompt: KeyedPrompt) -> list[bytes]:
    return [each.name for each in contents_of(prompt, SIZE)]


def image(offset: int, digest: str = "a") -> MultiModalFeature:
    return MultiModalFeature(modality="image", digest=digest * 64, offset=offset, length=2)


@given(TOKENS, TOKENS)
def test_blocks_have_one_name_as_far_as_all_tokens_before_their_end_are_equal(one: list[int], other: list[int]) -> None:
    for at, (ours, theirs) in enumerate(zip(names(KeyedPrompt(one)), names(KeyedPrompt(other)), strict=False), 1):
        assert (ours == theirs) == (one[: at * SIZE] == other[: at * SIZE])


@given(TOKENS.filter(lambda tokens: len(tokens) >= SIZE))
def test_salt_and_adapter_are_in_the_names(tokens: list[int]) -> None:
    def adapted(digest: str) -> Adapter:
        return Adapter("fr", 1, "/x", digest)

    keyed = [
        KeyedPrompt(tokens),
        KeyedPrompt(tokens, "s"),
        KeyedPrompt(tokens, "t"),
        KeyedPrompt(tokens, None, adapted("1")),
        KeyedPrompt(tokens, None, adapted("2")),
        KeyedPrompt(tokens, "s", adapted("1")),
    ]
    every = [name for each in keyed for name in names(each)]
    assert len(set(every)) == len(every)
    assert names(KeyedPrompt(tokens, "")) == names(KeyedPrompt(tokens))


def test_images_are_in_the_names_of_their_blocks_and_of_those_after_them_only() -> None:
    tokens: Sequence[int] = range(16)

    def named(*features: MultiModalFeature) -> list[bytes]:
        return names(KeyedPrompt([*tokens], None, None, features))

    plain, one, other, moved, more = (
        named(),
        named(image(5)),
        named(image(5, "b")),
        named(image(6)),
        named(image(5), image(9)),
    )
    assert plain[0] == one[0] == other[0] == moved[0]
    assert len({each[1] for each in (plain, one, other, moved)}) == 4
    assert one[1] == more[1]
    assert one[2] != more[2]
    assert named(image(3))[0] != plain[0]  # it lies across the end of the first block


@given(TOKENS, st.none() | st.sampled_from(["", "salt"]))
def test_contents_prove_their_names(tokens: list[int], salt: str | None) -> None:
    prompt = KeyedPrompt(tokens, salt, None, (image(1),) if len(tokens) > 2 else ())
    for content in contents_of(prompt, SIZE):
        assert content.is_genuine
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=type(content))
        assert again == content
        assert again.is_genuine
        assert not msgspec.structs.replace(content, tokens=bytes([7]) + content.tokens[1:]).is_genuine
        assert not msgspec.structs.replace(content, features=(("a" * 64, 0), *content.features)).is_genuine
