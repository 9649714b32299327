"""The whole router but its socket, over engines in memory: with vLLM's layer, or with the small one."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tercet.cluster.model import resolve_model, resolve_tokenizer
from tercet.fleet import EngineFleet, Member
from tercet.fleet.admission import Gate
from tercet.fleet.membership import Membership
from tercet.router import admin
from tercet.router.batches.batch_routes import Batches
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import Service
from tercet.router.serve.shutdown import Shutdown
from tercet.settings import Limits
from tercet.settings.fleet_settings import BatchSettings
from tercet.wire.callers import BearerKeys
from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.small_openai import small_app
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.own_metrics import own_metrics
from tests.unit.fakes import FakeEngine

from .conftest import shared_over

# None of these tests takes so long, also on a busy machine.
REQUEST_TIMEOUT_S = 100.0
PROMPT = list(range(1000, 1100))
BODY: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
# Tokens of the longest sequence.
LENGTH = 512
MESSAGES = [{"role": "user", "content": "x"}]
ANSWER = [1100, 1101, 1102, 1103, 1104, 1105]


class House:
    """The application, its engines, and a client of it. ``most_bytes`` are the bytes of its longest body."""

    def __init__(self, most_bytes: int = 10_000) -> None:
        self.most_bytes = most_bytes
        self.engines = {name: FakeEngine(name) for name in "pd"}
        roles: dict[str, Any] = {"p": "prefill", "d": "decode"}
        self.fleet = EngineFleet([Member(name, f"http://{name}", roles[name], e) for name, e in self.engines.items()])
        self.metrics = Metrics()
        self.service = Service(self.fleet, "disaggregated", {}, self.metrics, request_timeout=REQUEST_TIMEOUT_S)
        self.gate = Gate(Limits(in_flight=2, queued=0), self.fleet, self.metrics)
        self.folder = tempfile.TemporaryDirectory(prefix="tercet-test-")
        self.batches = Batches(self.folder.name, BatchSettings(), self.service, Shutdown(timeout_s=0))
        self.app: Any = None

    async def build(self) -> Any:
        from tercet.router.openai import openai_server as vllm
        from tercet.wire.serving.server_access import api_keys

        model = resolve_model("smollm2", lambda _: None)
        args = vllm.server_args(model, ["m"], "127.0.0.1", 0, LENGTH, ("--api-key", "secret"))
        keys, args.api_key = api_keys(args), None  # as in a router, which checks keys itself
        client = vllm.engine_client_over(self.service, args)
        server = vllm.with_fast_path(await vllm.openai_server(args, client), args, client)
        self._put_layers_before(server.app, server.layers, server.fast, keys)
        return client

    def build_small(self) -> None:
        """With the small layer instead of vLLM's, for the same model."""
        texts = PromptTexts(Path(resolve_tokenizer("smollm2")))
        app = small_app(self.service, texts, ["m"], LENGTH)
        self._put_layers_before(app, app.build_middleware_stack(), None, ["secret"])

    def _put_layers_before(self, app: Any, layers: Any, fast: Any, keys: Sequence[str]) -> None:
        self.app = app
        membership = Membership(self.fleet, lambda *_: pytest.fail("nobody joins"))
        admin.install(app, shared_over(self.service, membership), ["m"])
        clients = BearerKeys(keys)
        self.batches.install(app, self.gate, clients)
        app.middleware_stack = RouterApp(
            layers, fast, self.gate, clients, self.service.program_called, self.most_bytes
        )  # fmt: skip

    def client(self, key: str = "secret") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost", headers=headers)

    async def complete(self, **fields: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post("/v1/completions", json={**BODY, **fields})

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        answer = await self.complete(stream=True, **fields)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def until(self, in_flight: int, request: asyncio.Task[Any]) -> None:
        """Until so many sequences are on their way, while the request is under way."""
        async with asyncio.timeout(LONGEST_WAIT_S):
            while self.fleet.member("d").in_flight < in_flight:
                assert not request.done(), request.result().text
                await asyncio.sleep(0.001)

    def mend(self) -> None:
        for engine in self.engines.values():
            engine.pause.set()
            engine.failures.clear()
            engine.fail_after, engine.on_request = None, lambda _: None
        for member in self.fleet.members:
            member.reachable = True

    @property
    def is_empty(self) -> bool:
        return not any(engine.running or engine.leases for engine in self.engines.values()) and not any(
            member.in_flight for member in self.fleet.members
        )


@asynccontextmanager
async def built_house(*, small: bool = False) -> AsyncGenerator[House]:
    """A house with vLLM's layer, or with the small one, while entered."""
    with own_metrics():
        house = House()
        client = None if small else await house.build()
        if small:
            house.build_small()
        try:
            yield house
        finally:
            if client is not None:
                client.shutdown()
            house.folder.cleanup()


@asynccontextmanager
async def mended(built: House) -> AsyncGenerator[House]:
    """The house for one test; afterwards no engine works."""
    built.mend()
    yield built
    built.mend()
    await until(lambda: built.is_empty)
