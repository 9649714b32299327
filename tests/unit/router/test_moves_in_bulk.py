"""Many sequences that move at once, in virtual time, where KV is scarce and clients leave when they like."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.aio.tasks import TaskSet
from tercet.fleet import EngineFleet, Member, Trace
from tercet.protocol import TercetError
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tercet.settings import MoveSettings
from tercet_lab.sim import SimEngine
from tests.unit.lab.sim.models import engines_of, is_empty, profile_of, request_of
from tests.virtual_time import in_virtual_time

pytestmark = pytest.mark.slow

STEP = 0.010
MANY = MoveSettings(at_once=64, per_engine=64, kv_usage=1.0)


@dataclass
class Bulk:
    """A service over simulated engines, and what every client has got."""

    engines: list[SimEngine]
    service: Service
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    outputs: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, metrics: Metrics, names: str, blocks: int, moves: MoveSettings) -> Bulk:
        profile = profile_of(blocks=blocks, speed=1e8)
        engines = engines_of(*names, profile=profile, stream_every=1)
        members = [Member(engine.name, "", "both", engine) for engine in engines]
        fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
        return cls(engines, Service(fleet, "data_parallel", {}, metrics, moves=moves))

    def ask(self, number: int, length: int, output: int) -> asyncio.Task[None]:
        """One client's request, which it reads to the end."""
        request = request_of(f"s{number}", length, output, first=number * 10_000)
        got = self.tokens[request.seq_id] = []
        self.outputs[request.seq_id] = output
        stream = self.service.run(request, Trace())
        return asyncio.create_task(stream.run(lambda each: got.extend(each.token_ids)), name=request.seq_id)

    def check(self, number: int, length: int, whole: bool) -> None:
        """The tokens are those of a sequence that stays, as far as they go."""
        request = request_of(f"s{number}", length, first=number * 10_000)
        right = self.engines[0].network.prompt(request.prompt, None, None).output(0, self.outputs[request.seq_id])
        got = self.tokens[request.seq_id]
        assert got == list(right[: len(got)])
        assert not whole or len(got) == len(right)

    async def check_that_nothing_is_left(self) -> None:
        await asyncio.sleep(1)
        assert [engine.reports() for engine in self.engines] == [[] for _ in self.engines]
        assert all(is_empty(engine) for engine in self.engines)
        assert [member.in_flight for member in self.service.fleet.members] == [0 for _ in self.engines]
        assert (len(self.service.sequences), len(self.service.moves.under_way)) == (0, 0)
        assert not any(move.outcome == "under_way" for move in self.service.moves.since(0))


@in_virtual_time
async def test_64_requests_move_back_and_forth_20_times(metrics: Metrics) -> None:
    bulk = Bulk.of(metrics, "ab", blocks=4000, moves=MANY)
    sizes = {number: 50 + 7 * number for number in range(64)}
    reading = [bulk.ask(number, length, 600) for number, length in sizes.items()]
    sequences = list[str]()
    while len(sequences) < 64:
        await asyncio.sleep(STEP)
        sequences = [each.request.seq_id for each in bulk.service.sequences if len(each.tokens) > 2]

    async def back_and_forth(seq_id: str) -> None:
        for _ in range(20):
            sequence = bulk.service.sequences.named(seq_id)
            destination = "b" if sequence.engine == "a" else "a"
            move = await bulk.service.moves.move(sequence, destination, "test")
            assert (move.outcome, sequence.engine) == ("moved", destination)

    await asyncio.gather(*(back_and_forth(seq_id) for seq_id in sequences))
    assert [sequence.moves for sequence in bulk.service.sequences] == [20] * 64
    assert [sequence.attempt for sequence in bulk.service.sequences] == [0] * 64
    await asyncio.gather(*reading)
    for number, length in sizes.items():
        bulk.check(number, length, whole=True)
    await bulk.check_that_nothing_is_left()


async def disorder(bulk: Bulk, seed: int) -> None:
    """Requests come, clients leave, moves begin and those who asked for them lose interest, all at random times."""
    chance = random.Random(seed)
    sizes = {number: chance.randint(20, 300) for number in range(14)}
    leaving, moves = set[str](), TaskSet()

    async def client(number: int, length: int) -> None:
        await asyncio.sleep(chance.uniform(0, 0.5))
        asked = bulk.ask(number, length, chance.randint(2, 150))
        if chance.random() < 0.3:
            leaving.add(asked.get_name())
            await asyncio.wait([asked], timeout=chance.uniform(0, 2))
            asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled() or asked.exception() is None

    async def move(seq_id: str, destination: str, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await bulk.service.moves.move(bulk.service.sequences.named(seq_id), destination, "test")
        except (TercetError, TimeoutError):
            pass  # it has ended, is moving already, there is no space, or nobody cares any more

    async def mover() -> None:
        while True:
            running = list(bulk.service.sequences)
            if running:
                patience = chance.uniform(0, 0.2) if chance.random() < 0.3 else 60.0
                destination = chance.choice(bulk.engines).name
                moves.spawn(move(chance.choice(running).request.seq_id, destination, patience))
            await asyncio.sleep(chance.expovariate(1 / 0.02))

    moving = asyncio.create_task(mover())
    await asyncio.gather(*(client(number, length) for number, length in sizes.items()))
    moving.cancel()
    await moves.wait(60)
    for number, length in sizes.items():
        bulk.check(number, length, whole=f"s{number}" not in leaving)


@settings(
    max_examples=settings().max_examples * 3 // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), blocks=st.integers(30, 120))
@in_virtual_time
async def test_nothing_is_lost_or_left_where_kv_is_scarce(metrics: Metrics, seed: int, blocks: int) -> None:
    bulk = Bulk.of(metrics, "abc", blocks, MANY)
    await disorder(bulk, seed)
    await bulk.check_that_nothing_is_left()


@pytest.mark.parametrize("seed", [1, 2])
@in_virtual_time
async def test_sequences_are_preempted_while_they_move(metrics: Metrics, seed: int) -> None:
    """What the test above is about happens in it."""

    bulk = Bulk.of(metrics, "abc", 32, MANY)
    await disorder(bulk, seed)
    assert sum(engine.counters.preemptions for engine in bulk.engines) > 0
    outcomes = [move.outcome for move in bulk.service.moves.since(0)]
    assert outcomes.count("moved") > 5
    assert outcomes.count("failed") > 0
