"""What a front door adds to a request's time, measured through a real one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import aiohttp
import msgspec

from tercet.bench.api import Sampling, body_of, path_of
from tercet.bench.client import Call, Client
from tercet.bench.experiment import PROGRAM_HEADER
from tercet.bench.profiles.probe import Probe
from tercet.protocol import BadRequest, EngineError

TOKENS = 16
TIMEOUT_SECONDS = 60.0


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
    call = Call(0, url + path_of("completions"), body, {PROGRAM_HEADER: "data_parallel"})
    record = (await client.send(call, client.now())).record
    if record.failure is not None or record.first_token is None:
        raise EngineError(f"the front door at {url} failed: {record.error or record.failure}")
    return record.first_token - record.sent
