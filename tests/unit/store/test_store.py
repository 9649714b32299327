"""Stores over real sockets: what comes in goes out unchanged, and every failure is a miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tercet.decisions.scheduling.plugin import block_hashes
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.kv_events import follow_cache
from tercet.protocol import BadRequest, Conflict, LayoutMismatch, NoSpace, TercetError, Unauthorized
from tercet.protocol.addresses import CacheGroup
from tercet.store import blocks as store_blocks
from tercet.store.disk import DiskFolder
from tercet.store.server import layout_of, regions_for
from tercet.wire.client import HttpEngine
from tercet_checks.conformance import run_checks
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.store.stores import LAYOUT, MIRROR, SIZE, Sender, flip, mirror, prompt_of, pull, request, store


@pytest.fixture
def sender() -> Iterator[Sender]:
    found = Sender()
    yield found
    found.close()


def files_of(disk: Path) -> list[Path]:
    return sorted(disk.glob("tercet-*/*"))


async def test_what_came_in_goes_out_unchanged(sender: Sender) -> None:
    prompt = prompt_of(5, rest=7)
    async with store() as one, store() as other:
        assert await sender.fill(one, prompt) == 0
        assert one.kv(prompt) == sender.kv(5)
        assert await sender.fill(one, prompt) == 5 * SIZE
        had, sent = await pull(one, other, prompt)
        assert sent is not None
        assert (had, sent.begin, sent.end, sent.usage.computed, sent.usage.cached) == (0, 0, 5 * SIZE, 0, 5 * SIZE)
        assert other.kv(prompt) == sender.kv(5)
        await until(lambda: one.blocks.pool.available == one.blocks.pool.slots)  # a send is unpinned behind
        status = await one.engine.status()
        assert status.is_store
        assert (status.leases, status.sends, status.free_blocks) == (0, 0, status.total_blocks)


async def test_ranks_have_a_region_each(sender: Sender) -> None:
    two, prompt = Sender(ranks=2), prompt_of(4)
    try:
        async with store(status=mirror(2)) as one, store() as whole:
            await two.fill(one, prompt)
            assert one.kv(prompt) == two.kv(4)
            await sender.fill(one, prompt_of(3, seed=2))  # cut between its heads
            _, sent = await pull(one, whole, prompt_of(3, seed=2))
            assert sent is not None
            assert sent.end == 3 * SIZE
            assert whole.kv(prompt_of(3, seed=2)) == sender.kv(3)
    finally:
        two.close()


async def test_the_longest_held_prefix_is_sent_and_a_miss_is_no_error(sender: Sender) -> None:
    async with store() as one, store() as other:
        await sender.fill(one, prompt_of(3))
        longer = prompt_of(3) + prompt_of(3, seed=9)
        _, sent = await pull(one, other, longer)
        assert sent is not None
        assert (sent.begin, sent.end) == (0, 3 * SIZE)
        _, sent = await pull(one, other, longer)
        assert sent is not None
        assert (sent.begin, sent.end, sent.bytes) == (3 * SIZE, 3 * SIZE, 0)
        _, sent = await pull(one, other, prompt_of(3), salt="tenant")
        assert sent is not None
        assert (sent.begin, sent.end) == (0, 0)
        await sender.fill(one, prompt_of(3), salt="tenant")
        _, sent = await pull(one, other, prompt_of(3), salt="tenant")
        assert sent is not None
        assert sent.end == 3 * SIZE
        await until(lambda: one.blocks.pool.available == one.blocks.pool.slots)


async def test_a_restarted_store_serves_from_disk_and_recognises_damage(sender: Sender, tmp_path: Path) -> None:
    prompt = prompt_of(6)
    async with store(tmp_path) as one:
        await sender.fill(one, prompt)
        await until(lambda: len(one.blocks.disk) == 6)
    async with store(tmp_path) as one, store() as other:
        assert len(one.blocks.pool) == 0
        _, sent = await pull(one, other, prompt)
        assert sent is not None
        assert sent.end == 6 * SIZE
        assert other.kv(prompt) == sender.kv(6)
        names = [each.name for each in one.blocks.held.values()]
        order = store_blocks.contents_of(_keyed(prompt), SIZE)
        assert {*names} == {each.name for each in order}
        damaged = tmp_path / one.blocks.folder.file(order[4].name) if one.blocks.folder else tmp_path
    flip(damaged)
    async with store(tmp_path) as one, store() as other:
        _, sent = await pull(one, other, prompt)
        assert sent is not None
        assert sent.end == 4 * SIZE
        assert other.kv(prompt) == [kv[: 4 * LAYOUT.block_bytes] for kv in sender.kv(6)]
        assert not damaged.exists()
        assert order[4].name not in one.blocks.held
        assert await sender.fill(one, prompt) == 4 * SIZE
        await until(damaged.exists)


def _keyed(prompt: list[int]) -> store_blocks.KeyedPrompt:
    return store_blocks.KeyedPrompt(prompt)


async def test_other_weights_find_nothing_and_are_refused(sender: Sender, tmp_path: Path) -> None:
    prompt = prompt_of(3)
    async with store(tmp_path) as one:
        await sender.fill(one, prompt)
        await until(lambda: len(one.blocks.disk) == 3)
    async with store(tmp_path, mirror(model="other"), disk_blocks=4) as one, store() as old:
        assert not one.blocks.held
        assert len(one.blocks.disk) == 3
        copied = request(prompt)
        async with one.engine.prep_recv(copied) as space:
            assert space.matched_len == 0
            with pytest.raises(LayoutMismatch, match="model is 'weights' here and 'other'"):
                await old.engine.remote_send(copied, space, 0, cached_only=True)
            with pytest.raises(TercetError, match="layout"):
                await sender.push(copied, space)
        other = Sender(seed=2)
        other.layout = replace(other.layout, model="other")
        other.close()


async def test_memory_and_disk_evict_what_was_used_least_recently(sender: Sender, tmp_path: Path) -> None:
    async with store(tmp_path, blocks=8, disk_blocks=12) as one, store() as other:
        for seed in range(3):
            await sender.fill(one, prompt_of(6, seed=seed))
            await until(lambda: not one.blocks.waiting_writes)
        assert len(one.blocks.pool) == 8
        assert len(one.blocks.disk) == 12
        ends = {seed: (await pull(one, other, prompt_of(6, seed=seed)))[1] for seed in (2, 1, 0)}
        assert {seed: sent and sent.end for seed, sent in ends.items()} == {2: 6 * SIZE, 1: 6 * SIZE, 0: 0}
        assert other.kv(prompt_of(6, seed=1)) == sender.kv(6)
        assert len(files_of(tmp_path)) == 12


async def test_a_full_disk_costs_nothing_but_the_disk(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskFolder, "write", full)
    async with store(tmp_path) as one, store() as other:
        await sender.fill(one, prompt_of(4))
        await until(lambda: not one.blocks.waiting_writes)
        _, sent = await pull(one, other, prompt_of(4))
        assert sent is not None
        assert sent.end == 4 * SIZE
        assert other.kv(prompt_of(4)) == sender.kv(4)
        assert len(one.blocks.disk) == 0
        await until(lambda: one.blocks.pool.available == one.blocks.pool.slots)


async def test_a_stuck_disk_is_a_miss_within_a_deadline(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(tmp_path) as one:
        await sender.fill(one, prompt_of(4))
        await until(lambda: len(one.blocks.disk) == 4)
    monkeypatch.setattr(store_blocks, "DISK_SECONDS", 0.2)
    read, released = DiskFolder.read, threading.Event()

    def stuck(*args: object) -> bool:
        assert released.wait(LONGEST_WAIT_S)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFolder, "read", stuck)
    async with store(tmp_path) as one, store() as other:
        _, sent = await pull(one, other, prompt_of(4))
        assert sent is not None
        assert sent.end == 0
        taken = one.blocks.pool.slots - one.blocks.pool.available
        assert 0 < taken <= 4  # a thread may still write there
        released.set()
        await until(lambda: one.blocks.pool.available == one.blocks.pool.slots)
        _, sent = await pull(one, other, prompt_of(4))
        assert sent is not None
        assert sent.end == 4 * SIZE
        assert other.kv(prompt_of(4)) == sender.kv(4)


async def test_blocks_under_a_lease_are_not_given_to_another_and_come_back(sender: Sender) -> None:
    async with store(blocks=8) as one:
        first = request(prompt_of(6))
        async with one.engine.prep_recv(first) as space:
            with pytest.raises(NoSpace, match="6 blocks are needed, and 2 of 8 are available"):
                async with one.engine.prep_recv(request(prompt_of(6, seed=1))):
                    pass
            with pytest.raises(Conflict):
                async with one.engine.prep_recv(first):
                    pass
            grown = replace(first, prompt=(*first.prompt, *prompt_of(1, seed=3)))
            larger = await one.engine.extend_recv(space, grown)
            assert larger.end == 7 * SIZE
            await sender.push(grown, larger)
        await until(lambda: not one.blocks.leases)
        assert one.kv(grown.prompt) == sender.kv(7)
        assert one.blocks.pool.available == 8


async def test_a_late_sender_is_fenced(sender: Sender) -> None:
    async with store() as one:
        copied = request(prompt_of(3))
        async with one.engine.prep_recv(copied) as space:
            pass
        await until(lambda: not one.blocks.leases)
        with pytest.raises(TercetError, match="lease"):
            await sender.push(copied, space)
        assert not one.blocks.held


async def test_a_store_computes_nothing() -> None:
    async with store() as one, store() as other:
        copied = request(prompt_of(2))
        async with other.engine.prep_recv(copied) as space:
            with pytest.raises(BadRequest, match="cached_only: must be true here, as a store computes nothing"):
                await one.engine.remote_send(copied, space, 0)
        with pytest.raises(BadRequest, match="a store computes nothing; call an engine"):
            async for _ in one.engine.start_generate(copied):
                pass
        assert await one.engine.sequences() == []


async def test_strangers_are_refused() -> None:
    sender = Sender(secret="fleet")
    try:
        async with store(secret="fleet") as one:
            url = one.engine.url
            async with HttpEngine("x", url) as stranger:
                with pytest.raises(Unauthorized, match="this store requires its fleet's secret"):
                    await stranger.status()
            await sender.fill(one, prompt_of(2))
            stranger_rank = Sender(secret="")
            copied = request(prompt_of(2, seed=5))
            async with one.engine.prep_recv(copied) as space:
                with pytest.raises(TercetError, match="secret"):
                    await stranger_rank.push(copied, space)
            stranger_rank.close()
    finally:
        sender.close()


WITHOUT_GENERATION = (
    "status", "calls-for-another-start", "reservations-take-blocks", "ends-of-ranges", "one-lease-for-each-id",
    "leases-expire", "double-release", "abort-ends-a-lease", "leases-are-extended", "no-space-is-said",
    "garbage-bodies", "types-of-bodies", "strangers-are-refused", "proofs-are-for-one-call", "kv-for-a-wrong-lease",
    "layouts-that-do-not-match",
)  # fmt: skip


async def test_the_verbs_of_a_store_conform_as_far_as_they_compute_nothing() -> None:
    async with store(secret="fleet", blocks=64) as one, store(secret="fleet", blocks=64) as other:
        results = await run_checks(one.engine.url, other.engine.url, "fleet", LONGEST_WAIT_S, WITHOUT_GENERATION)
        assert [(each.check, each.state) for each in results] == [(name, "passed") for name in WITHOUT_GENERATION], (
            results
        )


def matched(knowledge: FleetKnowledge, name: str, prompt: list[int], salt: str | None = None) -> int:
    sought = request(prompt, salt)
    found = [
        size * int(index.matched(block_hashes(sought, size))[knowledge.loads.row(name)])
        for size, index in knowledge.on_any_tier.items()
    ]
    return max(found, default=0)


async def test_routers_follow_what_a_store_holds(sender: Sender, tmp_path: Path) -> None:
    async with store(tmp_path) as one:
        await sender.fill(one, prompt_of(3, seed=7))
        await until(lambda: len(one.blocks.disk) == 3)
    async with store(tmp_path, blocks=8, disk_blocks=0) as one:
        assert len(one.blocks.held) == 0
    async with store(blocks=8) as one:
        await sender.fill(one, prompt_of(4))
        every = [FleetKnowledge(asyncio.get_running_loop().time, 60.0) for _ in range(2)]
        following = list[asyncio.Task[None]]()
        try:
            for knowledge in every:  # the second one comes later, and asks for a summary again
                knowledge.add("s")
                following.append(asyncio.create_task(follow_cache("s", one.engine.url, one.engine, knowledge)))
                await until(lambda known=knowledge: matched(known, "s", prompt_of(4)) == 4 * SIZE)
                await sender.fill(one, prompt_of(2, seed=len(following)), salt="s")
            for knowledge in every:
                await until(lambda known=knowledge: matched(known, "s", prompt_of(2, seed=2), "s") == 2 * SIZE)
                assert matched(knowledge, "s", prompt_of(2, seed=1), "s") == 2 * SIZE
                assert matched(knowledge, "s", prompt_of(2, seed=1)) == 0
            await sender.fill(one, prompt_of(6, seed=3))  # evicts the first prompts
            for knowledge in every:
                await until(lambda known=knowledge: matched(known, "s", prompt_of(6, seed=3)) == 6 * SIZE)
                await until(lambda known=knowledge: matched(known, "s", prompt_of(4)) == 0)
                assert matched(knowledge, "s", prompt_of(2, seed=2), "s") == 2 * SIZE
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def test_windows_are_refused_by_name() -> None:
    groups = (CacheGroup("full_attention", 2), CacheGroup("sliding_window", 1, 128))
    with pytest.raises(BadRequest, match=r"layers of other kinds \(full_attention, sliding_window\); a store keeps KV"):
        layout_of(replace(MIRROR, layout=replace(LAYOUT, groups=groups)))
    with pytest.raises(BadRequest, match="mirror: e does not report the layout of its KV"):
        layout_of(replace(MIRROR, regions=()))
    layout_of(MIRROR)


def test_memory_for_less_than_a_few_blocks_is_refused() -> None:
    with pytest.raises(BadRequest, match="memory: 1000 bytes hold 0 blocks of 12288 bytes; give at least 8"):
        regions_for(MIRROR, 1000)
