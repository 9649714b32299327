"""No peer writes blocks that another connector still reads: vLLM's scheduler and offloading connector, a slow tier."""

from __future__ import annotations

import random
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import NoSpace
from tercet.vllm_plugin import siblings
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.fence import SiblingFence

from .tiered_engine import HOST_TIER, TieredEngine, tier_with_files
from .tiny_engine import BLOCK, NUM_BLOCKS, tokens_of

PEERS = "KV of a peer"
X = tokens_of(20 * BLOCK)


def ask(engine: TieredEngine, lease: str, tokens: list[int]) -> Future[ReservedBlocks]:
    return core_methods.reserve(engine.core, lease, KeyedPrompt(tokens))


def race(engine: TieredEngine) -> Future[ReservedBlocks]:
    """X holds most blocks, and L2 waits for them; when X ends, L2 has them, while X's store is still to be planned."""
    engine.reserve("1" * 32, tokens_of(5 * BLOCK, start=600))
    x = engine.add("x", [*X, 5], max_tokens=1)
    engine.step()
    l2 = ask(engine, "2" * 32, tokens_of(13 * BLOCK, start=2000))
    while not x.is_finished():
        assert not l2.done()
        engine.step()
    return l2


def finish(engine: TieredEngine, *leases: str) -> None:
    for lease in leases:
        engine.release(lease * 32)
    engine.settle()


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
def test_the_schedule_that_gave_wrong_tokens(config: VllmConfig, delay: int) -> None:
    engine = TieredEngine(config, delay=delay)
    l2 = race(engine)
    steps = 0
    while not l2.done():
        engine.step()
        steps += 1
    assert steps <= delay + 4
    engine.granted("2" * 32, tokens_of(13 * BLOCK, start=2000), l2)
    engine.write("2" * 32, PEERS)
    engine.settle()
    finish(engine, "1", "2")
    assert engine.stored >= 20
    again = engine.add("y", [*X, 7], max_tokens=1)
    engine.run(again)
    assert engine.loaded, "the tier has what the lease has displaced"
    assert engine.wrong == []


def test_without_the_fence_that_schedule_is_wrong(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiblingFence, "_in_use", lambda *_: "")
    engine = TieredEngine(config, delay=5)
    l2 = race(engine)
    engine.step()
    engine.granted("2" * 32, tokens_of(13 * BLOCK, start=2000), l2)
    engine.write("2" * 32, PEERS)
    engine.settle()
    assert engine.wrong


def test_who_waits_too_long_is_told_which_connector_it_is_and_holds_nothing(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=50)
    l2 = race(engine)
    for _ in range(5):
        engine.step()
    core_methods.give_up(engine.core, "2" * 32)
    with pytest.raises(NoSpace, match="in use by another KV connector of this engine: OffloadingConnector"):
        l2.result(0)
    assert engine.status()["leases"] == 1
    finish(engine, "1")
    assert engine.status()["free_blocks"] == NUM_BLOCKS - 1


def test_a_release_ends_that_wait_too(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=50)
    l2 = race(engine)
    with pytest.raises(Exception, match="is not held here"):
        core_methods.release(engine.core, "2" * 32, 0)
    assert isinstance(l2.exception(), NoSpace)
    finish(engine, "1")
    assert engine.wrong == []


def test_an_idle_engine_steps_until_the_reservation_is_answered(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=3)
    l2 = race(engine)
    while not l2.done():
        assert not engine.is_idle
        engine.step()
    engine.granted("2" * 32, tokens_of(13 * BLOCK, start=2000), l2)
    finish(engine, "1", "2")


def test_blocks_that_nothing_uses_are_answered_at_once(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=9)
    engine.run(engine.add("x", [*tokens_of(4 * BLOCK), 5], max_tokens=1))
    engine.step()  # the store is planned, and reads for nine steps
    assert not engine.is_idle
    assert ask(engine, "1" * 32, tokens_of(3 * BLOCK, start=900)).done()
    core_methods.release(engine.core, "1" * 32, 0)
    engine.settle()


def test_an_extension_waits_as_well(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=6)
    tokens = tokens_of(30 * BLOCK, start=2000)
    engine.reserve("1" * 32, tokens[: 5 * BLOCK])
    engine.run(engine.add("x", [*X, 5], max_tokens=1))
    later = core_methods.extend(engine.core, "1" * 32, KeyedPrompt(tokens[: 12 * BLOCK]))
    assert not later.done() or not _shares(engine, later)
    while not later.done():
        engine.step()
    assert len(later.result(0).blocks[0]) == 12
    engine.settle()
    finish(engine, "1")
    assert engine.wrong == []


def _shares(engine: TieredEngine, later: Future[ReservedBlocks]) -> bool:
    busy = {block for store in engine._stores for block in store[2]}
    return not busy.isdisjoint(later.result(0).blocks[0])


def test_a_reset_of_the_tier_keeps_leases_waiting_for_one_step(config: VllmConfig) -> None:
    engine = TieredEngine(config, delay=50)
    l2 = race(engine)
    engine.step()
    assert engine.scheduler.reset_connector_cache()
    assert not l2.done()
    engine.step()
    assert l2.done(), "the worker has ended the forgotten jobs before this step"
    engine.granted("2" * 32, tokens_of(13 * BLOCK, start=2000), l2)
    finish(engine, "1", "2")


class Silent:
    """A connector that says nothing of its blocks, but whether it works."""

    works = False

    def has_pending_push_work(self) -> bool:
        return self.works


def test_a_connector_that_says_nothing_is_waited_for_as_a_whole(config: VllmConfig) -> None:
    engine = TieredEngine(config)
    silent: Any = Silent()
    fence = engine.side.fence
    assert fence is not None
    fence._silent = [silent]
    engine.run(engine.add("x", [*tokens_of(4 * BLOCK), 5], max_tokens=1))
    silent.works = True
    l1 = ask(engine, "1" * 32, tokens_of(3 * BLOCK, start=900))
    engine.step()
    engine.step()
    assert not l1.done()
    silent.works = False
    engine.step()
    assert l1.done()
    core_methods.release(engine.core, "1" * 32, 0)
    engine.settle()


# ---- a thousand schedules ------------------------------------------------------------------------------------------


def play(engine: TieredEngine, chance: random.Random, first: int) -> None:
    """One random schedule: requests of a few prompts, leases that peers write at once, and stores of any length."""
    open_leases, waiting, requests = list[str](), dict[str, tuple[list[int], Future[Any]]](), list[Any]()
    for turn in range(chance.randint(8, 16)):
        engine.delay = chance.choice([0, 0, 1, 3, 8])
        kind = chance.random()
        start = first + 100 * chance.randint(0, 5)
        if kind < 0.45:
            tokens = [*tokens_of(chance.randint(2, 14) * BLOCK, start=start), 3]
            requests.append(engine.add(f"r{turn}-{chance.random()}", tokens, max_tokens=chance.randint(1, 3)))
        elif kind < 0.75:
            lease = f"{chance.getrandbits(128):032x}"
            tokens = tokens_of(chance.randint(2, 14) * BLOCK, start=start + 500_000)
            waiting[lease] = tokens, ask(engine, lease, tokens)
        elif kind < 0.85 and waiting:
            core_methods.give_up(engine.core, chance.choice([*waiting]))
        elif open_leases:
            engine.release(open_leases.pop(chance.randrange(len(open_leases))))
        for lease, (tokens, answer) in list(waiting.items()):
            if answer.done():
                del waiting[lease]
                if answer.exception() is None:
                    engine.granted(lease, tokens, answer)
                    engine.write(lease, PEERS)
                    open_leases.append(lease)
        engine.step()
    for lease in waiting:
        core_methods.give_up(engine.core, lease)
        if waiting[lease][1].exception() is None:
            core_methods.release(engine.core, lease, 0)
    for lease in open_leases:
        engine.release(lease)
    engine.settle()


def wrong_of(config: VllmConfig, schedules: int, tier: dict[str, Any] = HOST_TIER) -> tuple[int, int, int]:
    """How many of so many schedules, in a row on one engine, were wrong; how many blocks were stored and loaded."""
    with closing(TieredEngine(config, [tier])) as engine:
        wrong = 0
        for number in range(schedules):
            play(engine, random.Random(number), 1000 + 50 * number)
            wrong += bool(engine.wrong)
            engine.wrong.clear()
            assert engine.status()["leases"] == 0
            assert engine.status()["free_blocks"] == NUM_BLOCKS - 1
        return wrong, engine.stored, engine.loaded


def test_of_a_thousand_schedules_none_is_wrong(config: VllmConfig) -> None:
    wrong, stored, loaded = wrong_of(config, 1000)
    assert wrong == 0
    assert min(stored, loaded) > 1000, "the tier has had to do"


@pytest.mark.parametrize("chunks", [20, 6])
def test_of_schedules_with_loads_from_files_none_is_wrong(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """The host has no room for two prompts, so most of what is loaded was pushed out of it; or not even for one."""
    monkeypatch.setattr(siblings, "LONGEST_LOOKUP", 0.01)
    wrong, stored, loaded = wrong_of(config, 200, tier_with_files(tmp_path, chunks))
    assert wrong == 0
    assert min(stored, loaded) > 200
    assert len(list(tmp_path.rglob("*.bin"))) > 200


def test_without_the_fence_many_are_wrong(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiblingFence, "_in_use", lambda *_: "")
    assert wrong_of(config, 100)[0] > 5
