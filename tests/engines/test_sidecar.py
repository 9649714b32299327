"""A sidecar in front of a real engine: prefill elsewhere, and requests succeed whatever becomes of who prefills."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.protocol import EngineStatus
from tercet.wire.client import HttpEngine
from tests.long_runs import FULL

from .commands import tercet_process
from .conftest import Fleet, free_port, settled
from .processes import processes_of, send_signal
from .prompts import alone, complete, prompt_of, tokens_of

pytestmark = pytest.mark.verifies("sidecar")

SECONDS = 240
REQUESTS, AT_ONCE = (100 if FULL else 16), 4
LOST_AFTER = 6
LENGTH = 500
"""Tokens of a prompt: two steps of the engine that prefills."""
TOKENS = 4
ELSEWHERE, HERE = "disaggregated", "disaggregated -> data_parallel"
"""What an answer's trace says of where it was prefilled."""


@pytest.fixture
def sidecar(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a sidecar in front of decode-0."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path_factory.mktemp("sidecar") / "sidecar.log"
    flags = f"--engine={fleet.places['decode-0'].url}", f"--port={port}", "--prefill-hosts=127.0.0.1:*"
    with tercet_process(log, f"{url}/health", "sidecar", *flags):
        yield url


def _busy(status: EngineStatus) -> bool:
    return bool(status.running or status.waiting or status.sends)


@pytest.mark.parametrize("lost_by", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_all_requests_succeed_while_who_prefills_is_lost(
    breakable: Fleet, sidecar: str, decode: HttpEngine, lost_by: signal.Signals
) -> None:
    """Each request has a salt of its own, so that all of its prompt is to be prefilled elsewhere.

    Any engine may prefill: the one that is lost is the one that only the tests that break things use.
    """
    place = breakable.places["decode-1"]
    headers = {"x-prefiller-host-port": place.url.removeprefix("http://"), "x-tercet-trace": "1"}
    prompts = [prompt_of(LENGTH, seed=seed) for seed in range(5)]
    fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    expected = [await alone(breakable.places["decode-0"].url, prompt, **fields) for prompt in prompts]
    victims = processes_of(place.url)
    left = iter(range(REQUESTS))
    done: list[str] = []

    async def lane() -> None:
        for number in left:
            which = number % len(prompts)
            answer = await complete(sidecar, prompts[which], headers, cache_salt=uuid.uuid4().hex, **fields)
            assert tokens_of(answer) == expected[which], number
            done.append(answer["tercet"]["program"])

    async def lose() -> None:
        async with HttpEngine(place.name, place.url) as prefill:
            while len(done) < LOST_AFTER or not _busy(await prefill.status()):
                await asyncio.sleep(0.01)
        send_signal(victims, lost_by)
        print(f"lost after {len(done)} requests")

    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(lane())
            group.create_task(lose())
    finally:
        send_signal(victims, signal.SIGCONT)
    assert len(done) == REQUESTS
    assert ELSEWHERE in done[:LOST_AFTER]
    assert HERE in done, "nobody was lost"
    await settled(decode)
    breakable.mend()
    async with HttpEngine(place.name, place.url) as prefill:
        await settled(prefill)
    # Whoever comes back prefills again, once it has answered; a machine that is busy may take a while.
    async with asyncio.timeout(SECONDS):
        again = ""
        while again != ELSEWHERE:
            answer = await complete(sidecar, prompts[0], headers, cache_salt=uuid.uuid4().hex, **fields)
            assert tokens_of(answer) == expected[0]
            again = answer["tercet"]["program"]
