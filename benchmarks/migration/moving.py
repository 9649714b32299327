"""Cost of a move of a running sequence for its client and its neighbours, compared with two other ways.

``live`` is :func:`tercet.decisions.migration.migrate`. ``blocking`` stops at the source first, then sends all KV and
continues; ``recompute`` stops at the source and lets the destination compute everything again.

Two controls move nothing. ``stay`` leaves the sequence at the source: its result is the noise of the others' figures.
``there`` has it at the destination from the beginning, so that both engines' batches are always those after a move: a
step's time depends on its batch, and not in proportion.
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
from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.fleet.moving import MovingSequence
from tercet.fleet.trace import Generation, TracedEngine
from tercet.protocol import Engine, Output, OutputStream, Request
from tercet.settings import MoveSettings, RetryBudget
from tercet.wire.client import HttpEngine
from tercet.wire.streams import StreamListener

SOURCE: Literal["source"] = "source"
DESTINATION: Literal["destination"] = "destination"
MOVED_AFTER = 24
"""Tokens of output before the move; the pause is compared with the gaps between them."""
TOKENS_AFTER = 24
STAYS_FOR = 4.0
"""Most steps without an event for a sequence that is not moved; at least half of it."""
THERE = "there"
BYSTANDERS = 2
"""Sequences of either engine that are not moved, so that both decode all the time."""
# Token ids of any vocabulary that is not tiny.
VOCABULARY = range(1000, 20_000)

Way = Callable[["Watched", TracedEngine, MoveSettings], Awaitable["Moved"]]
Side = Literal["source", "destination"]


class BystanderGaps(msgspec.Struct, frozen=True):
    """Gaps between tokens of a sequence that stays on an engine, in seconds: the engine's steps.

    ``before`` the move, ``during`` it, up to the cut-over (including gaps that overlap), and ``after`` it.
    """

    engine: Side
    before: list[float]
    during: list[float]
    after: list[float]


class MoveCost(msgspec.Struct, frozen=True):
    """One move of a sequence of ``length`` tokens; seconds.

    ``pause`` is the longest gap between two tokens around the move, less the median gap (``step``) of the tokens before
    it; it may be negative by chance.
    """

    way: str
    length: int
    pause: float
    step: float
    stages: tuple[Stage, ...]
    bystanders: tuple[BystanderGaps, ...]


class Moved(NamedTuple):
    """What was sent, and the end: from ``cut_over`` on the source no longer works on the sequence."""

    stages: tuple[Stage, ...]
    cut_over: float


class NotedMove(MovingSequence):
    """A sequence during a move; ``cut_over_at`` is the time when the cut-over began."""

    cut_over_at = 0.0

    async def cut_over(self, to: Engine, begin: int) -> None:
        self.cut_over_at = self.engine.costs.clock()
        await super().cut_over(to, begin)


class Watched:
    """A sequence that an engine generates, with the times of its tokens."""

    def __init__(self, fleet: EngineFleet, length: int, tokens: int, seed: int, engine: Side = SOURCE) -> None:
        prompt = tuple(random.Random(seed).choices(VOCABULARY, k=length))
        params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.request = Request(seq_id=f"bench-{uuid.uuid4().hex}", prompt=prompt, sampling_params=params)
        self.clock = fleet.costs.clock
        self.engine: Side = engine
        self.sequence = RunningSequence(self.request, "bench", RetryBudget(), self.clock())
        self.at: list[float] = []
        self._more = asyncio.Event()
        self._fleet = fleet.traced(Trace(), self.sequence.generates)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Generate it while entered, at its engine to begin with."""
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
        """Return once ``tokens`` tokens have come, or it has ended; raises its error."""
        while len(self.at) < tokens and not self._running.done():
            self._more.clear()
            more = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({self._running, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        if self._running.done():
            self._running.result()

    @property
    def generation(self) -> Generation:
        """The present generation on an engine."""
        return MovingSequence(self.sequence).generation

    def gaps(self, begin: float, end: float) -> list[float]:
        """Gaps between tokens that came in this time, in seconds."""
        return [after - before for before, after in pairwise(self.at) if begin <= before and after <= end]

    def gaps_touching(self, begin: float, end: float) -> list[float]:
        """Gaps between tokens that overlap with this time, in seconds."""
        return [after - before for before, after in pairwise(self.at) if before < end and begin < after]


async def live(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Stages while the source decodes, then the cut-over."""
    move, stages = NotedMove(watched.sequence), list[Stage]()
    await migrate(move, to, settings, stages)
    return Moved(tuple(stages), move.cut_over_at)


async def blocking(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """The source stops; then all KV is sent, and the destination continues."""
    found: list[Moved] = []
    generation, moving = watched.generation, MovingSequence(watched.sequence)

    async def produce(stream: OutputStream) -> None:
        context, tokens = moving.context(), tuple(generation.tokens)
        request = msgspec.structs.replace(watched.request, seq_id=context.seq_id)
        async with to.prep_recv(context) as space:
            sent = await generation.engine.remote_send(context, space, space.matched_len)
            found.append(Moved((Stage(sent.begin, sent.begin).and_then(sent),), watched.clock()))
            await to.start_generate(request, request.num_tokens, tokens).run(stream.put)

    await _hand_over(watched, generation, OutputStream(produce))
    return found[0]


async def recompute(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """The source stops; the destination computes prompt and output so far, and continues."""
    generation = watched.generation
    request = msgspec.structs.replace(watched.request, seq_id=f"{watched.request.seq_id}.anew")
    produce = OutputStream(lambda stream: to.start_generate(request, 0, tuple(generation.tokens)).run(stream.put))
    await _hand_over(watched, generation, produce)
    return Moved((), watched.at[-2])


async def stay(watched: Watched, to: TracedEngine, settings: MoveSettings) -> Moved:
    """Nothing happens, for about the time of a live move; like its cut-over, the end is anywhere in a step."""
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
    """Each of the ``ways`` once in each round, in turn, for each length, between the engines with these URLs.

    Raises :class:`~tercet.protocol.TercetError`.
    """
    # Different in each run: engines that were measured before would have these prompts cached.
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
    """One move in the way ``name``, between the engines called source and destination."""
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
    """Gaps of the first sequence of either engine: the others have their tokens in the same steps."""
    for each in bystanders[:2]:
        before, after = each.gaps(watched.at[1], began), each.gaps(cut_over, watched.at[-1])
        yield BystanderGaps(each.engine, before, each.gaps_touching(began, cut_over), after)
