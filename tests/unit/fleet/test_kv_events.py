"""What a fleet knows of an engine's cache follows the engine's KV events, over real sockets and through losses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.scheduling import load_scheduling
from tercet.decisions.scheduling.plugin import block_hashes
from tercet.fleet import EngineFleet, FleetKnowledge, FleetView, Member, Trace, kv_events
from tercet.fleet.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVInbox, at, follow_cache
from tercet.protocol import EngineUnreachable, KVEvents, MultiModalFeature, Request
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.fakes import FakeEngine

SIZE = 4


def payload(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, list(events)))


def stored(index: int, **fields: Any) -> BlockStored:
    """Block ``index`` of one prompt, whose token at each position is the position."""
    tokens = list(range(index * SIZE, (index + 1) * SIZE))
    parent = bytes([index - 1]) if index else None
    return BlockStored([bytes([index])], parent, tokens, SIZE, **fields)


def request(blocks: int = 8, salt: str | None = None) -> Request:
    return Request(seq_id="r", prompt=tuple(range(blocks * SIZE)), cache_salt=salt)


def known() -> FleetKnowledge:
    knowledge = FleetKnowledge(lambda: 0.0)
    knowledge.add("e")
    return knowledge


def cached(knowledge: FleetKnowledge, salt: str | None = None, adapter: str | None = None) -> int:
    asked = msgspec.structs.replace(request(salt=salt), adapter=adapter)
    return knowledge.cached_tokens("e", asked) // SIZE


@pytest.fixture
def knowledge() -> FleetKnowledge:
    return known()


# ---- the state machine -------------------------------------------------------------------------------------------


def test_blocks_come_and_go(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    assert not inbox.take(0, payload(stored(0), stored(1)))
    assert cached(knowledge) == 2
    assert not inbox.take(1, payload(BlockRemoved([bytes([1])])))
    assert cached(knowledge) == 1
    assert not inbox.take(2, payload(stored(1), stored(2)))
    assert cached(knowledge) == 3
    assert not inbox.take(3, payload(AllBlocksCleared()))
    assert cached(knowledge) == 0


@given(st.lists(st.integers(0, 7), max_size=20))
def test_a_replay_that_overlaps_is_applied_once(repeated: list[int]) -> None:
    knowledge = known()
    inbox = KVInbox("e", knowledge)
    for number in range(8):
        inbox.take_replayed(number, payload(stored(number)))
    for number in sorted(set(repeated)):  # what the publisher had in its queue for us meanwhile
        assert not inbox.take(number, payload(stored(number)))
    assert cached(knowledge) == 8


def test_a_gap_asks_for_a_replay_and_loses_nothing_if_there_is_one(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0)))
    assert inbox.take(2, payload(stored(2)))
    assert inbox.expected == 1
    inbox.take_replayed(1, payload(stored(1)))
    inbox.take_replayed(2, payload(stored(2)))
    assert cached(knowledge) == 3


def test_a_gap_that_stays_forgets_what_may_have_gone_unheard(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0)))
    assert inbox.take(5, payload(stored(1)))
    inbox.take_replayed(5, payload(stored(1)))
    assert cached(knowledge) == 0
    assert not inbox.take(6, payload(stored(0)))
    assert cached(knowledge) == 2, "block 1 was told of after the gap, and waited for the one before it"


def test_numbers_that_start_again_are_an_engine_that_did(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    for number in range(4):
        inbox.take(number, payload(stored(number)))
    assert inbox.take(2, payload(stored(0))), "batches 0 and 1 of the new engine are missing"
    assert cached(knowledge) == 0
    inbox.take_replayed(0, payload())
    inbox.take_replayed(1, payload())
    inbox.take_replayed(2, payload(stored(0)))
    assert cached(knowledge) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"group_idx": 1},
        {"lora_name": "adapter", "extra_keys": [["adapter", ["picture", 0]]]},
        {"ownership": "disk"},
        {"medium": "CPU"},
        {"medium": "STORAGE", "ownership": "kvcr"},
        {"medium": "cpu"},
        {"medium": "GPU", "locality": "REMOTE"},
        {"extra_keys": [[["picture", 0]]]},
        {"extra_keys": [["salt", ["picture", 0]]]},
    ],
)
def test_blocks_that_no_plain_prompt_would_find_are_left_out(knowledge: FleetKnowledge, fields: dict[str, Any]) -> None:
    KVInbox("e", knowledge).take(0, payload(stored(0, **fields)))
    assert cached(knowledge) == 0


LOWER = ({"medium": "CPU"}, {"medium": "STORAGE", "ownership": "kvcr"}, {"medium": "GPU", "locality": "REMOTE"})


@pytest.mark.parametrize("where", LOWER, ids=str)
def test_what_a_lower_tier_drops_is_on_the_device_all_the_same(
    knowledge: FleetKnowledge, where: dict[str, Any]
) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0, medium="GPU", locality="LOCAL"), stored(1, medium="GPU")))
    inbox.take(1, payload(stored(0, **where), BlockRemoved([bytes([0])], **where), BlockRemoved([bytes([1])], **where)))
    assert cached(knowledge) == 2
    inbox.take(2, payload(BlockRemoved([bytes([1])], medium="GPU")))
    assert cached(knowledge) == 1


@pytest.mark.parametrize("medium", ["CPU", "GPU", None])
def test_names_alone_and_blocks_of_other_sizes_end_nothing(knowledge: FleetKnowledge, medium: str | None) -> None:
    inbox = KVInbox("e", knowledge)
    named = BlockStored([bytes([0])], None, [], 0, medium=medium)
    larger = BlockStored([b"larger"], None, list(range(2 * SIZE)), 2 * SIZE, medium=medium)
    inbox.take(0, payload(named, stored(0), named, larger))
    assert not inbox.take(1, payload(stored(1), named))
    assert cached(knowledge) == 2


def test_a_name_alone_is_a_copy(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0), BlockStored([bytes([0])], None, [], 0)))
    inbox.take(1, payload(BlockRemoved([bytes([0])])))
    assert cached(knowledge) == 1


# ---- tiers -------------------------------------------------------------------------------------------------------


def by_tier(knowledge: FleetKnowledge) -> dict[str, int]:
    if SIZE not in knowledge.indexes:
        return {}
    found = knowledge.matched_by_tier(SIZE, block_hashes(request(), SIZE))
    row = knowledge.loads.row("e")
    return {tier: int(blocks[row]) for tier, blocks in found.items() if blocks[row]}


def named(index: int, **fields: Any) -> BlockStored:
    """What a lower tier may report: the block's name alone."""
    return BlockStored([bytes([index])], None, [], 0, **fields)


def test_a_block_counts_at_its_highest_tier(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(*(stored(index) for index in range(4))))
    assert by_tier(knowledge) == {"gpu": 4}
    on_cpu, on_disk = [named(index, medium="CPU") for index in range(3)], named(3, medium="STORAGE", ownership="fs")
    inbox.take(1, payload(*on_cpu, on_disk))
    assert by_tier(knowledge) == {"gpu": 4}
    inbox.take(2, payload(BlockRemoved([bytes([index]) for index in (1, 2, 3)], medium="GPU")))
    assert by_tier(knowledge) == {"gpu": 1, "cpu": 2, "storage": 1}
    assert cached(knowledge) == 1, "what can be sent is on the device"
    inbox.take(3, payload(BlockRemoved([bytes([2])], medium="CPU")))
    assert by_tier(knowledge) == {"gpu": 1, "cpu": 1}
    inbox.take(4, payload(stored(2)))
    assert by_tier(knowledge) == {"gpu": 1, "cpu": 2, "storage": 1}, "behind a gap on the device"
    inbox.take(5, payload(AllBlocksCleared()))
    assert by_tier(knowledge) == {}


def test_what_another_machine_has_is_on_no_tier_of_this_engine(knowledge: FleetKnowledge) -> None:
    KVInbox("e", knowledge).take(0, payload(stored(0), stored(1, medium="STORAGE", locality="REMOTE")))
    assert by_tier(knowledge) == {"gpu": 1}


def test_a_removed_engine_leaves_nothing_on_any_tier(knowledge: FleetKnowledge) -> None:
    KVInbox("e", knowledge).take(0, payload(stored(0), named(0, medium="CPU")))
    knowledge.remove("e")
    assert not knowledge.indexes
    assert not any(knowledge._down_to.values())
    assert not knowledge._tiered


@given(
    st.lists(
        st.tuples(st.sampled_from(["GPU", "CPU", "STORAGE"]), st.integers(0, 5), st.booleans(), st.booleans()),
        max_size=40,
    )
)
def test_tiers_are_what_a_plain_count_finds(steps: list[tuple[str, int, bool, bool]]) -> None:
    knowledge, media = known(), ["GPU", "CPU", "STORAGE"]
    inbox, held = KVInbox("e", knowledge), {medium: set[int]() for medium in media}
    for number, (medium, index, name_alone, goes) in enumerate(steps):
        higher = set[int]().union(*(held[each] for each in media[: media.index(medium)]))
        events: list[BlockStored | BlockRemoved] = []
        if index in held[medium]:
            if goes:
                held[medium].discard(index)
                events = [BlockRemoved([bytes([index])], medium=medium)]
        else:
            held[medium].add(index)
            events = [(named if name_alone and index in higher else stored)(index, medium=medium)]
        inbox.take(number, payload(*events))
    expected, so_far, reached = dict[str, int](), set[int](), 0
    for medium in media:
        so_far |= held[medium]
        until = next(index for index in range(7) if index not in so_far)
        if until > reached:
            expected[medium.lower()] = until - reached
        reached = max(reached, until)
    assert by_tier(knowledge) == (expected if SIZE in knowledge.indexes else {})


def test_a_lower_tier_is_worth_less_than_the_device(tmp_path: Path) -> None:
    """Of two engines with the whole prompt, the one with it on its device gets it; storage alone is worth little."""
    path = tmp_path / "scheduling.yaml"
    profile = "{name: p, plugins: [{pluginRef: precise-prefix-cache-scorer}]}"
    path.write_text(f"plugins: [{{type: precise-prefix-cache-scorer}}]\nschedulingProfiles: [{profile}]\n")
    fleet = EngineFleet(
        [Member(name, "", "both", FakeEngine(name)) for name in ("d", "c", "s")], scheduling=load_scheduling(path)
    )  # fmt: skip
    for name, medium in (("d", "GPU"), ("c", "CPU"), ("s", "STORAGE")):
        blocks = [stored(index) for index in range(8)]
        lower = [stored(index, medium=medium) for index in range(8)] if medium != "GPU" else []
        gone = [BlockRemoved([bytes([index]) for index in range(8)], medium="GPU")] if lower else []
        KVInbox(name, fleet.knowledge).take(0, payload(*blocks, *lower, *gone))
    trace = Trace()
    with FleetView(fleet, trace).pick(by="p", request=request()) as picked:
        assert picked.name == "d"
    assert trace.picks[0].scores == {"d": 1.0, "c": pytest.approx(0.8), "s": pytest.approx(0.3)}
    assert trace.picks[0].tiers == {}
    fleet.drain("d")
    with FleetView(fleet, trace).pick(by="p", request=request()) as picked:
        assert picked.name == "c"
    assert (trace.picks[1].predicted, trace.picks[1].tiers) == (8 * SIZE, {"cpu": 8 * SIZE})


UNREAD = [
    {"type": "BlockPinned", "block_hashes": [b"x"]},
    {"type": "BlockStored", "block_hashes": [b"x"], "parent_block_hash": None, "token_ids": None, "block_size": 4},
    {"type": "BlockStored", "block_hashes": [b"x"], "parent_block_hash": None, "token_ids": [1], "block_size": -1},
]


@pytest.mark.parametrize("unread", UNREAD, ids=["newer", "no tokens", "less than none"])
def test_an_event_that_is_not_read_says_nothing(
    knowledge: FleetKnowledge, unread: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = KVInbox("e", knowledge)
    for number in range(3):
        inbox.take(number, msgspec.msgpack.encode([0.0, [unread, stored(number), unread]]))
    assert cached(knowledge) == 3
    assert len(caplog.records) == 1


def test_after_a_removal_that_is_not_read_nothing_is_believed(knowledge: FleetKnowledge) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0), stored(1)))
    inbox.take(1, msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": "?"}, stored(0)]]))
    assert cached(knowledge) == 1


@pytest.mark.parametrize("kind", ["mamba", "sliding_window_mla", "chunked_local_attention"])
def test_layers_that_keep_little_are_followed_until_others_are_told_of(knowledge: FleetKnowledge, kind: str) -> None:
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0, group_idx=0, kv_cache_spec_kind=kind)))
    assert cached(knowledge) == 1
    inbox.take(1, payload(stored(1, group_idx=0, kv_cache_spec_kind=kind)))
    inbox.take(2, payload(stored(0, group_idx=1, kv_cache_spec_kind="mla_attention")))
    assert cached(knowledge) == 1, "what the first ones hold is not looked at any more"


def test_of_several_kinds_of_layers_those_count_that_look_back_at_all_tokens(knowledge: FleetKnowledge) -> None:
    """A window's blocks go when the window has left them, and the context is cached all the same."""
    inbox = KVInbox("e", knowledge)
    groups = {0: "sliding_window", 1: "full_attention"}
    inbox.take(0, payload(*(stored(0, group_idx=at, kv_cache_spec_kind=kind) for at, kind in groups.items())))
    inbox.take(1, payload(BlockRemoved([bytes([0])], group_idx=0)))
    assert cached(knowledge) == 1
    inbox.take(2, payload(BlockRemoved([bytes([0])], group_idx=1)))
    assert cached(knowledge) == 0


def test_blocks_of_a_picture_are_found_with_that_picture_alone() -> None:
    """vLLM names a picture in each block that it is in, with its place there, and a salt behind it."""
    digest = "0123456789abcdef" * 4
    told = [stored(0, extra_keys=[[[digest, 2], "salt"]]), stored(1, extra_keys=[[[digest, -2]]]), stored(2)]
    knowledge = known()
    KVInbox("e", knowledge).take(0, payload(*told))

    def found(**fields: Any) -> int:
        named = {"modality": "image", "digest": digest, "offset": 2, "length": 5, **fields}
        feature = msgspec.convert(named, MultiModalFeature)
        asked = msgspec.structs.replace(request(salt="salt"), mm_features=(feature,))
        return knowledge.cached_tokens("e", asked) // SIZE

    assert found() == 3
    assert found(length=7) == 2
    assert found(digest="f" * 64) == found(offset=1) == cached(knowledge, "salt") == 0


def test_layers_with_a_window_count_where_there_are_no_others(knowledge: FleetKnowledge) -> None:
    KVInbox("e", knowledge).take(0, payload(stored(0, group_idx=0, kv_cache_spec_kind="sliding_window")))
    assert cached(knowledge) == 1


def test_blocks_of_an_adapter_are_found_for_that_adapter_alone(knowledge: FleetKnowledge) -> None:
    """vLLM puts the adapter's name first into the keys of every block, and a salt behind it into the first one's."""
    of_a = {"lora_name": "a", "extra_keys": [["a", "salt"]]}
    KVInbox("e", knowledge).take(0, payload(stored(0, **of_a), stored(1, lora_name="a", extra_keys=[["a"]])))
    assert cached(knowledge) == cached(knowledge, "salt") == 0
    assert cached(knowledge, "salt", "b") == cached(knowledge, None, "a") == 0
    assert cached(knowledge, "salt", "a") == 2


def test_salted_blocks_are_found_with_their_salt(knowledge: FleetKnowledge) -> None:
    KVInbox("e", knowledge).take(0, payload(stored(0, extra_keys=[["salt"]]), stored(1, extra_keys=[None])))
    assert cached(knowledge) == 0
    assert cached(knowledge, "salt") == 2


@given(st.binary(max_size=60))
def test_garbage_is_an_error_and_changes_nothing(garbage: bytes) -> None:
    knowledge = known()
    inbox = KVInbox("e", knowledge)
    inbox.take(0, payload(stored(0)))
    with suppress(msgspec.MsgspecError):
        inbox.take(1, garbage)
    assert cached(knowledge) <= 1


def test_anywhere_is_where_the_engine_is() -> None:
    found = at(KVEvents("tcp://0.0.0.0:5557", "tcp://[::]:5558", "t"), "http://10.0.0.5:8000")
    assert (found.endpoint, found.replay) == ("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558")
    assert at(KVEvents("tcp://10.1.1.1:5557"), "http://h:1").endpoint == "tcp://10.1.1.1:5557"


# ---- over sockets ------------------------------------------------------------------------------------------------


class Publisher:
    """An engine that publishes, as vLLM does; ``quietly`` makes a batch that only a replay has."""

    def __init__(self, epoch: str = "a") -> None:
        context = zmq.asyncio.Context.instance()
        self._live: Any = context.socket(zmq.PUB)
        self._replay: Any = context.socket(zmq.ROUTER)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:*")
        self.address = KVEvents(
            self._live.getsockopt_string(zmq.LAST_ENDPOINT),
            self._replay.getsockopt_string(zmq.LAST_ENDPOINT),
            epoch=epoch,
        )
        self._numbers = itertools.count()
        self._batches: list[tuple[bytes, bytes]] = []
        self._repeating = asyncio.create_task(self._repeat())

    def quietly(self, *events: Any) -> tuple[bytes, bytes]:
        batch = next(self._numbers).to_bytes(8, "big"), payload(*events)
        self._batches.append(batch)
        return batch

    async def publish(self, *events: Any) -> None:
        await self._live.send_multipart([b"", *self.quietly(*events)])

    async def _repeat(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            for number, batch in self._batches:
                if number >= start:
                    await self._replay.send_multipart([client, b"", b"", number, batch])
            await self._replay.send_multipart([client, b"", b"", kv_events.END_OF_REPLAY, b""])

    async def close(self) -> None:
        self._repeating.cancel()
        await asyncio.wait({self._repeating})
        self._live.close()
        self._replay.close()


class Engine:
    """As much of an engine as is asked."""

    def __init__(self, found: KVEvents | None) -> None:
        self.found = found
        self.down = False
        self.anew = asyncio.Event()

    def restart(self, found: KVEvents | None) -> None:
        """Another start of it has been met."""
        self.found, self.down = found, False
        self.anew.set()

    async def status(self) -> Any:
        if self.down:
            raise EngineUnreachable("down")
        return type("Status", (), {"kv_events": self.found})


@asynccontextmanager
async def followed(engine: Engine, knowledge: FleetKnowledge) -> AsyncGenerator[None]:
    task = asyncio.create_task(follow_cache("e", "http://127.0.0.1:1", engine, knowledge, engine.anew))  # type: ignore[arg-type]
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "RETRY_DELAY_S", 0.05)


async def test_what_was_stored_before_and_what_is_lost_on_the_way_is_replayed() -> None:
    publisher, knowledge = Publisher(), known()
    publisher.quietly(stored(0))
    async with followed(Engine(publisher.address), knowledge):
        await until(lambda: cached(knowledge) == 1)
        publisher.quietly(stored(1))

        async def heard(blocks: int, *events: Any) -> None:
            while cached(knowledge) < blocks:  # a subscription takes its time to be known to the publisher
                await publisher.publish(*events)
                await asyncio.sleep(0.02)

        await asyncio.wait_for(heard(3, stored(2)), LONGEST_WAIT_S)
        publisher.quietly(stored(3))
        await asyncio.wait_for(heard(5, stored(4)), LONGEST_WAIT_S)
    await publisher.close()


async def test_a_restart_forgets_and_follows_the_new_one() -> None:
    old, new, knowledge = Publisher("a"), Publisher("b"), known()
    old.quietly(stored(0), stored(1))
    new.quietly(stored(0))
    engine = Engine(old.address)
    async with followed(engine, knowledge):
        await until(lambda: cached(knowledge) == 2)
        engine.down = True
        await old.close()
        engine.restart(new.address)
        await until(lambda: cached(knowledge) == 1)
        engine.restart(None)
        await until(lambda: cached(knowledge) == 0)
    await new.close()


async def test_an_engine_that_publishes_nothing_is_left_alone(knowledge: FleetKnowledge) -> None:
    knowledge.store("e", SIZE, [b"x"], None, list(range(SIZE)))
    async with followed(Engine(None), knowledge):
        await asyncio.sleep(0.2)
    assert cached(knowledge) == 1


async def test_garbage_on_the_socket_starts_over() -> None:
    publisher, knowledge = Publisher(), known()
    publisher.quietly(stored(0))
    async with followed(Engine(publisher.address), knowledge):
        await until(lambda: cached(knowledge) == 1)
        for _ in range(20):
            await publisher._live.send_multipart([b"", b"not a number"])  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        publisher.quietly(stored(1))
        await publisher._live.send_multipart([b"", b"not a number"])  # pyright: ignore[reportPrivateUsage]
        await until(lambda: cached(knowledge) == 2)
    await publisher.close()
