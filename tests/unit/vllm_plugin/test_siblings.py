"""Tercet's connector and its siblings as one: its order, its handshakes, its sends, and what its siblings must be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import NoSpace
from tercet.vllm_plugin import siblings
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.core.sibling_waits import HOLD_THEIR_BLOCKS, SiblingWaits, TierBlocks
from tercet.vllm_plugin.hooks import Code, Has
from tercet.vllm_plugin.siblings import MultiConnector, SiblingHandshakes

from .tiered_engine import HOST_TIER, TieredEngine, tier_with_files
from .tiny_engine import BLOCK, NUM_BLOCKS, send_of, tokens_of

CALLS = list[str]()


class Synchronous(KVConnectorBase_V1):
    """A sibling that loads in the step itself, as many tokens as `loads` says; it notes when it is asked."""

    loads = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, self.loads - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        CALLS.append("sibling plans")
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        CALLS.append(f"sibling gets {metadata}")


SYNCHRONOUS = {"kv_connector": "Synchronous", "kv_connector_module_path": __name__}


@pytest.fixture
def engine(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredEngine]:
    monkeypatch.setattr(Synchronous, "loads", 0)
    CALLS.clear()
    made = TieredEngine(config, [SYNCHRONOUS])
    yield made
    made.settle()
    status = made.status()
    assert (status["free_blocks"], status["leases"], status["sends"]) == (NUM_BLOCKS - 1, 0, 0)


def pushed(metadata: StepMetadata) -> tuple[int, list[str]]:
    return sum(len(push.blocks) for push in metadata.pushes), [each.send_id for each in metadata.finish]


# ---- one connector of several ----------------------------------------------------------------------------------


def test_siblings_plan_first(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = engine.side.plan
    monkeypatch.setattr(engine.side, "plan", lambda output: (CALLS.append("tercet plans"), plan(output))[1])
    engine.run(engine.add("x", tokens_of(20), max_tokens=1))
    assert CALLS[:2] == ["sibling plans", "tercet plans"]


class Hello(KVConnectorHandshakeMetadata):
    def __repr__(self) -> str:
        return "hello"


def test_each_connector_gets_its_own_handshakes(engine: TieredEngine) -> None:
    multi: Any = engine.scheduler.get_kv_connector()
    assert isinstance(multi, MultiConnector)
    (mine,) = engine.connector.handshakes
    multi.set_xfer_handshake_metadata_pp_aware({(0, 0): SiblingHandshakes((mine, Hello()))})
    assert CALLS == ["sibling gets {0: hello}"]
    assert engine.connector.handshakes == [mine]
    CALLS.clear()
    multi.set_xfer_handshake_metadata_pp_aware({(0, 1): SiblingHandshakes((mine, None))})
    assert CALLS == [], "a connector without handshakes is not called: by default it refuses stages"


# ---- synchronous loads ---------------------------------------------------------------------------------------------


def test_what_a_step_loads_is_sent_after_that_step(engine: TieredEngine) -> None:
    Synchronous.loads = 2 * BLOCK
    engine.add("x", tokens_of(3 * BLOCK), max_tokens=1, send=send_of("s", 0, 3 * BLOCK))
    output, metadata = engine.step()
    assert output.has_sync_kv_loads
    assert pushed(metadata) == (0, [])
    assert engine.push_longest(tokens_of(2 * BLOCK), send_of("other", 0, 2 * BLOCK)).end == 2 * BLOCK
    engine.end_send("other")
    assert not engine.is_idle
    assert pushed(engine.step()[1]) == (3, ["s"])
    engine.end_send("s")


def test_a_step_without_loads_sends_at_once(engine: TieredEngine) -> None:
    engine.add("x", tokens_of(3 * BLOCK), max_tokens=1, send=send_of("s", 0, 3 * BLOCK))
    assert pushed(engine.step()[1]) == (3, ["s"])
    engine.end_send("s")


def test_what_could_not_be_loaded_is_never_sent(engine: TieredEngine) -> None:
    Synchronous.loads = 2 * BLOCK
    request = engine.add("x", tokens_of(3 * BLOCK), max_tokens=1, send=send_of("s", BLOCK, 3 * BLOCK))
    engine.step(lambda _: engine.invalid.update(engine.blocks_of("x")[:1]))
    assert request.is_finished()
    Synchronous.loads = 0
    assert pushed(engine.step()[1]) == (0, []), "also what was computed from it, behind the block that failed"
    engine.end_send("s")


def test_what_is_computed_again_is_sent_then(engine: TieredEngine) -> None:
    Synchronous.loads = 2 * BLOCK
    engine.scheduler.recompute_kv_load_failures = True
    request = engine.add("x", tokens_of(3 * BLOCK), max_tokens=1, send=send_of("s", 0, 3 * BLOCK))
    engine.step(lambda _: engine.invalid.update(engine.blocks_of("x")[1:2]))
    assert not request.is_finished()
    probe = tokens_of(2 * BLOCK)
    assert engine.push_longest(probe, send_of("other", 0, 2 * BLOCK)).end == BLOCK, "before it is computed again"
    engine.end_send("other")
    assert pushed(engine.step()[1]) == (3, ["s"])
    assert engine.push_longest(probe, send_of("more", 0, 2 * BLOCK)).end == 2 * BLOCK
    engine.end_send("more")
    engine.end_send("s")


def test_a_reservation_does_not_count_what_could_not_be_loaded(engine: TieredEngine) -> None:
    Synchronous.loads = 2 * BLOCK
    engine.add("x", tokens_of(3 * BLOCK), max_tokens=1)
    reserved = list[Any]()

    def meanwhile(_: Any) -> None:
        reserved.append(core_methods.reserve(engine.core, "1" * 32, KeyedPrompt(tokens_of(2 * BLOCK))))
        engine.invalid.update(engine.blocks_of("x")[1:2])

    engine.step(meanwhile)
    Synchronous.loads = 0
    with pytest.raises(NoSpace, match="could not load what is counted as cached"):
        reserved[0].result(0)


# ---- what a tier has ----------------------------------------------------------------------------------------------


def stored(hashes: list[Any], medium: str) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=None, token_ids=[], block_size=BLOCK, lora_id=None,
        medium=medium, lora_name=None,
    )  # fmt: skip


def test_blocks_of_tiers_are_those_of_their_events() -> None:
    tiers, hashes = TierBlocks(), [BlockHash(bytes([each])) for each in range(4)]
    named = [maybe_convert_block_hash(each) for each in hashes]
    tiers.note([stored(named[1:], "CPU"), stored(named[2:], "FS")])
    assert [tiers.prefix(hashes, first) for first in (0, 1, 4)] == [0, 4, 4]
    tiers.note([BlockRemoved(block_hashes=[named[1], named[2]], medium="CPU")])
    assert tiers.prefix(hashes, 1) == 1
    assert tiers.prefix(hashes, 2) == 4, "another medium has it"
    tiers.note([AllBlocksCleared()])
    assert tiers.prefix(hashes, 2) == 2


def test_a_reservation_says_what_a_tier_has_and_its_request_loads_it(config: VllmConfig) -> None:
    engine, tokens = TieredEngine(config), tokens_of(6 * BLOCK)
    engine.run(engine.add("x", [*tokens, 5], max_tokens=1))
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    found = core_methods.reserve(engine.core, "1" * 32, KeyedPrompt(tokens)).result(0)
    assert (found.matched_len, found.tier_len) == (0, 6 * BLOCK)
    core_methods.release(engine.core, "1" * 32, 0)
    engine.run(engine.add("y", [*tokens[: 3 * BLOCK], 5], max_tokens=1))
    engine.settle()
    loaded = engine.loaded
    waiting = core_methods.reserve(engine.core, "2" * 32, KeyedPrompt(tokens))
    engine.granted("2" * 32, tokens, waiting)
    assert (waiting.result(0).matched_len, waiting.result(0).tier_len) == (3 * BLOCK, 6 * BLOCK)
    request = engine.add("z", [*tokens, 7], max_tokens=1, lease="2" * 32)
    engine.run(request)
    assert engine.loaded == loaded + 3, "nothing came under the lease, so the request takes the ordinary way"
    engine.settle()
    assert engine.wrong == []


@pytest.mark.parametrize("lost", [False, True])
def test_what_left_the_host_comes_back_from_files(config: VllmConfig, tmp_path: Path, lost: bool) -> None:
    """Files that are lost meanwhile cost the computation, and no request waits for them."""
    with closing(TieredEngine(config, [tier_with_files(tmp_path, chunks=6)])) as engine:
        tokens, others = tokens_of(6 * BLOCK), tokens_of(6 * BLOCK, start=500)
        for request_id, prompt in (("x", tokens), ("others", others)):
            engine.run(engine.add(request_id, [*prompt, 5], max_tokens=1))
            engine.settle()
        files = list(tmp_path.rglob("*.bin"))
        assert len(files) == 12
        assert engine.scheduler.reset_prefix_cache()
        found = core_methods.reserve(engine.core, "1" * 32, KeyedPrompt(tokens)).result(0)
        assert (found.matched_len, found.tier_len) == (0, 6 * BLOCK)
        core_methods.release(engine.core, "1" * 32, 0)
        for file in files if lost else []:
            file.unlink()
        again = engine.add("y", [*tokens, 7], max_tokens=1)
        engine.run(again)
        engine.settle()
        assert engine.loaded == (0 if lost else 6)
        assert engine.wrong == []
        assert engine.free_blocks == NUM_BLOCKS - 1


def test_a_context_that_the_host_has_no_room_for_is_computed_in_the_end(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's tier brings its blocks into the host's memory over one another, and defers the request for ever."""
    tokens = tokens_of(6 * BLOCK)
    with closing(TieredEngine(config, [tier_with_files(tmp_path, chunks=6)])) as engine:
        engine.run(engine.add("x", [*tokens, 5], max_tokens=1))
        engine.settle()
    monkeypatch.setattr(siblings, "LONGEST_LOOKUP", math.inf)
    with closing(TieredEngine(config, [tier_with_files(tmp_path, chunks=5)])) as engine:
        request = engine.add("y", [*tokens, 5], max_tokens=1)
        for _ in range(200):
            engine.step()
        assert not request.is_finished()
        monkeypatch.setattr(siblings, "LONGEST_LOOKUP", 0)
        engine.run(request)
        engine.settle()
        assert (engine.loaded, engine.wrong) == (0, [])
        assert engine.free_blocks == NUM_BLOCKS - 1


def test_who_waits_for_its_turn_is_not_let_before_by_a_slow_sibling(
    engine: TieredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "LONGEST_LOOKUP", 0)
    monkeypatch.setattr(engine.side.queue, "holds_back", lambda _: True)
    request = engine.add("x", tokens_of(20), max_tokens=1)
    engine.step()
    assert request.num_computed_tokens == 0
    monkeypatch.undo()
    engine.run(request)


# ---- seams of connectors that do not run here ------------------------------------------------------------------

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
HOLD_BY = {
    "ExampleConnector": Code(f"{V1}.example_connector:ExampleConnector.save_kv_layer", "safetensors.torch.save_file("),
    "SimpleCPUOffloadConnector": Code(
        "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler", "gpu_pool.touch(", "gpu_block_pool.touch("
    ),
    "MooncakeStoreConnector": Code(f"{V1}.mooncake.store.scheduler:MooncakeStoreScheduler", "pool.touch("),
    "MooncakeConnector": Code(
        f"{V1}.mooncake.mooncake_connector:MooncakeConnectorScheduler.request_finished", "return delay_free_blocks,"
    ),
    **{
        name: Code(f"{V1}.nixl.{kind}:{scheduler}.request_finished", "return delay_free_blocks,")
        for name, kind, scheduler in (
            ("NixlConnector", "pull_scheduler", "NixlPullConnectorScheduler"),
            ("NixlPullConnector", "pull_scheduler", "NixlPullConnectorScheduler"),
            ("NixlPushConnector", "push_scheduler", "NixlPushConnectorScheduler"),
        )
    },
}
"""Where the code of each connector that a lease does not wait for holds its blocks."""
KNOWN = [*HOLD_BY, "OffloadingConnector", "LMCacheConnectorV1"]


@pytest.mark.parametrize("name", HOLD_THEIR_BLOCKS)
def test_who_is_not_waited_for_holds_its_blocks(name: str) -> None:
    assert HOLD_BY[name].unmet() == ""


@pytest.mark.parametrize("name", KNOWN)
def test_the_class_has_what_the_siblings_rely_on(name: str) -> None:
    kind = KVConnectorFactory.get_connector_class_by_name(name)
    assert issubclass(kind, KVConnectorBase_V1)
    target = f"{kind.__module__}:{kind.__qualname__}"
    relied_on = ("take_events", "has_pending_push_work", "get_transfer_results", "get_block_ids_with_load_errors",
                 "get_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "reset_cache")  # fmt: skip
    assert Has(target, *relied_on).unmet() == ""
    assert kind.__init__.__code__.co_varnames[1:4] == ("vllm_config", "role", "kv_cache_config")


# No peer writes blocks that another connector still reads: vLLM's scheduler and offloading connector, a slow tier.

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


def test_without_the_wait_that_schedule_is_wrong(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiblingWaits, "_in_use", lambda *_: "")
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
    waits = engine.side.sibling_waits
    assert waits is not None
    waits._silent = [silent]
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


def test_without_the_wait_many_are_wrong(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiblingWaits, "_in_use", lambda *_: "")
    assert wrong_of(config, 100)[0] > 5
