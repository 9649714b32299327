"""Fifty changes of the program while requests stream: each gets the lone engine's answer, and the engines run on."""

from __future__ import annotations

import asyncio
import itertools
import re
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tercet.programs import BUILT_IN
from tests.long_runs import FULL
from tests.longest_wait import LONGEST_WAIT_S

from .client_streams import said_by
from .conftest import Fleet, get_json, router_over
from .processes import processes_of
from .prompts import complete, prompt_of

pytestmark = pytest.mark.verifies("programs swapped under load")

# Each plan twice.
SWAPS = 50 if FULL else 10
CLIENTS = 6
SERVED_BETWEEN_SWAPS = 2
PLANS: list[dict[str, Any]] = [
    {"program": "data_parallel"},
    {"program": "disaggregated", "args": {"min_send": 1}},
    {"program": "balanced", "args": {"balance_ratio": 0.1, "min_send": 1}},
    {"program": "cache_bypass", "args": {"short_prompt": 64}},
    {"program": "auto", "args": {"explore": 0.5}},
    {"program": "balanced", "args": {"balance_ratio": 0.5, "min_send": 1}},
    {"program": "conditional", "args": {"min_prompt": 100, "min_missing": 1}},
    {"split": [{"program": "disaggregated", "weight": 2}, {"program": "data_parallel", "weight": 1}]},
    {"program": "fetch"},
    {"program": "balanced", "args": {"balance_ratio": 0.9, "min_send": 1}},
    {"program": "data_parallel", "args": {"pick": "least_loaded"}},
    {"split": [{"program": "auto"}, {"program": "cache_bypass"}], "sticky": "x-client"},
]  # fmt: skip
PROMPTS = [prompt_of(length, seed=70) for length in (20, 90, 200, 330, 450)]
SAMPLING: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


@dataclass
class RouterApp:
    """A router of this test's own: its versions and counters begin at nothing."""

    url: str
    log: Path

    def samples(self) -> dict[str, dict[str, float]]:
        """Of each of its metrics, the values by the values of their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LONGEST_WAIT_S) as response:
            families = text_string_to_metric_families(response.read().decode())
        found: dict[str, dict[str, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            found.setdefault(sample.name, {})[", ".join(sample.labels.values())] = sample.value
        return found

    def failures(self) -> list[str]:
        """Its log lines of sequences that another attempt continued."""
        return [line for line in self.log.read_text().splitlines() if re.search(r"\b(fallback|retry): ", line)]


@pytest.fixture
def router(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterApp]:
    tmp = tmp_path_factory.mktemp("swaps")
    with router_over(fleet.engine_urls(), tmp) as url:
        yield RouterApp(url, tmp / "router.log")


class Load:
    """Clients that each send one streaming request after the other until `over`; any failure ends the test."""

    def __init__(self, url: str, expected: list[str]) -> None:
        self._url = url
        self._expected = expected
        self._turns = itertools.count()
        self._served = asyncio.Condition()
        self.served = self.under_way = 0
        self.over = False

    async def client(self, number: int) -> None:
        async with aiohttp.ClientSession(headers={"x-client": f"client-{number}"}) as session:
            while not self.over:
                await self._request(session, next(self._turns))

    async def more(self, count: int) -> None:
        """Wait until so many more requests are served."""
        wanted = self.served + count
        async with self._served:
            await self._served.wait_for(lambda: self.served >= wanted)

    async def _request(self, session: aiohttp.ClientSession, turn: int) -> None:
        # Every other request finds what earlier ones left in the engines' caches; the others find nothing.
        salt = "swaps" if turn % 2 else uuid.uuid4().hex
        which = turn % len(PROMPTS)
        body = {"model": "smollm2", "prompt": PROMPTS[which], "temperature": 0, "stream": True, **SAMPLING}
        self.under_way += 1
        async with session.post(f"{self._url}/v1/completions", json={**body, "cache_salt": salt}) as response:
            assert response.status == 200, await response.text()
            text = text_of(await response.text())
        self.under_way -= 1
        assert text == self._expected[which], f"request {turn}"
        async with self._served:
            self.served += 1
            self._served.notify_all()


def text_of(stream: str) -> str:
    """What a stream of server-sent events says; it must end as streams do."""
    assert stream.endswith("data: [DONE]\n\n"), stream
    events = said_by(stream)
    assert all("error" not in event for event in events), stream
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def put(url: str, plan: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.put(f"{url}/tercet/v1/program", json=plan) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def engine_processes(fleet: Fleet) -> set[tuple[int, float]]:
    return {(each.pid, each.create_time()) for url in fleet.engine_urls().values() for each in processes_of(url)}


async def test_swaps_under_load(fleet: Fleet, router: RouterApp, nothing_leaks: None) -> None:
    answers = [
        await complete(fleet.engine_url("prefill"), prompt, cache_salt=uuid.uuid4().hex, **SAMPLING)
        for prompt in PROMPTS
    ]
    processes = engine_processes(fleet)
    load = Load(router.url, [answer["choices"][0]["text"] for answer in answers])
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(load.client(number))
        await load.more(SERVED_BETWEEN_SWAPS)
        for swap, plan in enumerate(itertools.islice(itertools.cycle(PLANS), SWAPS)):
            assert load.under_way, "nothing is under way"
            assert (await put(router.url, plan))["version"] == 2 + swap
            await load.more(SERVED_BETWEEN_SWAPS)
        load.over = True

    assert processes <= engine_processes(fleet), "a process of an engine ended"
    program = get_json(f"{router.url}/tercet/v1/program")
    assert (program["version"], program["returned"], program["failures_in_a_row"]) == (1 + SWAPS, None, {})
    samples = router.samples()
    for trouble in ("fallbacks", "retries", "errors", "program_failures", "program_returns"):
        assert not samples.get(f"tercet_{trouble}_total"), router.failures()
    served = samples["tercet_sequences_total"]
    # Every built-in program, and none of them with another one in its place.
    assert set(served) == set(BUILT_IN)
    assert sum(served.values()) == load.served
    assert set(samples["tercet_sequences_running"].values()) == {0}
    assert [engine["in_flight"] for engine in get_json(f"{router.url}/tercet/v1/engines")] == [0, 0]
