"""A router without vLLM's part: the service, the membership and the routes, over engines in memory."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, models, pre_tokenizers

from tercet.fleet import EngineFleet, Trace
from tercet.fleet.admission import Gate
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import EngineStatus, EngineUnreachable, Request
from tercet.protocol.addresses import TextFingerprint
from tercet.router import admin
from tercet.router.observe.metrics import Metrics
from tercet.router.page.page_app import PageApp
from tercet.router.router_app import RouterApp
from tercet.router.serve.plans import NamedFiles, Plan
from tercet.router.serve.service import Service
from tercet.router.state.fleet_state import FleetState, ProgramInUse
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress, Limits
from tercet.wire.callers import BearerKeys
from tercet.wire.client import Admit
from tercet.wire.serving.server_access import AdminAccess
from tests.own_metrics import own_metrics
from tests.unit.fakes import FakeEngine

PROGRAMS = """
from tercet.protocol import BadRequest, NoSpace, Output

async def good(request, fleet, *, by: str = "least_loaded"):
    with fleet.pick(by=by) as engine:
        async for output in engine.start_generate(request):
            yield output

async def marked(request, fleet):
    yield Output((7, 7, 7), "stop")

async def raises(request, fleet):
    raise ValueError("oh no")
    yield

async def exits(request, fleet):
    raise SystemExit(3)
    yield

async def yields_none(request, fleet):
    yield None

async def yields_nothing(request, fleet):
    return
    yield

async def breaks_off(request, fleet):
    yield Output((100,))
    raise ValueError("too late")

async def wrong_picker(request, fleet):
    with fleet.pick(by="nonsense") as engine:
        yield engine.start_generate(request)

async def refuses(request, fleet):
    raise BadRequest("prompt: not with me", "prompt")
    yield

async def no_space(request, fleet):
    raise NoSpace("full")
    yield

async def will_not_be_cancelled(request, fleet):
    with fleet.pick() as engine:
        try:
            async for output in engine.start_generate(request):
                yield output
        except BaseException:
            raise ValueError("not me") from None

def no_generator(request, fleet):
    return None
"""

# A disk that others use takes tens of milliseconds to flush a file, and no test here is about that.
IN_MEMORY = "/dev/shm"
JSON = {"content-type": "application/json"}


class Engine(FakeEngine):
    """Has a status, and notices when its connection is closed."""

    def __init__(self, name: str, model: str = "m", max_model_len: int = 1000) -> None:
        super().__init__(name)
        self.model, self.max_model_len = model, max_model_len
        self.closed = False
        self.gone = False
        self.text = TextFingerprint()
        self.fingerprint = ""

    async def status(self) -> EngineStatus:
        if self.gone:
            raise EngineUnreachable(f"{self.name} does not answer")
        return EngineStatus(
            engine=self.name, model=self.model, version="0", vllm_version="0", block_size=16, total_blocks=10,
            free_blocks=10, running=0, waiting=0, kv_cache_usage=0.0, max_model_len=self.max_model_len, leases=0,
            sends=0, text=self.text, fingerprint=self.fingerprint,
        )  # fmt: skip


class LiveRouter:
    """One router; ``engines`` are those that exist in the world, by URL."""

    def __init__(self, metrics: Metrics, program: str, return_after: int) -> None:
        self.engines = {f"http://{name}": Engine(name) for name in ("p", "d")}
        self.fleet = EngineFleet(())
        self.membership = Membership(self.fleet, self._connect)
        self.service = Service(self.fleet, program, {}, metrics, return_after)
        self.metrics = metrics
        self.directory = Path(tempfile.mkdtemp(prefix="tercet-test-", dir=IN_MEMORY))
        self.shared = SharedState(self.directory / "state.json", self.membership, self.service)
        self.number = 0
        self.folders = [tempfile.gettempdir()]

    @asynccontextmanager
    async def _connect(self, _name: str, url: str, _admit: Admit) -> AsyncGenerator[Engine]:
        engine = self.engines[url]
        engine.closed = False
        try:
            yield engine
        finally:
            engine.closed = True

    async def start(self) -> None:
        addresses = (EngineAddress("p", "http://p", "prefill"), EngineAddress("d", "http://d", "decode"))
        program = ProgramInUse(1, self.service.wanted)
        members = tuple(MemberState(address) for address in addresses)
        await self.shared.start(FleetState(members=members, program=program))
        self.membership.served_model = await self.shared.until_ready()
        assert self.membership.served_model.max_model_len == 1000

    async def use(self, plan: Plan) -> None:
        """As an operator asks for it."""
        assert await self.shared.use_program(plan) == []

    def close(self) -> None:
        self.shared.close()
        while self.directory.exists():  # the thread that writes the state may be at its last write
            shutil.rmtree(self.directory, ignore_errors=True)

    def engine(self, name: str) -> Engine:
        return self.engines[f"http://{name}"]

    async def ask(
        self, headers: dict[str, str] | None = None, model: str = "", began: float | None = None, **sampling: Any
    ) -> tuple[str, list[int]]:
        """The program that served it in the end, and the tokens."""
        self.number += 1
        request = Request(
            seq_id=f"s{self.number}", prompt=tuple(range(100)), sampling_params=sampling, headers=headers or {}
        )
        trace = Trace()
        tokens = [token async for item in self.service.run(request, trace, model, began) for token in item.token_ids]
        return trace.program, tokens

    def application(
        self, *keys: str, admin_keys: Sequence[str] = (), page: PageApp | None = None, **options: Any
    ) -> RouterApp:
        app = FastAPI(**options)
        admin.install(app, self.shared, ["m"], files=NamedFiles(self.folders))
        gate = Gate(Limits(), self.fleet, self.metrics)
        admins = AdminAccess(BearerKeys(admin_keys), BearerKeys(keys))
        return RouterApp(app, None, gate, keys, self.service.program_called, 1_000_000, admins=admins, page=page)

    def client(self, *admin_keys: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.application(admin_keys=admin_keys))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost/tercet/v1", headers=JSON)

    async def has_everything_back(self) -> bool:
        """Python closes generators that a program left in a step of their own, so this takes some steps at most."""
        for _ in range(50):
            members = [member.in_flight for member in self.fleet.members]
            engines = [engine.running + len(engine.leases) for engine in self.engines.values()]
            if not any(members) and not any(engines):
                return True
            await asyncio.sleep(0)
        return False


def shared_over(service: Service, membership: Membership) -> SharedState:
    """Of a fleet that nothing changes."""
    path = Path(tempfile.mkdtemp(prefix="tercet-test-")) / "state.json"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return SharedState(path, membership, service)


def draining(name: str, draining: bool) -> Callable[[FleetState], FleetState]:
    return lambda state: state.with_draining(name, draining)


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with own_metrics():
        yield Metrics()


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A file of programs; ``programs + ":raises"`` is one of them."""
    (tmp_path / "programs.py").write_text(PROGRAMS)
    return str(tmp_path / "programs.py")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which there is a tokenizer alone, of 500 words."""
    directory = tmp_path_factory.mktemp("words")
    words = {word: number for number, word in enumerate(["?", *(f"w{number}" for number in range(500)), ":"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
async def router(metrics: Metrics) -> AsyncIterator[LiveRouter]:
    router = LiveRouter(metrics, "disaggregated", return_after=3)
    async with router.membership:
        await router.start()
        yield router
    router.close()


def counted(name: str, **labels: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series of Tercet's in this process."""
    samples = (sample for metric in prometheus_client.REGISTRY.collect() for sample in metric.samples)
    return {(each.name, tuple(sorted(each.labels.items()))) for each in samples if each.name.startswith("tercet_")}
