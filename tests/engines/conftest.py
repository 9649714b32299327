"""Real vLLM engines and routers, started once for all tests here; float32, so that tokens compare.

They compute a small model with random weights (tests/small_llama.py). A module in which it matters what the text says
has a fixture `fleet` of its own that is `speaking`, whose engines have SmolLM2.

Tests may stop and kill the shared engines: what is dead is started anew, where it was, before the next test that asks
for a fleet, and by these tests alone: `tercet up` starts none anew here. But it ends with the last engine that it
started itself, so `prefill-0` is never killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.cluster.ports import free_ports
from tercet.protocol import EngineStatus
from tercet.wire.client import HttpEngine
from tests.otlp import Receiver
from tests.small_llama import small_llama
from tests.warm import MODEL, spec_of, start_guarded, warm_parent

from .processes import TRACED, EnginePlace

START_SECONDS = 420
# Fixtures of the engines that tests share.
SHARED = {"fleet", "speaking", "breakable"}
# Engines may be named to prefill for one another.
PREFILLERS = {"TERCET_PREFILL_HOSTS": "127.0.0.1:*"}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
            # `make test` runs these next to the tests of the shared engines.
            if isinstance(item, pytest.Function) and not SHARED & {*item.fixturenames}:
                item.add_marker(pytest.mark.own_engines)


@pytest.fixture(scope="session", autouse=True)
def one_import(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All processes that these tests start are forked from one that has imported vLLM."""
    with warm_parent(tmp_path_factory.mktemp("warm") / "imports.log"):
        yield


def free_port() -> int:
    return free_ports("127.0.0.1", 1)[0]


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return msgspec.json.decode(response.read())


@dataclass
class Fleet:
    """Engines behind a router, by the places that they have; `process` is a running `tercet up`."""

    url: str
    places: Mapping[str, EnginePlace]
    process: subprocess.Popen[bytes] | None = None

    def engine(self, name: str) -> dict[str, Any]:
        """What the router tells about one engine."""
        return next(engine for engine in get_json(f"{self.url}/tercet/v1/engines") if engine["name"] == name)

    def engine_url(self, role: str) -> str:
        return next(engine["url"] for engine in get_json(f"{self.url}/tercet/v1/engines") if engine["role"] == role)

    def engine_urls(self) -> dict[str, str]:
        return {name: place.url for name, place in self.places.items()}

    def mend(self) -> None:
        """Start dead engines anew, and wait until every one answers and the router picks it."""
        started = set[str]()
        deadline = time.monotonic() + START_SECONDS
        while lost := [name for name in self.places if not self._serves(name)]:
            died = {name for name in lost if self.places[name].is_dead}  # a killed process may take a while to end
            if died & started or time.monotonic() > deadline:
                pytest.fail(f"{', '.join((died & started) or lost)} did not come back")
            for name in died:
                self.places[name].start()
            started |= died
            time.sleep(0.2)

    def _serves(self, name: str) -> bool:
        if not answers(f"{self.places[name].url}/health"):
            return False
        listed = {each["name"]: each for each in get_json(f"{self.url}/tercet/v1/engines")}
        if name not in listed:  # `tercet up` has had its router forget it: it starts none anew here
            self._list(name)
        return name in listed and listed[name]["reachable"]

    def _list(self, name: str) -> None:
        body = {"name": name, "url": self.places[name].url, "role": name.partition("-")[0]}
        url, headers = f"{self.url}/tercet/v1/engines", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, msgspec.json.encode(body), headers), timeout=30):
            pass

    def stop(self) -> None:
        for place in self.places.values():
            place.stop()
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def start_fleet(tmp: Path, *args: str, model: str = MODEL) -> Fleet:
    """Run `tercet up` with float32 engines and wait until the router answers."""
    port = free_port()
    log = tmp / "up.log"
    engine_args = args[args.index("--") + 1 :] if "--" in args else ()
    command = [
        sys.executable, "-m", "tercet.cli", "up", "--model", model, "--prefill", "1", "--decode", "1",
        "--served-model-name", MODEL, "--port", str(port), "--dtype", "float32", "--log-dir", str(tmp / "logs"),
        "--engine-restarts", "0", *args,
    ]  # fmt: skip
    with log.open("wb") as output:
        environment = {**os.environ, **PREFILLERS, **TRACED}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"tercet up ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            return Fleet(url, places_of(url, tmp, *engine_args, model=model), process)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    Fleet(url, {}, process).stop()
    pytest.fail(f"tercet up was not ready after {START_SECONDS} s:\n{log.read_text()[-4000:]}")


def places_of(url: str, tmp: Path, *args: str, model: str = MODEL) -> dict[str, EnginePlace]:
    """The places of the engines behind a router that answers; what starts there later gets `args`."""
    engines = get_json(f"{url}/tercet/v1/engines")
    specs = [
        spec_of(each["name"], int(each["url"].rpartition(":")[2]), *args, model=model, core=core)
        for core, each in enumerate(engines)
    ]
    return {spec.name: EnginePlace.taken(spec, tmp / f"{spec.name}.log") for spec in specs}


@contextmanager
def router_over(engines: Mapping[str, str], tmp: Path, *args: str, model: str | Path | None = None) -> Generator[str]:
    """Another router, with `args` of `tercet router`; its URL, once it answers.

    `engines` are URLs by names that begin with the role; their model is the shared fleet's if none is given.
    """
    port, log = free_port(), tmp / "router.log"
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "tercet.cli", "router", "--model", str(model or small_llama()),
        "--served-model-name", MODEL, "--port", str(port),
    ]  # fmt: skip
    for name, engine_url in engines.items():
        command += ["--engine", f"{engine_url},role={name.partition('-')[0]},name={name}"]
    with running([*command, *args], log, f"{url}/health"):
        yield url


@contextmanager
def running(command: Sequence[str], log: Path, url: str) -> Generator[None]:
    """While entered, the command runs and has answered at `url`."""
    with log.open("ab") as output:
        process = start_guarded(command, os.environ, output)
    try:
        deadline = time.monotonic() + START_SECONDS  # engines may still be loading
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{' '.join(command)} does not answer:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def running_engine(tmp: Path, name: str, *args: str) -> Generator[str]:
    """One engine with the shared fleet's model and data type, and `args` of vLLM's; its URL, once it answers."""
    place = EnginePlace.of(spec_of(name, free_port(), *args, model=str(small_llama())), tmp / "engine.log")
    place.start()
    try:
        until_answering([place])
        yield place.url
    finally:
        place.stop()


def until_answering(places: Sequence[EnginePlace]) -> None:
    """Wait until every engine answers; fails if one ends."""
    deadline = time.monotonic() + START_SECONDS
    while lost := [place for place in places if not answers(f"{place.url}/health")]:
        died = [place for place in lost if place.is_dead]
        if died or time.monotonic() > deadline:
            pytest.fail("\n".join(place.log.read_text()[-3000:] for place in died or lost))
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Where the shared engines and their routers export spans to, of traces that a client samples and of no others."""
    with Receiver() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield made


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The shared fleet: one prefill and one decode engine behind a router.

    While working on the tests, TERCET_TEST_ROUTER=URL takes one that runs already (float32, min_send=1).
    """
    tmp = tmp_path_factory.mktemp("fleet")
    if given := os.environ.get("TERCET_TEST_ROUTER"):
        shared = Fleet(given, places_of(given, tmp, *ENGINE_ARGS, model=str(small_llama())))
    else:
        args = ("--program-arg", "min_send=1", "--", *ENGINE_ARGS)
        shared = start_fleet(tmp, *args, model=str(small_llama()))
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """As the shared fleet, with SmolLM2."""
    made = start_fleet(tmp_path_factory.mktemp("speaking"), "--program-arg", "min_send=1", "--", *ENGINE_ARGS)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def breakable(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The shared engines and a third one, decode-1, behind a router of their own; its operator may pause that one."""
    tmp = tmp_path_factory.mktemp("breakable")
    spec = spec_of("decode-1", free_port(), *ENGINE_ARGS, model=str(small_llama()), core=1)
    third = EnginePlace.of(spec, tmp / "decode-1.log", VLLM_SERVER_DEV_MODE="1")
    third.start()  # it loads beside the router
    places = {**fleet.places, third.name: third}
    urls = {name: place.url for name, place in places.items()}
    try:
        with router_over(urls, tmp, "--program-arg", "min_send=1") as url:
            yield Fleet(url, places)
    finally:
        third.stop()


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> None:
    """A test finds every engine of its fleet alive, whatever the one before has done to them."""
    for name in ("fleet", "breakable"):
        if name in request.fixturenames:
            request.getfixturevalue(name).mend()


# Small enough that a prompt of a few hundred tokens is prefilled in chunks.
MAX_BATCHED = 256
ENGINE_ARGS = ("--max-num-batched-tokens", str(MAX_BATCHED), "--max-model-len", "2048")


@pytest.fixture
async def prefill(fleet: Fleet) -> AsyncIterator[HttpEngine]:
    async with HttpEngine("prefill-0", fleet.engine_url("prefill")) as engine:
        yield engine


@pytest.fixture
async def decode(fleet: Fleet) -> AsyncIterator[HttpEngine]:
    async with HttpEngine("decode-0", fleet.engine_url("decode")) as engine:
        yield engine


async def settled(engine: HttpEngine, seconds: float = 30.0) -> EngineStatus:
    """The engine's status once it holds nothing for anybody; fails if that does not happen."""
    deadline = time.monotonic() + seconds
    while True:
        status = await engine.status()
        busy = status.running or status.waiting or status.leases or status.sends
        if not busy and status.free_blocks == status.total_blocks:
            return status
        if time.monotonic() > deadline:
            pytest.fail(f"{engine.name} still holds something after {seconds:.0f} s: {status}")
        await asyncio.sleep(0.05)


@pytest.fixture
async def nothing_leaks(prefill: HttpEngine, decode: HttpEngine) -> AsyncIterator[None]:
    """Afterwards blocks, leases and sends of both engines are back where they were."""
    await settled(prefill)
    await settled(decode)
    yield
    await settled(prefill)
    await settled(decode)
