"""The time to first token of a prefix that is computed, cached here, pulled from another engine, or from a store.

    tercet engine --port 8001 --dtype float32 -- --max-model-len 4224
    tercet engine --port 8002 --dtype float32 -- --max-model-len 4224
    tercet store --mirror http://127.0.0.1:8001 --port 8100
    python -m benchmarks.context http://127.0.0.1:8001 http://127.0.0.1:8002 http://127.0.0.1:8100

For each length, the first engine computes a prompt that the second one pulls, and the second one computes a prompt that
goes to the store, from which the first one pulls it. Each prompt has new tokens after the prefix. All answers to a
prompt must be equal. Times are seconds from the first call.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable
from typing import Annotated

import typer
from benchmarks.command_line import numbers_in, run
from rich.console import Console

from tercet.cli.terminal import show_table
from tercet.protocol import Request
from tercet.settings import require_url
from tercet.wire.client import HttpEngine

NEW, OUTPUT = 17, 6
Timed = tuple[float, tuple[int, ...], int]


def request_of(prompt: tuple[int, ...]) -> Request:
    """Return a request for a few greedy tokens."""
    sampling = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
    return Request(seq_id=uuid.uuid4().hex, prompt=prompt, sampling_params=sampling)


async def served(engine: HttpEngine, request: Request, began: float, begin: int = 0) -> Timed:
    """Generate; return the time to the first token since ``began``, all tokens, and how many the engine computed."""
    first, tokens, computed = 0.0, list[int](), -1
    async for output in engine.start_generate(request, begin):
        first = first or time.perf_counter() - began
        tokens += output.token_ids
        computed = output.usage.computed if output.usage is not None else computed
    return first, tuple(tokens), computed


async def computed_by(engine: HttpEngine, prompt: tuple[int, ...]) -> Timed:
    """Generate with what the engine itself has."""
    return await served(engine, request_of(prompt), time.perf_counter())


async def pulled(holder: HttpEngine, engine: HttpEngine, prompt: tuple[int, ...]) -> Timed:
    """Generate with what ``holder`` has."""
    request, began = request_of(prompt), time.perf_counter()
    async with engine.prep_recv(request, len(prompt) - 1) as space:
        sent = await holder.remote_send(request, space, space.matched_len, cached_only=True)
        return await served(engine, request, began, sent.end)


async def keep(engine: HttpEngine, store: HttpEngine, prompt: tuple[int, ...]) -> None:
    """Copy a prompt's whole blocks to the store."""
    request = request_of(prompt)
    async with store.prep_recv(request) as space:
        await engine.remote_send(request, space, space.matched_len, cached_only=True)


async def row_of(one: HttpEngine, other: HttpEngine, store: HttpEngine, length: int) -> list[str]:
    """Measure one length. Raise ``RuntimeError`` for answers that differ, or a pull that computes the prefix."""
    prompts = [tuple(random.choices(range(1000, 40_000), k=length + NEW)) for _ in range(2)]
    found = list[Timed]()

    async def add(answer: Awaitable[Timed]) -> None:
        found.append(await answer)

    await add(computed_by(one, prompts[0]))
    await add(pulled(one, other, prompts[0]))
    await add(computed_by(other, prompts[0]))  # cached there by now
    await add(computed_by(other, prompts[1]))
    await keep(other, store, prompts[1])
    await add(pulled(store, one, prompts[1]))
    whole, peer, hit, again, kept = found
    if whole[1] != peer[1] or peer[1] != hit[1] or again[1] != kept[1]:
        raise RuntimeError(f"{length} tokens: the answers differ: {found}")
    if max(peer[2], kept[2]) > NEW:
        raise RuntimeError(f"{length} tokens: a pull has computed {peer[2]} and {kept[2]} tokens")
    return [f"{length:,}", *(f"{each[0]:.2f}" for each in (whole, hit, peer, kept))]


async def measure(urls: list[str], lengths: list[int]) -> list[list[str]]:
    """Measure every length; a short prompt before is not counted."""
    names = ("one", "other", "store")
    async with (
        HttpEngine(names[0], urls[0]) as one,
        HttpEngine(names[1], urls[1]) as other,
        HttpEngine(names[2], urls[2]) as store,
    ):
        await row_of(one, other, store, 256)
        return [await row_of(one, other, store, length) for length in lengths]


def context(
    engine: Annotated[str, typer.Argument(help="URL of an engine.")],
    other: Annotated[str, typer.Argument(help="URL of another engine with the same model.")],
    store: Annotated[str, typer.Argument(help="URL of a store of these engines.")],
    lengths: Annotated[str, typer.Option(help="Lengths of prefixes, in tokens.")] = "512,1024,2048,4096",
) -> None:
    """Print the times to first token of prefixes that are computed, cached, and pulled."""
    urls = {"ENGINE": engine, "OTHER": other, "STORE": store}
    for name, url in urls.items():
        require_url(url, name)
    rows = asyncio.run(measure(list(urls.values()), numbers_in("--lengths", lengths)))
    heads = ["prefix", "computed, s", "cached here", "pulled from an engine", "from a store"]
    show_table("time to first token", heads, rows)
    Console(stderr=True).print("the answers to each prompt are equal")


if __name__ == "__main__":
    run(context, "benchmarks.context")
