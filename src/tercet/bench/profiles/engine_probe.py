"""Single requests to an engine, directly or through a front door, and when their tokens came."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import count

import aiohttp
import msgspec

from tercet.bench.experiment import PROGRAM_HEADER
from tercet.bench.openai_client import Client, PreparedCall, Sampling, body_of, path_of
from tercet.protocol import BadRequest, Engine, EngineError, Output, Request

# Token ids that every vocabulary has, and that mean nothing special in most.
FIRST_ID, LAST_ID = 1000, 20_000
TOKENS = 16
TIMEOUT_SECONDS = 60.0


def names_from(chance: random.Random) -> Iterator[str]:
    """Sequence ids that nobody else uses."""
    return (f"profile-{chance.getrandbits(64):x}-{index}" for index in count())


class Probe:
    """Sends requests to one engine and times them; all times in seconds."""

    def __init__(self, engine: Engine, chance: random.Random, names: Iterator[str]) -> None:
        self.engine = engine
        self._random = chance
        self._names = names
        self._clock = asyncio.get_running_loop().time

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """A prompt that no cache knows."""
        return tuple(self._random.choices(range(FIRST_ID, LAST_ID), k=tokens))

    def request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        """A request for so many tokens, neither more nor fewer."""
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return Request(seq_id=next(self._names), prompt=prompt, sampling_params=sampling)

    async def ttft(self, prompt: tuple[int, ...]) -> tuple[float, Output]:
        """How long the first token takes, and what came with it."""
        began = self._clock()
        async with aclosing(self.engine.start_generate(self.request(prompt, 1))) as outputs:
            first = await anext(outputs)
            return self._clock() - began, first

    async def token_times(self, prompt: tuple[int, ...], tokens: int) -> list[float]:
        """When each of so many tokens came."""
        times = list[float]()
        async with aclosing(self.engine.start_generate(self.request(prompt, tokens))) as outputs:
            async for output in outputs:
                times += [self._clock()] * len(output.token_ids)
        return times

    async def decode(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        """Seconds of a step that decodes ``batch`` sequences, and the tokens that they had by then on average."""
        prompts = [self.fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self.ttft(prompt)  # from now on it is cached, so that all of them begin at once
        # While the first of a batch decode already, the last ones begin: at most a step for each.
        return await self.together(prompts, steps + 2 * batch)

    async def together(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
        """Seconds of a step while all of them decode, and the tokens that they have in the middle of that time."""
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


async def measure_front_door(url: str, engine: Probe, rounds: int, note: Callable[[str], None]) -> float:
    """Seconds by which a first token comes later through the front door at ``url`` than from its engine itself.

    Requests of a few tokens take turns on both ways, and the medians count. Raises
    :class:`~tercet.protocol.BadRequest` when there is no front door, ``EngineError`` when it fails.
    """
    model = await _model_of(url)
    direct, through = list[float](), list[float]()
    async with Client(time.perf_counter(), TIMEOUT_SECONDS) as client:
        for number in range(rounds + 1):
            note(f"front door, {number + 1} of {rounds + 1}")
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
    except (aiohttp.ClientError, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise BadRequest(f"--front-door: no front door answers at {url}: {error}", "--front-door") from error


async def _first_token(client: Client, url: str, model: str, prompt: tuple[int, ...]) -> float:
    body = body_of(model, prompt, 1, Sampling(), chat=False)
    # On one engine, as the request that it is compared with.
    call = PreparedCall(0, url + path_of("completions"), body, {PROGRAM_HEADER: "data_parallel"})
    record = (await client.send(call, client.now())).record
    if record.failure is not None or record.first_token is None:
        raise EngineError(f"the front door at {url} failed: {record.error or record.failure}")
    return record.first_token - record.sent
