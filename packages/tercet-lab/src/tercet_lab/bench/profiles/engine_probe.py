"""The timing of requests to engines, directly or through a router, and the interference of two engines of one machine.

For the interference, one engine is measured while the other one sleeps, computes or lingers. An engine lingers when it
has no more work and its processes still poll without a pause, which keeps their cores busy.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count, pairwise
from typing import Literal

import aiohttp
import msgspec
import numpy as np

from tercet.protocol import BadRequest, Engine, EngineError, Output, Request
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import reason_of
from tercet_lab.bench.openai_client import Client, PreparedCall, Sampling, body_of, path_of
from tercet_lab.sim.step_times import HostSharing

# Token ids that every vocabulary has; in most vocabularies they are not special.
FIRST_ID, LAST_ID = 1000, 20_000
TOKENS = 16
TIMEOUT_SECONDS = 60.0


def names_from(chance: random.Random) -> Iterator[str]:
    """Return an endless iterator of unique sequence ids."""
    return (f"profile-{chance.getrandbits(64):x}-{index}" for index in count())


class Probe:
    """A client that sends requests to one engine and measures their times, in seconds."""

    def __init__(self, engine: Engine, chance: random.Random, names: Iterator[str]) -> None:
        self.engine = engine
        self._random = chance
        self._names = names
        self._clock = asyncio.get_running_loop().time

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """Return a random prompt that no cache has."""
        return tuple(self._random.choices(range(FIRST_ID, LAST_ID), k=tokens))

    def request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        """Return a request for exactly ``tokens`` output tokens."""
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return Request(seq_id=next(self._names), prompt=prompt, sampling_params=sampling)

    async def ttft(self, prompt: tuple[int, ...]) -> tuple[float, Output]:
        """Send a request for one token. Return the seconds until it arrived, and its output."""
        began = self._clock()
        async with aclosing(self.engine.start_generate(self.request(prompt, 1))) as outputs:
            first = await anext(outputs)
            return self._clock() - began, first

    async def token_times(self, prompt: tuple[int, ...], tokens: int) -> list[float]:
        """Generate ``tokens`` output tokens. Return the time of each, in seconds of the loop's clock."""
        times = list[float]()
        async with aclosing(self.engine.start_generate(self.request(prompt, tokens))) as outputs:
            async for output in outputs:
                times += [self._clock()] * len(output.token_ids)
        return times

    async def decode(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        """Measure decode steps of ``batch`` sequences, as :meth:`together` does.

        Each prompt has ``context`` tokens; at least ``steps`` steps decode the whole batch.
        """
        prompts = [self.fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self.ttft(prompt)  # from now on it is cached, so that all sequences begin at the same time
        # The last sequences of a batch begin while the first ones decode already: at most one step for each.
        return await self.together(prompts, steps + 2 * batch)

    async def together(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
        """Generate for all prompts at the same time.

        Return the mean seconds of a step while all of them decode, and the mean number of output tokens in the middle
        of that time. Raise ``EngineError`` if they never decoded at the same time.
        """
        times = await asyncio.gather(*(self.token_times(prompt, tokens) for prompt in prompts))
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        gaps, positions = list[float](), list[float]()
        for each in times:
            inside = [index for index, at in enumerate(each) if begin <= at <= end]
            if len(inside) > 1:
                gaps.append((each[inside[-1]] - each[inside[0]]) / (inside[-1] - inside[0]))
                positions.append((inside[0] + inside[-1]) / 2)
        if not gaps:
            raise EngineError(
                f"{len(prompts)} sequences did not decode at the same time; raise the engine's max-num-seqs"
            )
        return statistics.mean(gaps), statistics.mean(positions)


async def measure_router(url: str, engine: Probe, rounds: int, note: Callable[[str], None]) -> float:
    """Return the seconds that the router at ``url`` adds to the time to first token.

    Requests of a few tokens go through the router and directly to the engine, in turn; the result is the difference of
    the medians. Raise :class:`~tercet.protocol.BadRequest` if no router answers, ``EngineError`` if a request fails.
    """
    model = await _model_of(url)
    direct, through = list[float](), list[float]()
    async with Client(time.perf_counter(), TIMEOUT_SECONDS) as client:
        for number in range(rounds + 1):
            note(f"router, {number + 1} of {rounds + 1}")
            seconds = (await engine.ttft(engine.fresh(TOKENS)))[0]
            beyond = await _first_token(client, url, model, engine.fresh(TOKENS))
            if number:  # the first one opens connections
                direct.append(seconds)
                through.append(beyond)
    return max(0.0, statistics.median(through) - statistics.median(direct))


async def _model_of(url: str) -> str:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as response:
            return msgspec.json.decode(await response.read())["data"][0]["id"]
    except (aiohttp.ClientError, LookupError, TypeError, *UNREADABLE) as error:
        raise BadRequest(f"--router: no router answers at {url}: {reason_of(error)}", "--router") from error


async def _first_token(client: Client, url: str, model: str, prompt: tuple[int, ...]) -> float:
    body = body_of(model, prompt, 1, Sampling(), chat=False)
    # One engine serves it, as for the direct request.
    call = PreparedCall(0, url + path_of("completions"), body, {PROGRAM_HEADER: "data_parallel"})
    record = (await client.send(call, client.now())).record
    if record.failure is not None or record.first_token is None:
        raise EngineError(f"the router at {url} failed: {record.error or record.failure}")
    return record.first_token - record.sent


Seconds = tuple[float, float]
"""Mean seconds of a prefill and of a decode step."""
Neighbour = Literal["sleep", "prefill", "decode", "linger"]
NEIGHBOURS: tuple[Neighbour, ...] = ("sleep", "prefill", "decode", "linger")
# The measured steps, and the number of output tokens of the other engine's requests.
PREFILLS, BATCH, CONTEXT, STEPS = 4, 2, 128, 48
DECODE_TOKENS = 512
SETTLE_SECONDS = 1.0
# Pause before each prefill, as between requests: the CPU caches of an engine are cold when another one computed.
SLEEP_SECONDS = 1.0
# A lingering neighbour gets a prompt of this length at this interval; its linger time is at most LINGER_SECONDS.
POKE_TOKENS, POKE_SECONDS = 16, 0.5
LINGER_SECONDS = 3.0
# Smaller factors are regarded as noise.
NOTABLE = 1.1


async def measure_sharing(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> HostSharing:
    """Measure how much longer steps of ``one`` take while ``other`` computes or lingers, and how long it lingers."""
    found = await measure_steps(one, other, prefill_tokens, rounds, note)
    gaps = list[tuple[float, float]]()
    for number in range(rounds):
        note(f"after an engine's work, {number + 1} of {rounds}")
        gaps += await _gaps_after(one, other, prefill_tokens)
    return sharing_from(found, linger_from(gaps))


async def measure_steps(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> dict[Neighbour, list[Seconds]]:
    """Measure the times of steps of ``one``, by the activity of ``other``.

    The activities alternate, so that a slowdown of the machine affects all of them.
    """
    found: dict[Neighbour, list[Seconds]] = {neighbour: [] for neighbour in NEIGHBOURS}
    for number in range(rounds):
        for neighbour in NEIGHBOURS:
            note(f"next to an engine: {neighbour}, {number + 1} of {rounds}")
            async with _busy(other, neighbour, prefill_tokens):
                found[neighbour].append(await _steps(one, prefill_tokens))
    return found


def sharing_from(found: Mapping[Neighbour, Sequence[Seconds]], linger: float) -> HostSharing:
    """Return the factors, as ratios of means. Factors below 1 are noise, and become 1. ``linger`` is in seconds."""
    means = {
        neighbour: [statistics.mean(each) for each in zip(*rows, strict=True)] for neighbour, rows in found.items()
    }

    def factor(kind: int, neighbour: Neighbour) -> float:
        return max(1.0, means[neighbour][kind] / means["sleep"][kind])

    return HostSharing(
        prefill_beside_prefill=factor(0, "prefill"),
        prefill_beside_decode=factor(0, "decode"),
        decode_beside_prefill=factor(1, "prefill"),
        decode_beside_decode=factor(1, "decode"),
        prefill_beside_linger=factor(0, "linger") if linger else 1.0,
        decode_beside_linger=factor(1, "linger") if linger else 1.0,
        linger=linger,
    )


def linger_from(gaps: Sequence[tuple[float, float]]) -> float:
    """Return the seconds for which steps stay longer after a neighbour's work; 0 if there is no clear effect.

    ``gaps`` are pairs of a time since the end of that work and a step's seconds. The result is the edge of the step
    function that fits them best.
    """
    rows = np.array(sorted(gaps))
    at, sums = rows[:, 0], np.cumsum(rows[:, 1])
    cuts = np.arange(1, len(rows))
    before, after = sums[:-1] / cuts, (sums[-1] - sums[:-1]) / (len(rows) - cuts)
    # Least squares: the residuals are smallest when these are largest.
    best = int(np.argmax(cuts * before**2 + (len(rows) - cuts) * after**2))
    return float(at[best + 1]) if before[best] > NOTABLE * after[best] else 0.0


async def _gaps_after(one: Probe, other: Probe, prefill_tokens: int) -> list[tuple[float, float]]:
    """Return the decode steps of ``one`` after a prefill on ``other``: seconds since the prefill's end, and seconds."""
    step, _ = await one.decode(1, CONTEXT, STEPS)
    tokens = round(2 * LINGER_SECONDS / step)
    decoding = asyncio.create_task(one.token_times(one.fresh(CONTEXT), tokens))
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        await other.ttft(other.fresh(prefill_tokens))
        ended = asyncio.get_running_loop().time()
        times = await decoding
    finally:
        decoding.cancel()
    gaps = [(begin - ended, end - begin) for begin, end in pairwise(times)]
    return [gap for gap in gaps if 0 <= gap[0] <= LINGER_SECONDS]


async def _steps(one: Probe, prefill_tokens: int) -> Seconds:
    """Measure prefills and decode steps of ``one``. Return the mean seconds of each."""
    prefills = list[float]()
    for _ in range(PREFILLS):
        await asyncio.sleep(SLEEP_SECONDS)
        prefills.append((await one.ttft(one.fresh(prefill_tokens)))[0])
    seconds, _ = await one.decode(BATCH, CONTEXT, STEPS)
    return statistics.mean(prefills), seconds


@asynccontextmanager
async def _busy(other: Probe, neighbour: Neighbour, prefill_tokens: int) -> AsyncGenerator[None]:
    """Keep an engine busy with one activity while the context is open. Raise the error if the activity fails."""
    tasks = list[asyncio.Task[None]]()
    if neighbour == "prefill":
        tasks.append(asyncio.create_task(_prefill(other, prefill_tokens)))
    elif neighbour == "decode":
        tasks += [asyncio.create_task(_decode(other)) for _ in range(BATCH)]
    elif neighbour == "linger":
        tasks.append(asyncio.create_task(_poke(other)))
    await asyncio.sleep(SETTLE_SECONDS)
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # a task that ended has failed: this raises its error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await asyncio.sleep(2 * SETTLE_SECONDS)


async def _prefill(other: Probe, tokens: int) -> None:
    while True:
        await other.ttft(other.fresh(tokens))


async def _decode(other: Probe) -> None:
    while True:
        await other.token_times(other.fresh(CONTEXT), DECODE_TOKENS)


async def _poke(other: Probe) -> None:
    while True:
        await other.ttft(other.fresh(POKE_TOKENS))
        await asyncio.sleep(POKE_SECONDS)
