"""A router with its page in this process, over simulated engines in real time, with load on it.

``python -m tests.unit.router.page.page_fleet 50 --port 8930`` serves it for people to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import socket
import tempfile
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp

from tercet.aio.tasks import TaskSet
from tercet.fleet import EngineFleet, Trace
from tercet.fleet.admission import Gate
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import Request, Role, TercetError
from tercet.router import admin
from tercet.router.observe.metrics import Metrics
from tercet.router.page.page_app import page_of
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import Service
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.fleet_state import FleetState, ProgramInUse
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress, Limits, RouterSettings
from tercet.wire.client import Admit
from tercet.wire.serving import http_server
from tercet.wire.serving.server_access import RouterKeys
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile

PROFILE = "llama-3.1-8b-h100-tp1"


class PageFleet:
    """A third of ``engines`` prefill, the others decode; ``app`` is what the router serves."""

    def __init__(
        self, engines: int, metrics: Metrics, *, keys: Sequence[str] = (), admin_key: str = "", apart: bool = False
    ):
        self.network, self.profile = Network(), load_profile(PROFILE)
        roles: list[Role] = ["prefill" if number % 3 == 0 else "decode" for number in range(engines)]
        numbers = {"prefill": 0, "decode": 0}
        self.addresses: list[EngineAddress] = []
        self.engines: dict[str, SimEngine] = {}
        for role in roles:
            name = f"{role}-{numbers[role]}"
            numbers[role] += 1
            self.addresses.append(EngineAddress(name, f"http://{name}", role))
            self.engines[name] = SimEngine(name, self.profile, self.network, EngineOptions(total_blocks=2000))
        self.fleet = EngineFleet((), stale_after=math.inf)  # these report what changes
        self.membership = Membership(self.fleet, self._connect)
        self.service = Service(self.fleet, "disaggregated", {}, metrics)
        self.directory = Path(tempfile.mkdtemp(prefix="tercet-page-"))
        self.shutdown = Shutdown(1)
        self.shared = SharedState(self.directory / "state.json", self.membership, self.service, self.shutdown)
        self.keys = RouterKeys(RouterSettings(admin_key=admin_key), keys)
        app = FastAPI()
        admin.install(app, self.shared, ["llama-3.1-8b"])
        gate = Gate(Limits(), self.fleet, metrics)
        stack = app.middleware_stack or app.build_middleware_stack()
        page = page_of(self.shared, self.keys, "llama-3.1-8b", self.shutdown, apart)
        app.middleware_stack = RouterApp(
            stack, None, gate, self.keys.clients, self.service.program_called, 100_000, admins=self.keys.access,
            admin_apart=apart, page=page,
        )  # fmt: skip
        self.history = page.history
        self.app = app
        self._random, self._tasks = random.Random(5), TaskSet()

    @asynccontextmanager
    async def _connect(self, name: str, _url: str, _admit: Admit) -> AsyncGenerator[SimEngine]:
        yield self.engines[name]

    async def start(self) -> None:
        state = FleetState(
            members=tuple(MemberState(address) for address in self.addresses),
            program=ProgramInUse(1, self.service.wanted),
        )
        await self.shared.start(state)
        self.membership.served_model = await self.shared.until_ready()
        for name, engine in self.engines.items():  # as token streams do
            engine.observe(ReportTo(self.fleet, name))

    def ask(self, tokens: int = 300, output: int = 100, program: str | None = None) -> asyncio.Task[Trace]:
        """One request, to its end."""
        prompt = tuple(self._random.randrange(50_000) for _ in range(tokens))
        headers = {} if program is None else {"x-tercet-program": program}
        request = Request(
            seq_id=f"cmpl-{uuid.uuid4().hex[:12]}", prompt=prompt, sampling_params={"max_tokens": output},
            headers=headers,
        )  # fmt: skip
        return self._tasks.spawn(self._serve(request), "request")

    async def _serve(self, request: Request) -> Trace:
        trace = Trace()
        try:
            async for _ in self.service.run(request, trace):
                pass
        except TercetError:
            trace.program = "failed"
        return trace

    async def load(self, rate: float) -> None:
        """So many requests a second, one in six by another program, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(rate))
            program = "data_parallel" if self._random.random() < 1 / 6 else None
            self.ask(self._random.randrange(100, 3000), self._random.randrange(100, 500), program)

    async def deliver(self) -> None:
        """Have tokens come as they are made, until cancelled: simulated engines skip steps of which nobody asks."""
        while True:
            for sequence in self.service.sequences:
                _ = sequence.known_tokens
            await asyncio.sleep(0.05)

    async def move_some(self, every_s: float) -> None:
        """Move a running sequence now and then, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            running = [each for each in self.service.sequences if each.is_generated and 5 < len(each.tokens) < 150]
            others = [name for name in self.engines if name.startswith("decode")]
            if running:
                sequence = self._random.choice(running)
                to = self._random.choice([name for name in others if name != sequence.engine])
                self._tasks.spawn(self.service.moves.follow(sequence, to, "rebalance"), "move")

    async def close(self) -> None:
        await self._tasks.close()
        self.shared.close()
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class ReportTo:
    """Passes an engine's load on to a router's fleet."""

    def __init__(self, fleet: EngineFleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def load(self, load: object) -> None:
        self._fleet.report(self._name, load)  # type: ignore[arg-type]

    def stored(self, hashes: Sequence[int]) -> None: ...

    def dropped(self, hashes: Sequence[int]) -> None: ...

    def cleared(self) -> None: ...


@asynccontextmanager
async def page_fleet(
    engines: int, metrics: Metrics, keys: Sequence[str] = (), admin_key: str = "", apart: bool = False
) -> AsyncGenerator[PageFleet]:
    """A fleet that has started, in memory."""
    fleet = PageFleet(engines, metrics, keys=keys, admin_key=admin_key, apart=apart)
    async with fleet.membership:
        await fleet.start()
        try:
            yield fleet
        finally:
            fleet.shutdown.begin()
            await fleet.close()


@asynccontextmanager
async def served(app: ASGIApp, port: int = 0) -> AsyncGenerator[str]:
    """The address at which ``app`` is served while entered."""
    with socket.create_server(("127.0.0.1", port)) as sock:
        async with http_server.served(app, sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", type=int)
    parser.add_argument("--port", type=int, default=8930)
    parser.add_argument("--rate", type=float, default=8)
    given = parser.parse_args()
    async with page_fleet(given.engines, Metrics()) as fleet, served(fleet.app, given.port) as url:
        fleet.history.begin()
        print(f"{url}/tercet", flush=True)
        await asyncio.gather(fleet.deliver(), fleet.load(given.rate), fleet.move_some(0.7))


if __name__ == "__main__":
    asyncio.run(main())
