"""What a move of a running sequence costs its client, beside two other ways to get it to another engine.

``live`` is :func:`tercet.migration.migrate`. ``blocking`` stops at the source first, then sends all KV and goes on;
``recompute`` stops at the source and has the destination compute everything anew.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import msgspec

from tercet.client import HttpEngine
from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.fleet.moving import MovingSequence
from tercet.fleet.trace import Generation, TracedEngine
from tercet.migration import Stage, migrate
from tercet.protocol import Output, OutputStream, Request
from tercet.settings import MoveSettings, RetryBudget
from tercet.streams import StreamListener

SOURCE, DESTINATION = "source", "destination"
MOVED_AFTER = 12
"""Tokens of output before the move; the gaps between them are what the pause is compared with."""
TOKENS_AFTER = 24
# Token ids of any vocabulary that is not tiny.
VOCABULARY = range(1000, 20_000)

Way = Callable[["Watched", TracedEngine, MoveSettings], Awaitable[tuple[Stage, ...]]]


class MoveCost(msgspec.Struct, frozen=True):
    """One move of a sequence of ``length`` tokens; seconds.

    ``pause`` is the longest gap between two tokens around the move, less the median gap (``step``) of the tokens
    before it. ``bystander`` is the median gap of another sequence on the source while the move was under way, over that
    of the time before; None if too few tokens came meanwhile.
    """

    way: str
    length: int
    pause: float
    step: float
    stages: tuple[Stage, ...]
    bystander: float | None


class Watched:
    """A sequence that an engine generates, and when each of its tokens came."""

    def __init__(self, fleet: EngineFleet, length: int, tokens: int, seed: int) -> None:
        prompt = tuple(random.Random(seed).choices(VOCABULARY, k=length))
        params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.request = Request(seq_id=f"bench-{uuid.uuid4().hex}", prompt=prompt, sampling_params=params)
        self._clock = fleet.costs.clock
        self.sequence = RunningSequence(self.request, "bench", RetryBudget(), self._clock())
        self.at: list[float] = []
        self._more = asyncio.Event()
        self._fleet = fleet.traced(Trace(), self.sequence.generates)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """While entered, it is generated, at the source to begin with."""
        self._running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        with self._fleet.engine(SOURCE) as engine:
            await engine.start_generate(self.request).run(self._take)

    def _take(self, output: Output) -> None:
        now = self._clock()
        self.sequence.record(output, now)
        self.at += [now] * len(output.token_ids)
        self._more.set()

    async def until(self, tokens: int) -> None:
        """Return once so many tokens have come, or it is over; raises what it failed with."""
        while len(self.at) < tokens and not self._running.done():
            self._more.clear()
            more = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({self._running, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        if self._running.done():
            self._running.result()

    @property
    def generation(self) -> Generation:
        """What an engine does for it now."""
        return MovingSequence(self.sequence).generation

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens of those that came then."""
        times = [at for at in self.at if begin <= at <= end]
        return [after - before for before, after in pairwise(times)]


async def live(watched: Watched, to: TracedEngine, settings: MoveSettings) -> tuple[Stage, ...]:
    """Stages while the source decodes, then the cut-over."""
    return await migrate(MovingSequence(watched.sequence), to, settings)


async def blocking(watched: Watched, to: TracedEngine, settings: MoveSettings) -> tuple[Stage, ...]:
    """The source stops; then all KV is sent, and the destination goes on."""
    stages: list[Stage] = []
    generation, moving = watched.generation, MovingSequence(watched.sequence)

    async def produce(stream: OutputStream) -> None:
        context, tokens = moving.context(), tuple(generation.tokens)
        request = msgspec.structs.replace(watched.request, seq_id=context.seq_id)
        async with to.prep_recv(context) as space:
            stages.append(Stage.of(await generation.engine.remote_send(context, space, space.matched_len)))
            await to.start_generate(request, request.num_tokens, tokens).run(stream.put)

    await _hand_over(watched, generation, OutputStream(produce))
    return tuple(stages)


async def recompute(watched: Watched, to: TracedEngine, settings: MoveSettings) -> tuple[Stage, ...]:
    """The source stops; the destination computes prompt and output so far, and goes on."""
    generation = watched.generation
    request = msgspec.structs.replace(watched.request, seq_id=f"{watched.request.seq_id}.anew")
    produce = OutputStream(lambda stream: to.start_generate(request, 0, tuple(generation.tokens)).run(stream.put))
    await _hand_over(watched, generation, produce)
    return ()


async def _hand_over(watched: Watched, generation: Generation, following: OutputStream) -> None:
    before = len(watched.at)
    if generation.stream is not None:
        generation.stream.hand_over(lambda: following)
    await watched.until(before + 2)


WAYS: dict[str, Way] = {"live": live, "blocking": blocking, "recompute": recompute}


async def measure_moves(
    source: str,
    destination: str,
    lengths: list[int],
    rounds: int,
    settings: MoveSettings,
    note: Callable[[str], object],
) -> list[MoveCost]:
    """Every way once in each round, in turn, for each length, between the engines with these URLs.

    Raises :class:`~tercet.protocol.TercetError`.
    """
    found: list[MoveCost] = []
    async with _fleet(source, destination) as fleet:
        for turn in range(rounds):
            for length in lengths:
                for name in WAYS:
                    note(f"round {turn + 1} of {rounds}: {name}, {length} tokens")
                    found.append(await measure_move(fleet, name, length, settings, seed=len(found)))
    return found


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
    """One move, in the way of that name, between the engines called source and destination."""
    watched = Watched(fleet, length, MOVED_AFTER + TOKENS_AFTER, seed)
    bystander = Watched(fleet, 64, 1500, seed + 1_000_000)
    async with bystander.running():
        await bystander.until(4)
        async with watched.running():
            await watched.until(MOVED_AFTER)
            begin = fleet.costs.clock()
            to = fleet.destination(watched.generation, DESTINATION)
            stages = await WAYS[name](watched, to, settings)
            end = fleet.costs.clock()
            await watched.until(MOVED_AFTER + TOKENS_AFTER)
    step = statistics.median(watched.gaps(0, begin))
    pause = max(watched.gaps(begin - step, end + 2 * step)) - step
    calm, busy = bystander.gaps(watched.at[0], begin), bystander.gaps(begin, end)
    slowed = statistics.median(busy) / statistics.median(calm) if len(busy) > 2 and calm else None
    return MoveCost(name, length, pause, step, stages, slowed)
