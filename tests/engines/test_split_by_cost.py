"""A picker that goes by learned cost, over real engines: it learns from their reports, and then decides by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tercet.cluster.model import resolve_model
from tercet.wire.client import HttpEngine
from tercet_gateway.endpoint_picker import ENOUGH_PREFILLS

from ..conformance.envoy_side import PREFILLER
from .commands import SECONDS, generating
from .conftest import MODEL, Fleet, settled
from .picker import Picker, picking
from .prompts import prompt_of

pytestmark = [
    pytest.mark.usefixtures("nothing_leaks"),
    pytest.mark.timeout(900),
    pytest.mark.verifies("endpoint picker"),
]
DECODES = 8
MOST_TO_LEARN_FROM = 60
LENGTHS = 320, 384, 448, 512
"""Tokens of prompts: whole blocks of the picker's."""
LONG = 704
"""Tokens: what it costs to prefill them is far more than the few tokens of an answer."""


def body_of(length: int, seed: int, max_tokens: int) -> dict[str, Any]:
    given = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "prompt": prompt_of(length, seed), **given}


async def sent(made: Picker, body: dict[str, Any]) -> bool:
    """As Envoy does: to whom it says, with the header that it sets. Whether another engine was to prefill."""
    verdict = await made.ask(body)
    named = {name: value for name, value in verdict.headers.items() if name == PREFILLER}
    url = f"http://{verdict.endpoints[0]}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=named) as answer:
        assert answer.status == 200, await answer.text()
    return bool(named)


async def until_idle(made: Picker) -> None:
    """It has heard that nothing runs or waits: what it learns from is what an engine computed alone."""
    async with asyncio.timeout(SECONDS):
        while made.says("inference_pool_average_running_requests") or made.says("inference_pool_per_pod_queue_size"):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def decoding(fleet: Fleet, engine: HttpEngine, made: Picker) -> AsyncGenerator[None]:
    """While entered, the engine decodes for others, and the picker has heard of it."""
    url = fleet.places["decode-0"].url
    try:
        async with generating(
            url, DECODES, lambda: made.says("inference_pool_average_running_requests") == DECODES / 2
        ):
            yield
    finally:
        await settled(engine)


async def test_it_learns_what_prefills_cost_and_splits_where_that_pays(
    fleet: Fleet, decode: HttpEngine, tmp_path: Path
) -> None:
    """The file's decider has every long prompt prefilled elsewhere, busy or not, until costs decide.

    Nobody waits for an idle engine, so then a long prompt stays there. While it decodes for others, they would all wait
    for another one; that prompt itself it has by then.
    """
    engines = [f"--engine={fleet.places[f'{role}-0'].url},name={role},role={role}" for role in ("prefill", "decode")]
    flags = "--split-by=cost", f"--render-model={resolve_model(MODEL)}"
    async with picking(tmp_path, 2, *flags, *engines) as made:
        elsewhere = 0
        for seed in range(MOST_TO_LEARN_FROM):
            await until_idle(made)
            body = body_of(LENGTHS[seed % len(LENGTHS)], seed, 2)
            if await sent(made, body):
                elsewhere += 1
            elif elsewhere >= ENOUGH_PREFILLS:
                break
        else:
            pytest.fail(f"costs do not decide: of {MOST_TO_LEARN_FROM} prompts {elsewhere} went elsewhere")
        async with decoding(fleet, decode, made):
            assert not await made.splits(body), "it has this one"
            assert await made.splits(body_of(LONG, 1001, 4))
            assert await sent(made, body_of(LONG, 1002, 4)), "and it is done like that"
