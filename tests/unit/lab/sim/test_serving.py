"""Simulated engines in real time: the router's own client and programs over HTTP, and what is given back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import aiohttp
import msgspec
import pytest

from tercet.cluster.ports import free_ports, url_of
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.logs import lines_of_request
from tercet.programs import load_program, outputs_of
from tercet.protocol import BadRequest, NoSpace, Request, Reservation, Role, TransferFailed, UnknownSequence
from tercet.protocol.headers import INCARNATION_HEADER
from tercet.protocol.wire import API_PREFIX
from tercet.wire.client import HttpEngine, StreamListener
from tercet_lab.sim import EngineOptions, SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.sim.step_times import StepTimes
from tests.abort import abort
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.virtual_time import in_virtual_time

from .models import BLOCK, engines_of, is_empty, profile_of, request_of, tokens_of

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
# Steps of 2 ms, and a microsecond for each token past the first.
QUICK = StepTimes(knots=((1, 0.002), (1001, 0.003)), pair=0.0, context=0.0)


STREAMED = False


@pytest.fixture(autouse=True, params=["server-sent events", "token stream"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How outputs reach the router."""
    monkeypatch.setitem(globals(), "STREAMED", request.param == "token stream")
    return request.param


class Pair:
    """A prefill and a decode engine, behind HTTP, and what is inside them."""

    def __init__(self, clients: list[HttpEngine], engines: list[SimEngine]) -> None:
        self.clients = clients
        self.inside = engines
        roles: tuple[Role, Role] = ("prefill", "decode")
        self.fleet = EngineFleet(
            [Member(each.name, each.url, role, each) for each, role in zip(clients, roles, strict=True)]
        )

    async def settled(self) -> bool:
        """Whether both are empty; what a client gave up is given back when the server notices."""
        await until(lambda: all(is_empty(engine) for engine in self.inside))
        return True


@asynccontextmanager
async def pair(times: StepTimes = QUICK, blocks: int = 1000, secret: str = "") -> AsyncGenerator[Pair]:
    async with AsyncExitStack() as stack:
        clients, engines = list[HttpEngine](), list[SimEngine]()
        listener = await stack.enter_async_context(StreamListener()) if STREAMED else None
        for name, port in zip(("p", "d"), free_ports(HOST, 2), strict=True):
            config = ServerConfig(
                name=name, profile=profile_of(times, blocks), port=port, url=url_of(HOST, port), model="m",
                secret=secret,
            )  # fmt: skip
            engines.append(await stack.enter_async_context(serving(config)))
            clients.append(
                await stack.enter_async_context(HttpEngine(name, config.url, listener=listener, secret=secret))
            )
        yield Pair(clients, engines)


@pytest.fixture
async def found() -> AsyncGenerator[Pair]:
    async with pair() as found:
        yield found


@pytest.mark.parametrize("program", ["data_parallel", "disaggregated", "balanced"])
async def test_the_router_serves_through_programs(program: str, found: Pair) -> None:
    serve = load_program(program)

    async def one(index: int) -> tuple[Trace, list[int]]:
        trace, tokens = Trace(), list[int]()
        request = request_of(f"s{index}", 100, 8, first=index * 1000)
        async for output in outputs_of(serve(request, FleetView(found.fleet, trace))):
            tokens += output.token_ids
        return trace, tokens

    answers = await asyncio.gather(*(one(index) for index in range(20)))
    assert all(len(tokens) == 8 for _, tokens in answers)
    # What is said depends on the prompt alone, and not on where it is said.
    assert answers[3][1] == await tokens_of(found.clients[0], request_of("again", 100, 8, first=3000))
    assert await found.settled()
    sent = [event for trace, _ in answers for event in trace.events if event.verb == "remote_send"]
    assert bool(sent) is (program != "data_parallel")


async def test_each_step_is_an_event_of_its_own(found: Pair) -> None:
    loop = asyncio.get_running_loop()
    began, outputs, times = loop.time(), list[int](), list[float]()
    async for output in found.clients[0].start_generate(request_of("s", 100, 20)):
        outputs.append(len(output.token_ids))
        times.append(loop.time() - began)
    assert outputs == [1] * 20
    # Not ahead of the profile; how late it is depends on the machine.
    assert times[-1] >= 20 * 0.002 * 0.9


@in_virtual_time
async def test_delays_of_the_machine_do_not_add_up() -> None:
    """A loop that is held up hands over what is overdue, and goes on as planned."""

    (engine,) = engines_of("a", stream_every=1)
    loop = asyncio.get_running_loop()
    times = list[float]()
    async for _ in engine.start_generate(request_of("s", 1, 100)):
        times.append(loop.time())
        if len(times) == 10:
            setattr(loop, "_now", loop.time() + 0.205)  # noqa: B010
    assert times[9] == pytest.approx(0.1)
    assert times[10:30] == pytest.approx([0.305] * 20)
    assert times[30:] == pytest.approx([0.01 * step for step in range(31, 101)])
    assert engine.counters.busy == pytest.approx(1.0)


async def test_received_kv_is_used_and_counted(found: Pair) -> None:
    prefill, decode = found.clients
    request = request_of("s", 100, 5)
    async with decode.prep_recv(request) as reservation:
        sent = await prefill.remote_send(request, reservation, 0, sample=True)
        assert sent.first is not None
        outputs = [item async for item in decode.start_generate(request, 100, sent.first.token_ids)]
    assert outputs[0].usage is not None
    assert (outputs[0].usage.received, outputs[0].usage.computed) == (100, 1)
    status = await decode.status()
    assert (status.leases, status.running, status.free_blocks) == (0, 0, 1000)
    assert found.inside[1].pool.cached == 104 // BLOCK
    assert await found.settled()


@pytest.mark.parametrize("page", [{"origin": "http://evil.example"}, {"host": "evil.example"}])
async def test_without_a_secret_no_page_calls_a_verb(page: dict[str, str], found: Pair) -> None:
    url = f"{found.clients[0].url}/tercet/v1"
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/abort", json={"seq_id": "s"}, headers=page) as answer,
    ):
        assert answer.status == 403


@pytest.mark.parametrize("secret", ["s3cret", "s3cret before"])
async def test_a_fleet_with_a_secret_serves_its_members_alone(secret: str) -> None:
    async with pair(secret=secret) as found:
        prefill, decode = found.clients
        request = request_of("s", 100, 5)
        async with decode.prep_recv(request) as reservation:
            await prefill.remote_send(request, reservation, 0)  # which has one engine call the other
            outputs = [item async for item in decode.start_generate(request, 99)]
        assert outputs[0].usage is not None
        assert outputs[0].usage.received == 99
        delivery = {"lease": "l", "begin": 0, "content": None}
        async with aiohttp.ClientSession() as session:
            for verb in ("prep_recv", "remote_send", "start_generate", "abort", "release", "connect", "sim/deliver"):
                for shown in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
                    url = f"{decode.url}/tercet/v1/{verb}"
                    async with session.post(url, json=delivery, headers=shown) as answer:
                        assert answer.status == 401, verb
            for path, status in (("status", 401), ("sequences", 401)):
                async with session.get(f"{decode.url}/tercet/v1/{path}") as answer:
                    assert answer.status == status
            for each in secret.split():
                shown = {"authorization": f"Bearer {each}"}
                async with session.get(f"{decode.url}/tercet/v1/status", headers=shown) as answer:
                    assert answer.status == 200
        assert await found.settled()


async def test_a_receiver_with_another_secret_ends_the_send() -> None:
    """It answers each proof with a new challenge, which the sender must not follow for ever."""

    async with pair(secret="ours") as ours, pair(secret="theirs") as theirs, asyncio.timeout(LONGEST_WAIT_S):
        request = request_of("s", 100, 5)
        async with theirs.clients[1].prep_recv(request) as reservation:
            with pytest.raises(TransferFailed, match="401"):
                await ours.clients[0].remote_send(request, reservation, 0)


async def test_errors_cross_the_wire_with_their_kind() -> None:
    async with pair(blocks=10) as found:
        prefill, decode = found.clients
        with pytest.raises(BadRequest, match="max_tokens"):
            await tokens_of(prefill, request_of("s", 100, 0))
        with pytest.raises(BadRequest, match="logprobs: a simulated engine does not support"):
            await tokens_of(prefill, Request(seq_id="s", prompt=(1,), sampling_params={"logprobs": 3}))
        with pytest.raises(NoSpace):
            async with decode.prep_recv(request_of("s", 160)):
                pass
        async with decode.prep_recv(request_of("t", 60)) as reservation:
            for change in ({"transport": "tcp"}, {"ranks": ()}):
                info = msgspec.structs.replace(reservation.kv_addr_info, **change)
                with pytest.raises(BadRequest, match="is not from prep_recv"):
                    await prefill.remote_send(request_of("t", 60), Reservation(info, 0), 0)
            ended = msgspec.structs.replace(reservation.kv_addr_info, lease="over")
            with pytest.raises(TransferFailed, match="the lease has ended"):
                await prefill.remote_send(request_of("t", 60), Reservation(ended, 0), 0)
            gone = f"http://{HOST}:{free_ports(HOST, 1)[0]}"
            ranks = (msgspec.structs.replace(reservation.kv_addr_info.ranks[0], addresses=(gone,)),)
            nobody = msgspec.structs.replace(reservation.kv_addr_info, ranks=ranks)
            with pytest.raises(TransferFailed):
                await prefill.remote_send(request_of("t", 60), Reservation(nobody, 0), 0)
        assert await found.settled()


async def test_a_call_for_another_start_of_the_engine_is_refused(found: Pair) -> None:
    status = await found.clients[0].status()
    url = f"{found.clients[0].url}{API_PREFIX}"
    assert status.incarnation == found.inside[0].incarnation
    assert status.incarnation != (await found.clients[1].status()).incarnation
    async with aiohttp.ClientSession() as session:
        reserve = {"prompt": [1, 2, 3], "seq_id": "s"}
        for verb, call in (("prep_recv", reserve), ("abort", {"seq_id": "s"}), ("status", None)):
            method = "GET" if call is None else "POST"
            for named, expected in (("another", 409), (status.incarnation, 200)):
                headers = {INCARNATION_HEADER: named}
                async with session.request(method, f"{url}/{verb}", json=call, headers=headers) as answer:
                    body = await answer.json()
                    assert answer.status == expected, (verb, body)
                    if expected == 409:
                        assert (body["error"]["param"], body["error"]["code"]) == (INCARNATION_HEADER, "conflict")
                        assert is_empty(found.inside[0]) == (verb != "abort")  # which was refused, too
    assert await found.settled()


async def test_a_client_that_goes_away_gives_everything_back() -> None:
    slow = StepTimes(knots=((1, 0.02), (1001, 1.0)), pair=0.0, context=0.0)

    async with pair(slow) as found:
        prefill, decode = found.clients
        stream = decode.start_generate(request_of("a", 50, 10_000))
        await anext(stream)
        await stream.aclose()
        request = request_of("b", 900, first=5000)
        async with decode.prep_recv(request) as reservation:
            sending = asyncio.ensure_future(prefill.remote_send(request, reservation, 0))
            while not (found.inside[0].busy or sending.done()):
                await asyncio.sleep(0.001)
            assert not sending.done(), sending.exception()
            sending.cancel()
            await asyncio.wait({sending})
        assert await found.settled()


async def test_abort_and_release(found: Pair) -> None:
    engine = found.clients[0]
    async with aclosing(engine.start_generate(request_of("a", 50, 10_000))) as stream:
        await anext(stream)
        await abort(engine, "a")
        reasons = [output.finish_reason async for output in stream]
    assert reasons[-1] == "abort"
    with pytest.raises(UnknownSequence):
        await found.inside[0].release("none")
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{engine.url}/tercet/v1/abort", json={"seq_id": "a"}) as response,
    ):
        assert await response.json() == {"aborted": False}
    assert await found.settled()


async def test_as_an_openai_server(found: Pair) -> None:
    url = found.clients[0].url
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "m"
        body = {"model": "m", "prompt": "four words are here", "max_tokens": 3, "temperature": 0}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            whole = await response.json()
        assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        assert whole["choices"][0]["finish_reason"] == "length"
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.post(f"{url}/v1/completions", json=asked) as response:
            events = [line[6:] for line in (await response.read()).splitlines() if line]
        *chunks, usage, done = events
        assert done == b"[DONE]"
        assert msgspec.json.decode(usage)["usage"]["completion_tokens"] == 3
        texts = [msgspec.json.decode(chunk)["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == whole["choices"][0]["text"]
        for wrong, status in (({"model": "other"}, 400), ({"logprobs": 1}, 400), ({"max_tokens": 0}, 400)):
            async with http.post(f"{url}/v1/completions", json={**body, **wrong}) as response:
                assert response.status == status
                assert "error" in await response.json()
        async with http.get(f"{url}/metrics") as response:
            assert 'vllm:num_requests_running{model_name="m"} 0.0' in await response.text()


@pytest.mark.parametrize(("allowed", "status"), [("", 403), ("1", 200)])
async def test_traces_are_for_the_fleet_unless_a_variable_allows_them(
    monkeypatch: pytest.MonkeyPatch, allowed: str, status: int
) -> None:
    monkeypatch.setenv("TERCET_CLIENT_TRACES", allowed)

    (port,) = free_ports("127.0.0.1", 1)
    url = url_of("127.0.0.1", port)
    config = ServerConfig(name="a", profile=profile_of(), port=port, url=url, model="m", secret="s" * 32)
    body = {"model": "m", "prompt": "four words are here", "max_tokens": 3}
    async with serving(config), aiohttp.ClientSession() as http:
        for headers, expected in (
            ({}, 200), ({"x-tercet-trace": "true"}, status), ({"x-tercet-trace": "1"}, status),
            ({"x-tercet-trace": "1", "authorization": "Bearer " + "s" * 32}, 200), ({"x-tercet-trace": "x"}, 400),
        ):  # fmt: skip
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == expected, headers
                answer = await response.json()
            assert ("tercet" in answer) == (expected == 200 and bool(headers))


def test_no_engine_library_is_loaded() -> None:
    """The command's own modules, in a process that has nothing else."""
    code = (
        "import sys; import tercet.cli.engine; "
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_streams_are_woken_for_each_token_unless_told_otherwise() -> None:
    config = ServerConfig(name="a", profile=profile_of(), port=1, url="http://a:1", model="m")
    assert config.options == EngineOptions(stream_every=1)


async def test_an_engine_reports_what_it_generates_and_for_whom(way: str, found: Pair) -> None:
    engine = found.clients[0]
    async with aclosing(engine.start_generate(request_of("s", 100, 5000))) as outputs:
        seen = 0
        while seen < 20:
            seen += len((await anext(outputs)).token_ids)
        (report,) = await engine.sequences()
        assert report.seq_id == "s"
        assert report.running
        assert report.tokens >= 100 + seen
        assert report.blocks >= -(-(100 + seen - 1) // BLOCK)
        assert report.age > 0
        assert bool(report.router) is (way == "token stream")
    assert await found.settled()
    assert await engine.sequences() == []


async def test_a_simulated_engine_logs_calls_and_generations_as_a_real_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")
    async with pair() as served:
        request = request_of("s", 100, 4)
        with lines_of_request("mine"):
            async for _ in outputs_of(load_program("disaggregated")(request, FleetView(served.fleet, Trace()))):
                pass
        assert await served.settled()
    found = [getattr(record, "tercet_fields") for record in caplog.records]  # noqa: B009
    said = {each["verb"]: each for each in found}
    assert set(said) == {"prep_recv", "remote_send", "start_generate"}
    assert {(each["status"], each["model"]) for each in found} == {(200, "m")}
    # The first token was sampled where the prompt was prefilled.
    assert (said["start_generate"]["prompt_tokens"], said["start_generate"]["output_tokens"]) == (101, 3)
    assert said["start_generate"]["request_id"] == "mine"
