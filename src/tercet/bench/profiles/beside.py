"""What two engines of one machine do to one another: one is measured while the other idles, prefills, or decodes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from tercet.bench.profiles.probe import Probe
from tercet.sim.profile import Sharing

Neighbour = Literal["idle", "prefill", "decode"]
NEIGHBOURS: tuple[Neighbour, ...] = ("idle", "prefill", "decode")
# What is measured, and what the other engine does meanwhile.
PREFILLS, BATCH, CONTEXT, STEPS = 4, 2, 128, 24
DECODE_TOKENS = 512
SETTLE_SECONDS = 1.0


async def measure_sharing(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> Sharing:
    """How much longer ``one``'s steps take while ``other`` computes.

    The three conditions take turns, so that a machine that gets slower in the meantime does so for all of them; the
    factors are ratios of means over ``rounds``. Less than 1 is noise, and counts as 1.
    """
    found: dict[Neighbour, list[tuple[float, float]]] = {neighbour: [] for neighbour in NEIGHBOURS}
    for number in range(rounds):
        for neighbour in NEIGHBOURS:
            note(f"beside an engine: {neighbour}, {number + 1} of {rounds}")
            async with _busy(other, neighbour, prefill_tokens):
                found[neighbour].append(await _steps(one, prefill_tokens))
    return sharing_from(found)


def sharing_from(found: dict[Neighbour, list[tuple[float, float]]]) -> Sharing:
    """The factors from seconds of ``(prefills, decodes)`` by what the other engine did."""
    means = {
        neighbour: [statistics.mean(each) for each in zip(*rows, strict=True)] for neighbour, rows in found.items()
    }

    def factor(kind: int, neighbour: Neighbour) -> float:
        return max(1.0, means[neighbour][kind] / means["idle"][kind])

    return Sharing(
        prefill_beside_prefill=factor(0, "prefill"),
        prefill_beside_decode=factor(0, "decode"),
        decode_beside_prefill=factor(1, "prefill"),
        decode_beside_decode=factor(1, "decode"),
    )


async def _steps(one: Probe, prefill_tokens: int) -> tuple[float, float]:
    """Mean seconds of a prefill and of a decode step."""
    prefills = [(await one.ttft(one.fresh(prefill_tokens)))[0] for _ in range(PREFILLS)]
    seconds, _ = await one.decode(BATCH, CONTEXT, STEPS)
    return statistics.mean(prefills), seconds


@asynccontextmanager
async def _busy(other: Probe, neighbour: Neighbour, prefill_tokens: int) -> AsyncGenerator[None]:
    """Let an engine compute one kind of step all the time."""
    tasks = list[asyncio.Task[None]]()
    if neighbour == "prefill":
        tasks.append(asyncio.create_task(_prefill(other, prefill_tokens)))
    elif neighbour == "decode":
        tasks += [asyncio.create_task(_decode(other)) for _ in range(BATCH)]
    await asyncio.sleep(SETTLE_SECONDS)
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # raises: it computes until it is told to stop
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await asyncio.sleep(SETTLE_SECONDS)


async def _prefill(other: Probe, tokens: int) -> None:
    while True:
        await other.ttft(other.fresh(tokens))


async def _decode(other: Probe) -> None:
    while True:
        await other.token_times(other.fresh(CONTEXT), DECODE_TOKENS)
