"""The server: what it refuses and how, its health and metrics, its end, and how it takes nonsense."""

# pyright: reportAttributeAccessIssue=false
# Modules made from .proto files have no types.

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from msgspec import structs

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, Role, UnknownPath
from tercet_gateway import exchange
from tercet_gateway import server as picker_server
from tercet_gateway.endpoint_picker import MOST_MODELS, Endpoints
from tercet_gateway.exchange import SUBSET, SUBSET_METADATA, Exchange, candidates_of
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.openai_call import OpenAIBody, OpenAICall
from tercet_gateway.protos import HealthCheckRequest, HealthCheckResponse, HealthStub
from tercet_gateway.server import READY_NAMES, picking
from tests.conformance.envoy_side import BUFFERED, DUPLEX, PREFILLER, EnvoySide, Stream
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.wire.client.certificates import Authority

from .pickers import IDLE, House, Served, addresses, config_for, fleet_for, serving

BUSY = structs.replace(IDLE, waiting=99)
BODY = json.dumps({"model": "m", "prompt": "y" * 4000}).encode()


@asynccontextmanager
async def asked(*roles: Role, **fields: object) -> AsyncGenerator[tuple[EnvoySide, Served]]:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(*roles, **fields))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}"))
        yield EnvoySide(channel, patience=120.0), served


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
async def test_the_prefill_engine_is_named(mode: int) -> None:
    async with asked("decode", "prefill") as (envoy, _):
        verdict = await envoy.request(BODY, mode, headers={PREFILLER: "192.0.2.1:1"})
        assert verdict.headers[PREFILLER] == "10.0.0.2:8000"
        assert verdict.clears_route
        alone = await envoy.request(b'{"prompt": "short"}', mode, headers={PREFILLER: "192.0.2.1:1"})
        assert PREFILLER not in alone.headers
        assert PREFILLER in alone.removed


@pytest.mark.parametrize("body", [BODY, b"{"])
async def test_who_only_watches_is_not_answered(body: bytes) -> None:
    """In observability mode the proxy sends the request where it likes: nothing is picked, and nothing said."""
    async with asked("both") as (envoy, served):
        async with envoy.stream(DUPLEX) as stream:
            await stream.send(observability_mode=True, request_headers=HttpHeaders())
            await stream.send(observability_mode=True, request_body=HttpBody(body=body, end_of_stream=True))
            await stream.send(observability_mode=True, response_headers=HttpHeaders())
            await stream.call.done_writing()
            assert await stream.read() == ""
            assert await stream.call.code() == grpc.StatusCode.OK
        assert served.fleet.member("e0").in_flight == 0


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
async def test_a_body_that_is_too_large(mode: int) -> None:
    async with asked("both", max_request_bytes=1000) as (envoy, _):
        verdict = await envoy.request(BODY, mode)
        assert verdict.status == 413
        announced = await envoy.request(b"{}", mode, headers={"content-length": "5000"})
        assert announced.status == 413


@asynccontextmanager
async def begun(envoy: EnvoySide, size: int) -> AsyncGenerator[Stream]:
    """A stream of which so many bytes of a body have come, and not its end."""
    async with envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        for start in range(0, size, 50_000):
            piece = b"x" * min(50_000, size - start)
            await stream.send(request_body=HttpBody(body=piece, end_of_stream=False))
        yield stream


async def test_a_body_that_stops_is_408_and_its_bytes_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SECONDS", 0.1)
    async with asked("both") as (envoy, _), begun(envoy, 100_000) as stream:
        assert await stream.read() == "immediate_response"
        assert stream.verdict.status == 408
        assert json.loads(stream.verdict.refusal)["error"]["code"] == "request_timeout"
        assert (await envoy.request(BODY)).endpoints[0]


async def test_a_stream_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SECONDS", 0.1)
    async with asked("both") as (envoy, _), envoy.stream(DUPLEX) as stream:
        assert await stream.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_is_silent_while_its_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SECONDS", 0.1)
    async with asked("both") as (envoy, served), envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(BODY, 1000)
        verdict = await stream.until_it_goes_on()
        assert verdict.endpoints == [served.addresses[0]]
        await asyncio.sleep(0.3)
        await stream.send(response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"


async def test_the_largest_of_many_unfinished_bodies_is_let_go() -> None:
    async with asked("both", max_request_bytes=200_000) as (envoy, _), AsyncExitStack() as stack:
        others = [await stack.enter_async_context(begun(envoy, 151_000)) for _ in range(4)]
        largest = await stack.enter_async_context(begun(envoy, 199_000))
        assert await largest.read() == "immediate_response"
        assert largest.verdict.status == 429
        assert (await envoy.request(BODY)).endpoints[0]
        for other in others:
            await other.send(request_body=HttpBody(body=b"x", end_of_stream=True))
            assert (await other.until_it_goes_on()).status == 400  # it was read, and is no JSON


@pytest.mark.parametrize("said", [b"", b"PRI", b"GET / HTTP/1.1\r\n"])
async def test_a_connection_that_is_no_grpc_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = [(name, 200 if "handshake" in name else value) for name, value in picker_server.CONNECTIONS]
    monkeypatch.setattr(picker_server, "CONNECTIONS", soon)
    async with serving("both") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(said)
        async with asyncio.timeout(LONGEST_WAIT_S):
            while await reader.read(1000):
                pass
        writer.close()


@pytest.mark.slow
async def test_others_are_picked_for_between_the_pieces_of_a_long_body() -> None:
    pieces, piece = 1024, b"x" * 65_000
    async with asked("both") as (envoy, _), envoy.stream(DUPLEX) as long, asyncio.timeout(400):
        await long.send_headers("/v1/completions", {})
        during = list[int]()
        given_back = came = 0

        async def others() -> None:
            while given_back < pieces * len(piece):
                assert (await envoy.request(BODY)).endpoints[0]
                during.append(given_back or came - pieces)

        beside = asyncio.create_task(others())
        for came in range(1, pieces + 1):
            await long.send(request_body=HttpBody(body=piece, end_of_stream=came == pieces))
        assert (await long.reply()).WhichOneof("response") == "request_headers"
        while given_back < pieces * len(piece):
            given_back += len((await long.reply()).request_body.response.body_mutation.streamed_response.body)
        await beside
        assert any(when < 0 for when in during), "while it came"
        assert any(0 < when < pieces * len(piece) for when in during), "while it was given back"


@pytest.mark.parametrize(
    ("value", "candidates"),
    [
        ("a:1, b:2", ["a:1", "b:2"]),
        (["a:1,b:2", " c:3 "], ["a:1", "b:2", "c:3"]),
        (["a:1", 7.0, None], ["a:1"]),
        (7.0, []),
        (None, []),
        ({"a": "b"}, []),
        ([], []),
    ],
)
def test_candidates_that_are_not_understood_are_none_at_all(value: Any, candidates: list[str]) -> None:
    """Who limits a request must not be passed over: it is refused, rather than sent anywhere."""
    message = ProcessingRequest()
    message.metadata_context.filter_metadata[SUBSET_METADATA][SUBSET] = value
    assert candidates_of(message) == candidates
    assert candidates_of(ProcessingRequest()) is None


async def test_what_is_dropped_says_why() -> None:
    async with asked("both", max_queued=0) as (envoy, served):
        served.fleet.report("e0", BUSY)
        verdict = await envoy.request(BODY)
        assert (verdict.status, verdict.refusal_headers["x-llm-d-request-dropped-reason"]) == (
            429,
            "rejected-saturated",
        )
        assert verdict.refusal_headers["retry-after"]
        assert json.loads(verdict.refusal)["error"]["code"] == "saturated"
        served.fleet.drain("e0")
        verdict = await envoy.request(BODY)
        reason = verdict.refusal_headers["x-llm-d-request-dropped-reason"]
        assert (verdict.status, reason) == (503, "rejected-no-endpoints")


async def test_a_plugin_that_fails_is_one_requests_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tercet.decisions.scheduling import Scorer\n"
        "class Odd(Scorer, frozen=True):\n"
        "    def score(self, decision, engines):\n"
        "        return [1 / (decision.request.num_tokens - 1)] * len(engines)\n"
    )
    file = tmp_path / "scheduling.yaml"
    file.write_text(
        "plugins: [{type: 'mine.py:Odd', name: odd}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: odd}]}]\n"
    )
    async with asked("both", scheduling=str(file)) as (envoy, _):
        assert (await envoy.request(b'{"prompt": "abcd"}')).status == 500
        assert (await envoy.request(b'{"prompt": "abcdefgh"}')).endpoints == ["10.0.0.1:8000"]


async def test_who_leaves_while_waiting_gives_the_place_back() -> None:
    async with asked("both") as (envoy, served):
        served.fleet.report("e0", BUSY)
        async with envoy.stream(DUPLEX) as stream:
            await stream.send_headers("/v1/completions", {})
            await stream.send_body(BODY, 1000)
            waiting = served.server.picker._gate._admission.waiting
            await until(lambda: waiting)
        await until(lambda: not waiting)


async def test_metrics() -> None:
    async with asked("decode", "prefill", pool="p") as (envoy, served):
        served.fleet.report("e0", structs.replace(IDLE, waiting=3, kv_usage=0.25))
        await envoy.request(BODY)
        async with envoy.stream(DUPLEX) as stream:
            await stream.send_headers("/v1/completions", {})
            await stream.send_body(BODY, 1000)
            verdict = await stream.until_it_goes_on()
            await stream.send(served=verdict.endpoints[0], response_headers=HttpHeaders())
            assert await stream.read() == "response_headers"
        await envoy.request(b"{")
        text = ""
        async with asyncio.timeout(LONGEST_WAIT_S):  # the picker hears of a stream's end after its client has left
            while "tercet_picker_streams 0.0" not in text:
                async with aiohttp.request("GET", f"http://127.0.0.1:{served.server.metrics_port}/metrics") as answer:
                    text = await answer.text()
    for line in (
        'inference_objective_request_total{model_name="m"} 2.0',
        'inference_objective_request_error_total{error_code="400"} 1.0',
        'llm_d_inference_scheduler_disagg_decision_total{decision_type="prefill-decode",model_name="m"} 1.0',
        'llm_d_inference_scheduler_disagg_decision_total{decision_type="decode-only",model_name="m"} 1.0',
        'inference_pool_ready_pods{name="p"} 2.0',
        'inference_pool_per_pod_queue_size{model_server_pod="e0",name="p"} 3.0',
        'tercet_engine_kv_usage_ratio{engine="e0"} 0.25',
        'tercet_engine_waiting{engine="e0"} 3.0',
        'tercet_engine_up{engine="e1"} 1.0',
        'tercet_picker_served_total{endpoint="first"} 1.0',
        "inference_extension_scheduler_e2e_duration_seconds_count 2.0",
    ):
        assert line in text, line


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 1000])
async def test_invented_names_of_models_take_no_label_from_those_that_engines_report(length: int) -> None:
    async with asked("both") as (envoy, served):
        for model in (*(f"{number}" * length for number in range(100)), "m"):
            await envoy.request(json.dumps({"model": model, "prompt": "x"}).encode())
        async with aiohttp.request("GET", f"http://127.0.0.1:{served.server.metrics_port}/metrics") as answer:
            text = await answer.text()
    own = MOST_MODELS if length == 1 else 0
    assert f'inference_objective_request_total{{model_name="other"}} {100.0 - own}' in text
    assert 'inference_objective_request_total{model_name="m"} 1.0' in text
    assert len(re.findall(r"^inference_objective_request_total", text, re.MULTILINE)) == own + 2


def test_a_model_has_its_own_label_once_an_engine_reports_it() -> None:
    house = House("both")
    call = OpenAICall("/v1/completions", {}, OpenAIBody(model="later", prompt="x"), 1)
    for number in range(MOST_MODELS):
        invented = OpenAICall("/v1/completions", {}, OpenAIBody(model=f"{number}", prompt="x"), 1)
        house.metrics.decided(invented, 1, 0, False, 0.0)
    house.metrics.decided(call, 1, 0, False, 0.0)
    house.fleet.member("e0").model = "later"
    house.metrics.decided(call, 1, 0, False, 0.0)
    counted = house.metrics.registry.get_sample_value
    for model in ("other", "later"):
        assert counted("inference_objective_request_total", {"model_name": model}) == 1


async def test_a_body_is_let_go_of_when_it_has_been_picked_for() -> None:
    """Its stream stays open until an engine answers, which may take minutes."""
    exchange = Exchange(10_000)
    buffered = ProtocolConfiguration(request_body_mode=BUFFERED)
    exchange.receive(ProcessingRequest(request_headers=HttpHeaders(), protocol_config=buffered))
    exchange.receive(ProcessingRequest(request_body=HttpBody(body=BODY, end_of_stream=True)))
    assert exchange._chunks == [BODY]
    assert exchange.picked(Endpoints(["10.0.0.1:8000"]))
    assert exchange._chunks == []


@pytest.mark.parametrize("path", ["/tercet/v1/status", "//tercet/v1/status", "/sleep?level=1", "/v1/load_lora_adapter"])
def test_no_engine_is_picked_for_what_is_not_for_clients(path: str) -> None:
    headers = HttpHeaders()
    headers.headers.headers.add(key=":path", raw_value=path.encode())
    with pytest.raises(UnknownPath, match="is not for clients"):
        Exchange(10_000).receive(ProcessingRequest(request_headers=headers))


async def test_health_has_a_port_of_its_own_without_tls(tmp_path: Path) -> None:
    """Kubelets ask for it and speak no TLS."""
    certificate, key = Authority(tmp_path, "ca").issue("picker")
    (port,) = free_ports("127.0.0.1", 1)
    tls = {"tls_cert": str(certificate), "tls_key": str(key)}
    async with serving("both", grpc_health_port=port, **tls), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert (await HealthStub(channel).Check(HealthCheckRequest(service="liveness"))).status == 1
    with pytest.raises(BadRequest, match="cannot listen on"):
        async with serving("both"), serving("both", grpc_health_port=port), serving("both", grpc_health_port=port):
            pass


async def test_a_picker_is_ready_once_an_engine_has_answered() -> None:
    config = config_for(["both"])
    fleet = fleet_for(config)
    fleet.member("e0").reachable = False
    async with picking(fleet, config) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health = HealthStub(channel)

        async def said(name: str) -> int:
            return (await health.Check(HealthCheckRequest(service=name))).status

        assert [await said(name) for name in READY_NAMES] == [HealthCheckResponse.NOT_SERVING] * 3
        assert await said("liveness") == HealthCheckResponse.SERVING
        fleet.member("e0").reachable = True
        async with asyncio.timeout(LONGEST_WAIT_S):
            while await said("readiness") != HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        fleet.member("e0").reachable = False
        assert [await said(name) for name in READY_NAMES] == [HealthCheckResponse.SERVING] * 3


async def test_a_picker_without_engines_is_ready_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says 503 by itself; not ready, it would be passed over."""
    monkeypatch.setattr("tercet_gateway.server.READY_SECONDS", 0.2)
    config = config_for(["both"])
    fleet = fleet_for(config)
    fleet.member("e0").reachable = False
    async with picking(fleet, config) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        async with asyncio.timeout(LONGEST_WAIT_S):
            while (await HealthStub(channel).Check(HealthCheckRequest(service=""))).status != 1:
                await asyncio.sleep(0.01)
        assert (await EnvoySide(channel).request(BODY)).status == 503


async def test_a_picker_that_ends_is_alive_not_ready_and_still_picks() -> None:
    async with asked("both") as (envoy, served):
        hurried = asyncio.Event()
        draining = asyncio.create_task(served.server.drain(60.0, hurried))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}") as channel:
            health = HealthStub(channel)
            async with asyncio.timeout(LONGEST_WAIT_S):
                while True:
                    said = [(await health.Check(HealthCheckRequest(service=name))).status for name in READY_NAMES]
                    if set(said) == {HealthCheckResponse.NOT_SERVING}:
                        break
            alive = await health.Check(HealthCheckRequest(service="liveness"))
        assert alive.status == HealthCheckResponse.SERVING
        assert (await envoy.request(BODY)).endpoints == ["10.0.0.1:8000"]
        hurried.set()
        await draining


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"objectives": {"a": "much"}}, "objectives"),
        ({"tls_cert": "x"}, "tls-key"),
        ({"max_kv_usage": 0}, "max-kv-usage"),
        ({"engines": ()}, "engines"),
        ({"engines": addresses(["both"]) * 2}, "engines"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        PickerConfig(**{"engines": addresses(["both"]), **fields})  # type: ignore[arg-type]


async def test_a_port_that_is_taken() -> None:
    async with serving("both") as served:
        with pytest.raises(BadRequest, match="port"):
            async with serving("both", port=served.server.port):
                pass


# A picker with TLS: what it shows changes with its files, while it serves.


async def is_trusted(port: int, by: Authority) -> bool:
    """Whether a client that trusts only this authority is served."""
    credentials = grpc.ssl_channel_credentials(by.file.read_bytes())
    # Or channels of one address would share a connection that is open already.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        try:
            await HealthStub(channel).Check(HealthCheckRequest(service="liveness"), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    certificate, key = first.issue("picker")
    new_certificate, new_key = second.issue("renewed")
    async with serving("both", tls_cert=str(certificate), tls_key=str(key)) as served:
        port = served.server.port
        assert await is_trusted(port, first)
        assert not await is_trusted(port, second)
        # Half of the pair is no pair: what was good last is shown, and the log says so once.
        certificate.write_bytes(new_certificate.read_bytes())
        assert await is_trusted(port, first)
        assert await is_trusted(port, first)
        assert caplog.text.count("cannot be used, the previous one stays in use") == 1
        key.write_bytes(new_key.read_bytes())
        assert await is_trusted(port, second)
        assert not await is_trusted(port, first)
        certificate.unlink()
        assert await is_trusted(port, second)


@pytest.mark.parametrize("broken", ["", "no certificate"])
async def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path, broken: str) -> None:
    certificate, key = Authority(tmp_path, "ca").issue("picker")
    certificate.write_text(broken)
    with pytest.raises(BadRequest) as refused:
        async with serving("both", tls_cert=str(certificate), tls_key=str(key)):
            pass
    assert refused.value.param == "tls-cert"
