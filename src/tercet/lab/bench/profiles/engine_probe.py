"""Requests to engines, directly or through a router, with the times of their tokens.

Also the interference of two engines of one machine: one is measured while the other sleeps, computes, or lingers. An
engine lingers when it has no more work and its processes still poll without a pause, which keeps their cores busy.
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

from tercet.lab.bench.openai_client import Client, PreparedCall, Sampling, body_of, path_of
from tercet.lab.sim.step_times import HostSharing
from tercet.protocol import BadRequest, Engine, EngineError, Output, Request
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.connection_errors import reason_of

# Token ids that every vocabulary has, and that are not special in most.
FIRST_ID, LAST_ID = 1000, 20_000
TOKENS = 16
TIMEOUT_SECONDS = 60.0


def names_from(chance: random.Random) -> Iterator[str]:
    """Unique sequence ids."""
    return (f"profile-{chance.getrandbits(64):x}-{index}" for index in count())


class Probe:
    """Sends requests to one engine and times them; all times in seconds."""

    def __init__(self, engine: Engine, chance: random.Random, names: Iterator[str]) -> None:
        self.engine = engine
        self._random = chance
        self._names = names
        self._clock = asyncio.get_running_loop().time

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """A prompt that no cache has."""
        return tuple(self._random.choices(range(FIRST_ID, LAST_ID), k=tokens))

    def request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        """A request for exactly ``tokens`` output tokens."""
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return Request(seq_id=next(self._names), prompt=prompt, sampling_params=sampling)

    async def ttft(self, prompt: tuple[int, ...]) -> tuple[float, Output]:
        """Time to the first token, and its output."""
        began = self._clock()
        async with aclosing(self.engine.start_generate(self.request(prompt, 1))) as outputs:
            first = await anext(outputs)
            return self._clock() - began, first

    async def token_times(self, prompt: tuple[int, ...], tokens: int) -> list[float]:
        """Times of ``tokens`` output tokens."""
        times = list[float]()
        async with aclosing(self.engine.start_generate(self.request(prompt, tokens))) as outputs:
            async for output in outputs:
                times += [self._clock()] * len(output.token_ids)
        return times

    async def decode(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        """Seconds of a step that decodes ``batch`` sequences, and their mean number of tokens by then."""
        prompts = [self.fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self.ttft(prompt)  # from now on it is cached, so that all of them begin at once
        # While the first ones of a batch decode, the last ones begin: at most a step for each.
        return await self.together(prompts, steps + 2 * batch)

    async def together(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
        """Seconds of a step while all of them decode, and their number of tokens in the middle of that time."""
        times = await asyncio.gather(*(self.token_times(prompt, tokens) for prompt in prompts))
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        gaps, positions = list[float](), list[float]()
        for each in times:
            inside = [index for index, at in enumerate(each) if begin <= at <= end]
            if len(inside) > 1:
                gaps.append((each[inside[-1]] - each[inside[0]]) / (inside[-1] - inside[0]))
                positions.append((inside[0] + inside[-1]) / 2)
        if not gaps:
            raise EngineError(f"{len(prompts)} sequences were never decoded together; is max-num-seqs that low?")
        return statistics.mean(gaps), statistics.mean(positions)


async def measure_router(url: str, engine: Probe, rounds: int, note: Callable[[str], None]) -> float:
    """Seconds by which a first token comes later through the router at ``url`` than from its engine itself.

    Requests of a few tokens alternate between both ways, and the medians count. Raises
    :class:`~tercet.protocol.BadRequest` when there is no router, ``EngineError`` when it fails.
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
    # On one engine, as the request that it is compared with.
    call = PreparedCall(0, url + path_of("completions"), body, {PROGRAM_HEADER: "data_parallel"})
    record = (await client.send(call, client.now())).record
    if record.failure is not None or record.first_token is None:
        raise EngineError(f"the router at {url} failed: {record.error or record.failure}")
    return record.first_token - record.sent


Seconds = tuple[float, float]
"""Mean seconds of a prefill and of a decode step."""
Neighbour = Literal["sleep", "prefill", "decode", "linger"]
NEIGHBOURS: tuple[Neighbour, ...] = ("sleep", "prefill", "decode", "linger")
# What is measured, and what the other engine does in the meantime.
PREFILLS, BATCH, CONTEXT, STEPS = 4, 2, 128, 48
DECODE_TOKENS = 512
SETTLE_SECONDS = 1.0
# Before each prefill, as between requests: the caches of an engine that slept while another one computed are cold.
SLEEP_SECONDS = 1.0
# A lingering neighbour gets a short prompt this often; its linger time is searched within some seconds.
POKE_TOKENS, POKE_SECONDS = 16, 0.5
LINGER_SECONDS = 3.0
# Smaller factors are noise.
NOTABLE = 1.1


async def measure_sharing(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> HostSharing:
    """Factors of ``one``'s steps while ``other`` computes or lingers, and the time for which it lingers."""
    found = await measure_steps(one, other, prefill_tokens, rounds, note)
    gaps = list[tuple[float, float]]()
    for number in range(rounds):
        note(f"after an engine's work, {number + 1} of {rounds}")
        gaps += await _gaps_after(one, other, prefill_tokens)
    return sharing_from(found, linger_from(gaps))


async def measure_steps(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> dict[Neighbour, list[Seconds]]:
    """Times of ``one``'s steps, by the activity of ``other``.

    The conditions alternate, so that a slower machine affects all of them.
    """
    found: dict[Neighbour, list[Seconds]] = {neighbour: [] for neighbour in NEIGHBOURS}
    for number in range(rounds):
        for neighbour in NEIGHBOURS:
            note(f"next to an engine: {neighbour}, {number + 1} of {rounds}")
            async with _busy(other, neighbour, prefill_tokens):
                found[neighbour].append(await _steps(one, prefill_tokens))
    return found


def sharing_from(found: Mapping[Neighbour, Sequence[Seconds]], linger: float) -> HostSharing:
    """The factors, as ratios of means; less than 1 is noise, and counts as 1. ``linger`` is taken as it is."""
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
    """The time for which steps stay longer after a neighbour's work: the step function that fits best."""
    rows = np.array(sorted(gaps))
    at, sums = rows[:, 0], np.cumsum(rows[:, 1])
    cuts = np.arange(1, len(rows))
    before, after = sums[:-1] / cuts, (sums[-1] - sums[:-1]) / (len(rows) - cuts)
    # Least squares: the residuals are smallest when these are largest.
    best = int(np.argmax(cuts * before**2 + (len(rows) - cuts) * after**2))
    return float(at[best + 1]) if before[best] > NOTABLE * after[best] else 0.0


async def _gaps_after(one: Probe, other: Probe, prefill_tokens: int) -> list[tuple[float, float]]:
    """The decode steps of ``one`` after a prefill on ``other``, each with the time since its end."""
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
    """Mean seconds of a prefill and of a decode step."""
    prefills = list[float]()
    for _ in range(PREFILLS):
        await asyncio.sleep(SLEEP_SECONDS)
        prefills.append((await one.ttft(one.fresh(prefill_tokens)))[0])
    seconds, _ = await one.decode(BATCH, CONTEXT, STEPS)
    return statistics.mean(prefills), seconds


@asynccontextmanager
async def _busy(other: Probe, neighbour: Neighbour, prefill_tokens: int) -> AsyncGenerator[None]:
    """Keep an engine busy with one activity."""
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
                task.result()  # raises: it computes until it is stopped
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
