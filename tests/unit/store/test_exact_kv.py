"""Two tenants and two generations of weights: whatever happens to memory and disk, each gets its own KV or nothing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import NoSpace, TercetError
from tercet.store import blocks as store_blocks
from tercet.store.blocks import StoreBlocks
from tercet.store.contents import BlockContent, contents_of
from tercet.store.disk import DiskFolder
from tercet.transport import KVRegion, SendPlan
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.store.stores import SIZE as TOKENS_OF_A_BLOCK
from tests.unit.store.stores import Sender, Store, mirror, prompt_of, pull, request, store

T = TypeVar("T")

# ---- over real sockets -----------------------------------------------------------------------------------------------


@pytest.fixture
def senders() -> Iterator[dict[str, Sender]]:
    """The engines of two tenants, whose KV of the same tokens differs."""
    found = {"a": Sender(seed=1), "b": Sender(seed=2)}
    yield found
    for each in found.values():
        each.close()


def empty_memory(*stores: Store) -> None:
    for each in stores:
        each.blocks.pool.give_back(each.blocks.pool.take(each.blocks.pool.slots))
        assert len(each.blocks.pool) == 0


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
async def test_tenants_with_the_same_tokens_get_their_own_bytes(
    senders: dict[str, Sender], tmp_path: Path, order: Sequence[str]
) -> None:
    prompt, blocks = prompt_of(4, rest=5), 4
    assert senders["a"].kv(blocks) != senders["b"].kv(blocks)

    async def own_bytes_are_pulled(one: Store, other: Store) -> None:
        for tenants in (order, reversed(order)):
            empty_memory(other)
            for tenant in tenants:
                had, sent = await pull(one, other, prompt, tenant)
                assert (had, sent and sent.end) == (0, blocks * TOKENS_OF_A_BLOCK)
            assert {each: other.kv(prompt, each) for each in order} == {
                each: senders[each].kv(blocks) for each in order
            }
        assert (await pull(one, other, prompt))[1].end == 0  # type: ignore[union-attr]  # a third, without a salt

    async with store() as other:
        async with store(tmp_path, blocks=8) as one:
            for number, tenant in enumerate(order, 1):
                assert await senders[tenant].fill(one, prompt, tenant) == 0
                # The next prompt's unfinished block takes the place of one of these.
                await until(partial(lambda known: len(one.blocks.disk) == known, number * blocks))
            await own_bytes_are_pulled(one, other)
            empty_memory(one)
            await own_bytes_are_pulled(one, other)
        async with store(tmp_path, blocks=8) as one:
            assert len(one.blocks.pool) == 0
            await own_bytes_are_pulled(one, other)


async def test_weights_whose_kv_was_refused_leave_that_of_the_others_as_it_was(tmp_path: Path) -> None:
    first, second = Sender(seed=1), Sender(seed=2, model="other")
    known, unknown = prompt_of(4), prompt_of(4, seed=9)
    try:
        async with store(tmp_path) as one, store() as target:
            await first.fill(one, known)
            for prompt in (known, known + prompt_of(2, seed=8), unknown):
                copied = request(prompt)
                async with one.engine.prep_recv(copied) as space:
                    if space.missing:
                        with pytest.raises(TercetError, match="layout"):
                            await second.push(copied, space)
                await until(lambda: not one.blocks.leases)
            assert [*one.blocks.held] == [each.name for each in contents_of(KeyedPrompt(known), TOKENS_OF_A_BLOCK)]
            await first.fill(one, unknown)  # the slots that were refused to the others
            await until(lambda: len(one.blocks.disk) == 8)
            empty_memory(one)
            for prompt in (known, unknown):
                await pull(one, target, prompt)
                assert target.kv(prompt) == first.kv(4)
        async with store(tmp_path, mirror(model="other")) as one, store(status=mirror(model="other")) as target:
            await second.fill(one, known)  # the same names, in a folder of their own
            await until(lambda: len(one.blocks.disk) == 8 + 4)
            empty_memory(one)
            await pull(one, target, known)
            assert target.kv(known) == second.kv(4)
        async with store(tmp_path) as one, store() as target:
            for prompt in (unknown, known):
                await pull(one, target, prompt)
                assert target.kv(prompt) == first.kv(4)
    finally:
        first.close()
        second.close()


# ---- any order of events ---------------------------------------------------------------------------------------------

SLOTS, SIZE, PLANES, BYTES = 6, 4, 2, 32
KINDS = {"first": f"tercet-{'1' * 16}", "second": f"tercet-{'2' * 16}"}
BLOCKS_ON_DISK = 5
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
TENANTS = st.sampled_from([None, "a", "b"])
LONG, SHORT = 60.0, 0.05
"""Seconds that a send waits for a disk that works, and for one that does not answer."""


class Lease(NamedTuple):
    name: str
    prompt: KeyedPrompt
    space: ReservedBlocks


class Pinned(NamedTuple):
    """A send, which keeps the first blocks of a prompt in ``slots``."""

    name: str
    prompt: KeyedPrompt
    slots: tuple[int, ...]


def prompt_with(blocks: Sequence[int], tenant: str | None) -> KeyedPrompt:
    return KeyedPrompt([token for each in blocks for token in [each] * SIZE], tenant)


class StepByStep:
    """A thread for files whose calls run on the event loop, so that the order of events is that of the rules.

    While the disk does not answer (``answers`` is not set), the first call waits, and further ones are refused.
    """

    def __init__(self, answers: asyncio.Event) -> None:
        self._answers = answers
        self._waits = False

    async def run(self, function: Callable[..., Any], *args: object) -> Any:
        if self._waits and not self._answers.is_set():
            raise TimeoutError
        self._waits = True
        await self._answers.wait()
        self._waits = False
        await asyncio.sleep(0)
        return function(*args)

    def close(self) -> None:
        pass


class AnyOrder(RuleBasedStateMachine):
    """Leases, sends, evictions, restarts with these or other weights, and failures of the disk, in any order.

    The KV of a block follows from weights, tenant and tokens, so it is known wherever it is served.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.numbers = itertools.count()
        self.hurt = dict[Path, bytes]()  # files that were changed, and what they became
        self.answers = asyncio.Event()
        self.start("first")

    # ---- the store ---------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, LONGEST_WAIT_S))

    def start(self, weights: str) -> None:
        self.weights = weights
        self.answers.set()
        self.leases, self.sends = list[Lease](), list[Pinned]()
        self.region = KVRegion.create(PLANES, SLOTS, BYTES)
        self.folder = DiskFolder(self.root, KINDS[weights], PLANES * BYTES)
        of_a_block = self.folder.size_of(contents_of(prompt_with([0], "a"), SIZE)[0])
        self.blocks = blocks = StoreBlocks([self.region], SIZE, self.folder, BLOCKS_ON_DISK * of_a_block)
        every: Any = [StepByStep(self.answers) for _ in range(3)]
        *blocks._readers, blocks._writer = every
        blocks.scan()
        self.told_twice = False  # indexes of routers count copies
        self.told = self.held  # what routers believe, by name and tier
        blocks.on_stored, blocks.on_removed = self.tell, self.untell
        self.loop.call_soon(blocks.start)

    def tell(self, content: BlockContent, tier: str) -> None:
        self.told_twice |= (content.name, tier) in self.told
        self.told.add((content.name, tier))

    def untell(self, name: bytes, tier: str) -> None:
        self.told_twice |= (name, tier) not in self.told
        self.told.discard((name, tier))

    def stop(self) -> None:
        self.run(self.blocks.close())
        self.region.close()

    @property
    def held(self) -> set[tuple[bytes, str]]:
        return {(content.name, tier) for content, tier in self.blocks.held_by_tier()}

    @property
    def files(self) -> list[Path]:
        return sorted(self.root.glob("tercet-*/*"))

    def kv(self, prompt: KeyedPrompt, block: int, plane: int) -> bytes:
        said = repr((self.weights, prompt.salt, prompt.tokens[: (block + 1) * SIZE], plane))
        return blake2b(said.encode(), digest_size=BYTES).digest()

    def has_its_own(self, prompt: KeyedPrompt, slots: Sequence[int]) -> bool:
        return all(
            bytes(self.region.blocks(plane, slot)) == self.kv(prompt, block, plane)
            for block, slot in enumerate(slots)
            for plane in range(PLANES)
        )

    def can_serve(self, content: BlockContent) -> bool:
        """True if a block is in memory, or whole on disk."""
        path = self.root / self.folder.file(content.name)
        is_whole = content.name in self.blocks.held and path.exists() and path.read_bytes() != self.hurt.get(path)
        return content.name in self.blocks.pool or is_whole

    # ---- events ------------------------------------------------------------------------------------------------------

    @rule(blocks=PROMPTS, tenant=TENANTS)
    def reserve(self, blocks: list[int], tenant: str | None) -> None:
        name, prompt = f"l{next(self.numbers)}", prompt_with(blocks, tenant)
        with suppress(NoSpace):
            self.leases.append(Lease(name, prompt, self.run(self.blocks.reserve(name, prompt))))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2), arrived=st.integers(0, 6), is_committed=st.booleans())
    def release(self, which: int, arrived: int, *, is_committed: bool) -> None:
        """End a lease, of which only the first blocks are whole; a sender has left anything in the others."""
        name, prompt, space = self.leases.pop(which % len(self.leases))
        first, (slots,) = space.matched_len // SIZE, space.blocks
        for at, slot in enumerate(slots):
            for plane in range(PLANES):
                whole = self.kv(prompt, first + at, plane)
                self.region.blocks(plane, slot)[:] = whole if at < arrived else whole[::-1]
        end = space.matched_len + min(arrived, len(slots)) * SIZE
        if is_committed:
            self.run(self.blocks.commit(name, prompt.content(end)))
        self.run(self.blocks.release(name, end))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2), more=PROMPTS)
    def extend(self, which: int, more: list[int]) -> None:
        at = which % len(self.leases)
        name, prompt, _ = self.leases[at]
        longer = prompt.with_output(prompt_with(more, None).tokens)
        with suppress(NoSpace):
            self.leases[at] = Lease(name, longer, self.run(self.blocks.extend(name, longer)))

    @rule(blocks=PROMPTS, tenant=TENANTS)
    def bring(self, blocks: list[int], tenant: str | None) -> None:
        before = len(self.leases)
        self.reserve(blocks, tenant)
        if len(self.leases) > before:
            self.release(before, len(blocks), is_committed=False)

    @rule(wanted=st.lists(st.tuples(PROMPTS, TENANTS), min_size=1, max_size=3))
    def send(self, wanted: list[tuple[list[int], str | None]]) -> None:
        """Begin sends at the same time: each gets its own KV, and one that is alone all that there is."""
        prompts = [prompt_with(*each) for each in wanted]
        blocks = self.blocks
        # Then only those that the disk has lost may be missing.
        is_alone = len(prompts) == 1 and blocks.pool.available == SLOTS and self.answers.is_set()
        able = [list(map(self.can_serve, contents_of(each, SIZE))) for each in prompts]
        with patch.object(store_blocks, "DISK_SECONDS", LONG if self.answers.is_set() else SHORT):
            begun = self.run(self._begun(prompts))
        for each, here in zip(begun, able, strict=True):
            assert self.has_its_own(each.prompt, each.slots)
            if is_alone and not blocks.waiting_writes:
                assert len(each.slots) == [*here, False].index(False)
        self.sends += begun

    async def _begun(self, prompts: Sequence[KeyedPrompt]) -> list[Pinned]:
        async def begin(prompt: KeyedPrompt) -> Pinned:
            name, end = f"s{next(self.numbers)}", len(prompt.tokens)
            found = await self.blocks.push_longest(
                prompt, SendPlan(name, "", prompt.content(end), 0, 0, end, [], "")
            )  # fmt: skip
            slots = tuple(slot for push in found.pushes for slot in push.blocks)
            assert found.end == len(slots) * SIZE
            return Pinned(name, prompt, slots)

        return await asyncio.gather(*map(begin, prompts))

    @precondition(lambda self: self.sends)
    @rule(which=st.integers(0, 2))
    def end_send(self, which: int) -> None:
        name, prompt, slots = self.sends.pop(which % len(self.sends))
        assert self.has_its_own(prompt, slots)
        self.run(self.blocks.end_send(name))

    @precondition(lambda self: self.answers.is_set())
    @rule()
    def write(self) -> None:
        self.run(self._written())

    async def _written(self) -> None:
        while self.blocks.waiting_writes:
            await asyncio.sleep(0)

    @rule(weights=st.sampled_from(sorted(KINDS)))
    def restart(self, weights: str) -> None:
        self.stop()
        self.start(weights)

    # ---- failures of the disk ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.files)
    @rule(which=st.integers(0, 9), at=st.integers(0, 400), how=st.sampled_from(["flip", "cut", "swap", "delete"]))
    def damage(self, which: int, at: int, how: str) -> None:
        path, other = self.files[which % len(self.files)], self.files[at % len(self.files)]
        content = bytearray(path.read_bytes())
        if bytes(content) == self.hurt.get(path):
            return  # a second change could undo the first
        match how:
            case "delete":
                path.unlink()
                return
            case "swap" if other.name != path.name:
                content = other.read_bytes()
            case "cut":
                del content[at % len(content) :]
            case _:
                content[at % len(content)] ^= 1
        path.write_bytes(content)
        self.hurt[path] = bytes(content)

    @rule(state=st.sampled_from(["works", "is full", "is read-only"]))
    def change(self, state: str) -> None:
        """Let the disk refuse writes, and deletions, or work again."""

        def write(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        folder: Any = self.folder
        for name in ("write", "delete"):
            folder.__dict__.pop(name, None)
        if state != "works":
            folder.write = write
        if state == "is read-only":
            folder.delete = lambda _: []  # none of them

    @rule(answers=st.booleans())
    def hang(self, *, answers: bool) -> None:
        """Let the disk stop to answer, or answer what waits."""
        (self.answers.set if answers else self.answers.clear)()
        self.run(self._settled())

    async def _settled(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    # ---- what holds at all times -------------------------------------------------------------------------------------

    @invariant()
    def routers_believe_what_is_held(self) -> None:
        assert self.told == self.held
        assert not self.told_twice

    @invariant()
    def the_disk_has_what_the_index_says_within_its_limit(self) -> None:
        assert self.blocks.disk.nbytes <= self.blocks.disk.limit
        if not self.blocks.waiting_writes:
            assert {str(path.relative_to(self.root)) for path in self.files} <= {*self.blocks.disk}

    @invariant()
    def memory_that_nothing_uses_is_available(self) -> None:
        assert len({slot for each in self.leases for slot in each.space.blocks[0]}) == sum(
            len(each.space.blocks[0]) for each in self.leases
        )
        if not (self.leases or self.sends or self.blocks.waiting_writes or self.blocks._loads):
            assert self.blocks.pool.available == SLOTS

    def teardown(self) -> None:
        self.stop()
        self.loop.close()
        shutil.rmtree(self.root)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=settings().max_examples * 2 // 5, stateful_step_count=40)


# ---- what the machine has found --------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[AnyOrder]:
    found = AnyOrder()
    yield found
    found.teardown()


def test_a_send_does_not_read_from_disk_into_memory_that_it_sends(events: AnyOrder) -> None:
    events.bring(blocks=[0, 0, 0, 0], tenant=None)
    events.write()
    events.reserve(blocks=[0, 0, 0], tenant="a")  # evicts the end of the first prompt, and all but the rest is pinned
    events.send(wanted=[([0, 0, 0, 0], None)])
    (sent,) = events.sends
    assert len(sent.slots) == 3
    events.end_send(0)


def test_a_file_of_other_weights_that_makes_room_is_no_block_of_these(events: AnyOrder) -> None:
    events.bring(blocks=[0, 0], tenant=None)
    events.write()
    events.restart("second")
    events.bring(blocks=[0, 0], tenant=None)  # the same names
    events.write()
    events.bring(blocks=[1, 1], tenant=None)
    events.write()
    assert sum(path.parent.name == KINDS["first"] for path in events.files) < 2
    events.routers_believe_what_is_held()


def test_a_block_that_cannot_be_read_is_brought_again(events: AnyOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    events.bring(blocks=[0, 0], tenant="a")
    events.write()
    pool = events.blocks.pool
    pool.give_back(pool.take(SLOTS))
    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", fails)
        (sent,) = events.run(events._begun([prompt_with([0, 0], "a")]))
    assert sent.slots == ()
    events.routers_believe_what_is_held()
    events.reserve(blocks=[0, 0], tenant="a")
    assert events.leases[0].space.matched_len == 0
    events.release(0, 2, is_committed=False)
    events.write()
    pool.give_back(pool.take(SLOTS))
    events.send(wanted=[([0, 0], "a")])
    assert len(events.sends[0].slots) == 2


def test_files_that_cannot_be_deleted_are_served_and_counted(events: AnyOrder) -> None:
    events.bring(blocks=[0, 0], tenant="a")
    events.bring(blocks=[0, 0], tenant="b")
    events.write()
    events.change("is read-only")
    for tenant in (None, "a", "b"):
        events.bring(blocks=[1, 1], tenant=tenant)
        events.write()
        events.the_disk_has_what_the_index_says_within_its_limit()
    events.send(wanted=[([0, 0], "a"), ([0, 0], "b")])
    assert [len(each.slots) for each in events.sends] == [2, 2]


def test_a_store_killed_at_any_step_of_its_writes_has_each_block_whole_or_not_at_all(
    events: AnyOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = list[Path]()

    def keep(owner: Any, name: str, most: int | None = None) -> None:
        """Copy the disk before each call; of bytes, at most ``most`` are written by one."""
        call = getattr(owner, name)

        def copied(place: Any, *args: Any, **named: Any) -> Any:
            states.append(tmp_path / str(len(states)))
            shutil.copytree(events.root, states[-1])
            return call(place, args[0][:most], **named) if most else call(place, *args, **named)

        patched.setattr(owner, name, copied)

    with monkeypatch.context() as patched:
        keep(os, "write", 48)
        keep(Path, "replace")
        keep(Path, "unlink")
        for tenant in ("a", "b"):  # the second one's blocks replace some of the first one's
            events.bring(blocks=[0, 1, 0], tenant=tenant)
            events.write()
    seen = set[int]()
    for state in states:
        events.stop()
        shutil.rmtree(events.root)
        shutil.copytree(state, events.root)
        events.start("first")
        assert not [path for path in events.files if path.suffix]
        assert len(events.files) == len(events.blocks.disk)
        events.the_disk_has_what_the_index_says_within_its_limit()
        seen.add(len(events.blocks.held))
        for tenant in ("a", "b"):
            events.send(wanted=[([0, 1, 0], tenant)])
            events.end_send(0)
    assert seen >= {*range(4)}
