"""The cost of a move of a running sequence for its client and for other sequences, compared with two other ways.

``live`` is :func:`tercet.decisions.migration.migrate`. ``blocking`` stops at the source first, then sends all KV and
continues; ``recompute`` stops at the source and lets the destination compute everything again.

Two controls move nothing. ``stay`` leaves the sequence at the source: its results are the noise of the other results.
``there`` has the sequence at the destination from the begin, so that the batches of both engines are those after a
move; this is needed because the time of a step depends on its batch, but not in proportion.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, pairwise
from typing import Literal, NamedTuple

import msgspec

from tercet.decisions.migration import Stage, migrate
from tercet.fleet import EngineFleet, FleetView, Member, RunningSequence, Trace
from tercet.fleet.fleet_view import Generation, TracedEngine
from tercet.fleet.sequences import MovingSequence
from tercet.protocol import Engine, Output, OutputStream, Request
from tercet.settings import MoveSettings, RetryBudget
from tercet.wire.client import HttpEngine, StreamListener

SOURCE: Literal["source"] = "source"
DESTINATION: Literal["destination"] = "destination"
MOVED_AFTER = 24
"""Number of output tokens before the move. The pause is compared with the gaps between them."""
TOKENS_AFTER = 24
STAYS_FOR = 4.0
"""Largest duration of the control ``stay``, in steps; its duration is random, and at least half of this."""
THERE = "there"
BYSTANDERS = 2
"""Number of sequences on each engine that are not moved, so that both engines decode all the time."""
# Token ids that every vocabulary has, except tiny ones.
VOCABULARY = range(1000, 20_000)

Way = Callable[["Watched", TracedEngine, MoveSettings], Awaitable["Moved"]]
Side = Literal["source", "destination"]


class BystanderGaps(msgspec.Struct, frozen=True):
    """The gaps between tokens of a sequence that stays on an engine, in seconds: the engine's steps.

    They are ``before`` the move, ``during`` it, up to the cut-over (including gaps that overlap), and ``after`` it.
    """

    engine: Side
    before: list[float]
    during: list[float]
    after: list[float]


class MoveCost(msgspec.Struct, frozen=True):
    """The cost of one move of a sequence of ``length`` tokens, in seconds.

    ``pause`` is the longest gap between two tokens around the move, minus the median gap (``step``) of the tokens
    before it. It may be negative by chance.
    """

    way: str
    length: int
    pause: float
    step: float
    stages: tuple[Stage, ...]
    bystanders: tuple[BystanderGaps, ...]


class Moved(NamedTuple):
    """The stages of a move, and the time ``cut_over``, from which on the source no longer works on the sequence."""

    stages: tuple[Stage, ...]
    cut_over: float


class NotedMove(MovingSequence):
    """A sequence that is being moved. ``cut_over_at`` is the time at which the cut-over began."""

    cut_over_at = 0.0

    async def cut_over(self, to: Engine, begin: int) -> None:
        self.cut_over_at = self.engine.costs.clock()
        await super().cut_over(to, begin)


class Watched:
    """A sequence that an engine generates, with the times of its tokens in ``at``."""

    def __init__(self, fleet: EngineFleet, length: int, tokens: int, seed: int, engine: Side = SOURCE) -> None:
        prompt = tuple(random.Random(seed).choices(VOCABULARY, k=length))
        params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.request = Request(seq_id=f"bench-{uuid.uuid4().hex}", prompt=prompt, sampling_params=params)
        self.clock = fleet.costs.clock
        self.engine: Side = engine
        self.sequence = RunningSequence(self.request, "bench", RetryBudget(), self.clock())
        self.at: list[float] = []
        self._more = asyncio.Event()
        self._fleet = FleetView(fleet, Trace(), self.sequence.generates)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Generate the sequence while the context is open; it begins on ``engine``."""
        self._running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        with self._fleet.engine(self.engine) as engine:
            await engine.start_generate(self.request).run(self._take)

    def _take(self, output: Output) -> None:
        now = self.clock()
        self.sequence.record(output, now)
        self.at += [now] * len(output.token_ids)
        self._more.set()

    async def until(self, tokens: int) -> None:
        """Return when ``tokens`` tokens have arrived or the sequence has ended. Raise its error."""
        while len(self.at) < tokens and not self._running.done():
            self._more.clear()
            more = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({self._running, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        if self._running.done():
            self._running.result()

    @property
    def generation(self) -> Generation:
        """Present generation of the sequence on an engine."""
        return MovingSequence(self.sequence).generation

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps between tokens that both arrived in this time, in seconds."""
        return [after - before for before, after in pairwise(self.at) if begin <= before and after <= end]

    def gaps_touching(self, begin: float, end: float) -> list[float]:
        """Return the gaps between tokens that overlap with this time, in seconds."""
        return [after - before for before, after in pairwise(self.at) if before < end and begin < after]


async def live(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Move the sequence live: stages while the source decodes, then the cut-over."""
    move, stages = NotedMove(watched.sequence), list[Stage]()
    await migrate(move, to, settings, stages)
    return Moved(tuple(stages), move.cut_over_at)


async def blocking(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Stop the sequence at the source, send all its KV, and continue at the destination."""
    found: list[Moved] = []
    generation, moving = watched.generation, MovingSequence(watched.sequence)

    async def produce(stream: OutputStream) -> None:
        context, tokens = moving.context(), tuple(generation.tokens)
        request = msgspec.structs.replace(watched.request, seq_id=context.seq_id)
        async with to.prep_recv(context) as space:
            sent = await generation.engine.remote_send(context, space, space.matched_len)
            found.append(
                Moved((Stage(sent.begin, sent.end, sent.bytes, sent.seconds, sent.transport),), watched.clock())
            )
            await to.start_generate(request, request.num_tokens, tokens).run(stream.put)

    await _hand_over(watched, generation, OutputStream(produce))
    return found[0]


async def recompute(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Stop the sequence at the source; the destination computes prompt and output so far again, and continues."""
    generation = watched.generation
    request = msgspec.structs.replace(watched.request, seq_id=f"{watched.request.seq_id}.anew")
    produce = OutputStream(lambda stream: to.start_generate(request, 0, tuple(generation.tokens)).run(stream.put))
    await _hand_over(watched, generation, produce)
    return Moved((), watched.at[-2])


async def stay(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Wait for about the time of a live move, until a random moment within a step, as a cut-over is."""
    step = statistics.median(watched.gaps(0, watched.clock()))
    await asyncio.sleep(step * STAYS_FOR * random.Random(watched.request.prompt[0]).uniform(0.5, 1.0))
    return Moved((), watched.clock())


async def _hand_over(watched: Watched, generation: Generation, following: OutputStream) -> None:
    before = len(watched.at)
    if generation.stream is not None:
        generation.stream.hand_over(lambda: following)
    await watched.until(before + 2)


MOVES: dict[str, Way] = {"live": live, "blocking": blocking, "recompute": recompute}
WAYS: dict[str, Way] = MOVES | {"stay": stay, THERE: stay}


async def measure_moves(
    source: str,
    destination: str,
    lengths: Sequence[int],
    ways: Sequence[str],
    rounds: int,
    settings: MoveSettings,
    note: Callable[[str], object],
) -> AsyncGenerator[MoveCost]:
    """Measure each of the ``ways`` once per round and length, between the engines with these URLs. Yield the costs.

    Raise :class:`~tercet.protocol.TercetError` if an engine fails.
    """
    # Different in each run, since engines have the prompts of earlier runs cached.
    seeds = count(random.SystemRandom().randrange(2**32))
    async with _fleet(source, destination) as fleet:
        for turn in range(rounds):
            for length in lengths:
                for name in ways:
                    note(f"round {turn + 1} of {rounds}: {name}, {length} tokens")
                    yield await measure_move(fleet, name, length, settings, next(seeds))


@asynccontextmanager
async def _fleet(source: str, destination: str) -> AsyncGenerator[EngineFleet]:
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(StreamListener())
        members = [
            Member(name, url, "both", await stack.enter_async_context(HttpEngine(name, url, listener)))
            for name, url in ((SOURCE, source), (DESTINATION, destination))
        ]
        yield EngineFleet(members)


async def measure_move(fleet: EngineFleet, name: str, length: int, settings: MoveSettings, seed: int) -> MoveCost:
    """Measure one move in the way ``name``, between the engines named source and destination. Return its cost."""
    watched = Watched(fleet, length, MOVED_AFTER + 2 * TOKENS_AFTER, seed, DESTINATION if name == THERE else SOURCE)
    bystanders = [
        Watched(fleet, 64, 1500, seed + 1_000_000 * number, side)
        for number, side in enumerate((SOURCE, DESTINATION) * BYSTANDERS, 1)
    ]
    async with AsyncExitStack() as stack:
        for each in bystanders:
            await stack.enter_async_context(each.running())
            await each.until(4)
        await stack.enter_async_context(watched.running())
        await watched.until(MOVED_AFTER)
        began = watched.clock()
        to = fleet.destination(watched.generation, DESTINATION)
        moved = await WAYS[name](watched, to, settings)
        ended, there = watched.clock(), len(watched.at)
        await watched.until(there + TOKENS_AFTER)
    step = statistics.median(watched.gaps(0, began))
    pause = max(watched.gaps_touching(began, ended + step)) - step
    return MoveCost(name, length, pause, step, moved.stages, tuple(_beside(watched, bystanders, began, moved.cut_over)))


def _beside(watched: Watched, bystanders: list[Watched], began: float, cut_over: float) -> Iterator[BystanderGaps]:
    """Yield the gaps of the first sequence of each engine; other sequences get their tokens in the same steps."""
    for each in bystanders[:2]:
        before, after = each.gaps(watched.at[1], began), each.gaps(cut_over, watched.at[-1])
        yield BystanderGaps(each.engine, before, each.gaps_touching(began, cut_over), after)
