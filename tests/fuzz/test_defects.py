"""What fuzzing has found: each defect as it was found, small."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from tercet.engine.agents import AgentReports
from tercet.fleet import FleetKnowledge, kv_events
from tercet.fleet.kv_events import MOST_SIZES, KVInbox
from tercet.programs.loading import load_program
from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineUnreachable,
    KVEvents,
    Request,
    RouterUnreachable,
    TercetError,
    packed,
)
from tercet.protocol.json_text import read_json
from tercet.protocol.wire import RemoteSendCall, StartGenerateCall, decode_call
from tercet.router.state.fleet_state import StateFile
from tercet.router.state.followers import ALIVE, REPORT, Followers
from tercet.router.state.loaded_code import load_scheduling_file
from tercet.settings import EngineAddress
from tercet.settings.declaration import read_yaml
from tercet.transport import GrantLease, KVRegion, LeaseFilled, SendDone, TransportSettings, is_address
from tercet.transport.agent.agent import Agent, AgentSetup
from tercet.transport.agent.agent_messages import ControlServer, ReadCounters
from tercet.transport.backends.reading import BackendUnavailable, understood
from tercet.vllm_plugin.edge.llm_requests import first_token_only, to_vllm
from tercet.wire.client import HttpEngine, StreamListener
from tercet.wire.client.bounded_answers import ask_router
from tercet.wire.streams import OutputBatch, RouterConnections
from tests.longest_wait import LONGEST_WAIT_S
from tests.servers import served
from tests.unit.fakes import LAYOUT
from tests.unit.router.conftest import Engine
from tests.unit.transport.agents import BlockingClient
from tests.unit.wire.streams.test_streams import connected, until

DEEP = 100_000
DEEP_JSON = b"[" * DEEP + b"]" * DEEP
DEEP_MSGPACK = b"\x91" * DEEP + b"\x01"
# A map with an unknown key, whose value is skipped.
SKIPPED = b"\x81\xa1?" + DEEP_MSGPACK
NOT_UTF8 = b"\xa2\xff\xff"

# ---- what msgspec raises beside its own errors -----------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"prompt": [1], "seq_id": "\xff"}', b'{"sampling_params": ' + DEEP_JSON + b"}"])
def test_a_call_that_is_no_text_or_too_deep_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_call(body, StartGenerateCall)


def test_a_body_that_is_too_deep_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="nested too deeply"):
        read_json(b'{"messages": ' + DEEP_JSON + b"}")


@pytest.mark.parametrize("said", [b"\x93" + NOT_UTF8, b"\x93\xa1s\x01\x82\xa4type\xaaGrantLease\xa1?" + DEEP_MSGPACK])
def test_the_control_channel_outlives_what_strangers_say(said: bytes) -> None:
    with closing(ControlServer(lambda _: {"here": 1})) as server:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.address)
        stranger.send(said)
        with closing(BlockingClient(server.address, server.secret)) as client:
            assert client.call(ReadCounters()) == {"here": 1}
        context.destroy(linger=0)


@pytest.mark.parametrize("said", [b"\x92" + NOT_UTF8 + b"\xc0", b"\x92\xa8SendDone" + SKIPPED])
async def test_the_inbox_of_reports_outlives_what_strangers_say(said: bytes) -> None:
    filled: list[LeaseFilled] = []
    reports = AgentReports(1, filled.append)
    socket: Any = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    address, _, key = reports.address.partition("#")
    socket.connect(address)
    try:
        with reports.sending() as sending:
            await socket.send_multipart([key.encode(), said])
            await socket.send(said)
            done = msgspec.msgpack.encode(["SendDone", SendDone(sending.send_id, 0, 1, 1)])
            await socket.send_multipart([key.encode(), done])
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert (await sending.wait()).bytes == 1
    finally:
        reports._task.cancel()
        reports._socket.close()
        socket.close(linger=0)


@pytest.mark.parametrize("command", [b"\x92\x90\x91\x81" + NOT_UTF8 + b"\x01", b"\x92\x90\x91" + SKIPPED])
async def test_an_engine_closes_the_stream_of_a_router_that_speaks_nonsense(
    command: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as pair:
        transport = pair.engine._transport
        assert transport is not None
        transport.write(len(command).to_bytes(4, "big") + command)
        await until(lambda: not pair.engine.connected)
    assert "Fatal error" not in caplog.text


async def test_a_router_closes_the_stream_of_an_engine_that_speaks_nonsense(caplog: pytest.LogCaptureFixture) -> None:
    batch = b"\x91\x91\x94\x01\x00\x90\x81\xa5error\x81\xa1x" + DEEP_MSGPACK
    async with connected() as pair:
        transport = pair.router._transport
        assert transport is not None
        transport.write(len(batch).to_bytes(4, "big") + batch)
        await until(lambda: not pair.engine.connected)
    assert "Fatal error" not in caplog.text


# ---- what an engine, or what is in its place, answers ----------------------------------------------------------------


@asynccontextmanager
async def answering(body: bytes, status: int = 200, has_status: bool = False) -> AsyncGenerator[str]:
    """A server that says the same whatever it is asked, but for an engine's status if it has one; its URL."""
    good = msgspec.json.encode(await Engine("e").status())

    async def answer(request: web.Request) -> web.Response:
        if has_status and request.path.endswith("/status"):
            return web.Response(body=good)
        return web.Response(body=body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url:
        yield url


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"engine": "\xff"}', DEEP_JSON], ids=["html", "{}", "ff", "deep"])
async def test_an_engine_that_answers_otherwise_is_an_engine_error(body: bytes) -> None:
    async with answering(body) as url, HttpEngine("e", url) as engine:
        with pytest.raises(EngineError, match="e does not answer as a Tercet engine"):
            await engine.status()
        with pytest.raises(EngineError, match="e does not answer as a Tercet engine"):
            async with engine.prep_recv(Request(seq_id="s", prompt=(1, 2))):
                pass


@pytest.mark.parametrize("data", [b"nonsense", b"{}", b"\xff", b'{"error": "\xff"}'])
async def test_a_stream_of_nonsense_is_an_engine_error(data: bytes) -> None:
    async with answering(b"data: " + data + b"\n\n", has_status=True) as url, HttpEngine("e", url) as engine:
        with pytest.raises(EngineError):
            await anext(engine.start_generate(Request(seq_id="s", prompt=(1, 2))))


async def test_a_line_without_end_is_a_broken_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.protocol.sse.read_events.__defaults__", (1024,))
    async with answering(b"data: " + b"x" * 1_000_000 + b"\n", has_status=True) as url, HttpEngine("e", url) as engine:
        with pytest.raises(EngineUnreachable):
            await anext(engine.start_generate(Request(seq_id="s", prompt=(1, 2))))


@pytest.mark.parametrize("body", [b"\xff", b'"\xff"', DEEP_JSON], ids=["ff", "text", "deep"])
@pytest.mark.parametrize("status", [200, 500])
async def test_what_is_no_router_is_told_so(body: bytes, status: int) -> None:
    async with answering(body, status) as url:
        with pytest.raises(EngineUnreachable, match="is not a router"):
            await ask_router(url, "GET", "/program")


async def test_errors_of_an_engine_that_are_no_text() -> None:
    async with answering(b'{"error": {"message": "\xff"}}', 500) as url, HttpEngine("e", url) as engine:
        with pytest.raises(TercetError):
            await engine.status()


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_size", "block_size", "block_bytes", "tp_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_layout_of_nothing_is_refused(field: str, value: int) -> None:
    layout = {**msgspec.to_builtins(LAYOUT), field: value}
    info = {
        "lease": "0" * 32, "engine": "e", "begin": 0, "end": 1, "transport": "tcp", "ranks": [], "layout": layout,
    }  # fmt: skip
    body = msgspec.json.encode({"prompt": [1], "seq_id": "s", "begin": 0, "kv_addr_info": info})
    with pytest.raises(BadRequest, match=field):
        decode_call(body, RemoteSendCall)


def test_a_port_of_five_thousand_digits_is_no_port() -> None:
    assert not is_address("tcp://h:" + "1" * 5000)


@pytest.mark.parametrize("host", ["a..b", "x" * 100, "\0", "\ud7ff"])
async def test_a_router_at_a_name_that_is_none_is_unreachable(host: str) -> None:
    routers = RouterConnections("e", "i", lambda: None, lambda *_: pytest.fail("nobody asked"))
    with pytest.raises(RouterUnreachable):
        await routers.connect(f"{host}:7001", "key")


@pytest.mark.parametrize("url", ["http://[", "http://", "http://h:port", "http://h:0", "http://h:99999", "http://[::1"])
async def test_an_engine_at_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        EngineAddress("e", url)
    async with StreamListener() as listener:
        if url not in ("http://h:0", "http://"):
            with pytest.raises(EngineUnreachable):
                await listener.address_for(url)


# ---- sampling parameters: the engine's core ends when it cannot read a request ---------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"ignore_eos": "yes"}, "sampling_params.ignore_eos"),
        ({"seed": "seven"}, "sampling_params.seed"),
        ({"stop_token_ids": ["a"]}, "sampling_params.stop_token_ids"),
        ({"allowed_token_ids": [1.5]}, "sampling_params.allowed_token_ids"),
        ({"logit_bias": {"word": 1}}, "sampling_params.logit_bias"),
        ({"logit_bias": {"5": "much"}}, "sampling_params.logit_bias"),
        ({"logit_bias": [1]}, "sampling_params.logit_bias"),
        ({"stop": 5}, "sampling_params.stop"),
        ({"bad_words": "word"}, "sampling_params.bad_words"),
        ({"structured_outputs": {"nonsense": 1, "json": 5}}, "sampling_params.structured_outputs"),
        ({"repetition_detection": {"min_count": "x"}}, "sampling_params.repetition_detection"),
        ({"prompt_logprob_token_ids": [[1], [1, 2]]}, "sampling_params"),
        ({"seed": 2**70}, "sampling_params"),
        ({"min_tokens": None}, "sampling_params.min_tokens"),
    ],
    ids=str,
)
def test_sampling_parameters_of_another_type_are_refused(given: dict[str, Any], param: str) -> None:
    for asked in (given, first_token_only(given)):
        with pytest.raises(BadRequest) as caught:
            to_vllm(asked, {}, 0)
        assert (caught.value.param or "").startswith(param)


def test_sampling_parameters_as_json_has_them_are_taken() -> None:
    given = {
        "temperature": 1, "logit_bias": {"5": 1}, "structured_outputs": {"regex": "a+"}, "stop": "x",
        "prompt_logprob_token_ids": [[1, 2], [3, 4]], "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    }  # fmt: skip
    made = to_vllm(given, {}, 0)
    assert (made.temperature, made.logit_bias, made.stop, made.detokenize) == (1.0, {5: 1.0}, ["x"], True)
    assert made.structured_outputs is not None
    assert made.structured_outputs.regex == "a+"
    assert made.prompt_logprob_token_ids is not None
    assert made.prompt_logprob_token_ids.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
def test_a_priority_that_no_message_of_vllm_can_carry_is_refused(priority: int) -> None:
    body = msgspec.json.encode({"prompt": [1], "seq_id": "s"})[:-1] + f', "priority": {priority}}}'.encode()
    with pytest.raises(BadRequest, match="priority"):
        decode_call(body, StartGenerateCall)


# ---- KV events -------------------------------------------------------------------------------------------------------


def test_the_number_of_a_batch_has_a_next_one() -> None:
    with pytest.raises(ValueError, match="not a KV event"):
        kv_events._numbered([b"", b"\xff" * 8, b""])
    inbox = KVInbox("e", FleetKnowledge(lambda: 0.0))
    number, payload = kv_events._numbered([b"", b"\x7f" + b"\xff" * 7, msgspec.msgpack.encode([0.0, []])])
    inbox.take_replayed(number, payload)
    assert len(inbox.expected.to_bytes(kv_events.NUMBER_BYTES, "big")) == 8


def stored(number: int, block_size: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None, "token_ids": [1] * 4}
    return msgspec.msgpack.encode([0.0, [{**event, "block_size": block_size}]])


@pytest.mark.parametrize("block_size", [0, -1])
def test_blocks_of_no_tokens_take_no_memory(block_size: int) -> None:
    knowledge = FleetKnowledge(lambda: 0.0)
    knowledge.add("e")
    KVInbox("e", knowledge).take(0, stored(0, block_size))
    assert not knowledge.indexes


def test_an_engine_that_always_tells_of_other_block_sizes_fills_no_memory() -> None:
    knowledge = FleetKnowledge(lambda: 0.0)
    knowledge.add("e")
    inbox = KVInbox("e", knowledge)
    for size in range(1, 200):
        inbox.take(size - 1, stored(size, size))
    assert len(knowledge.indexes) == MOST_SIZES
    inbox.reset()
    assert not knowledge.indexes


async def test_kv_events_that_are_too_deep_are_followed_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    said = b"\x92\xcb" + b"\0" * 8 + b"\x91\x82\xa4type\xabBlockStored\xa1?" + DEEP_MSGPACK
    context = zmq.asyncio.Context.instance()
    publisher: Any = context.socket(zmq.PUB)
    try:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        events, knowledge = KVEvents(f"tcp://127.0.0.1:{port}"), FleetKnowledge(lambda: 0.0)
        following = asyncio.create_task(kv_events._follow(events, "e", knowledge))
        async with asyncio.timeout(LONGEST_WAIT_S):
            while caplog.text.count("subscribing again") < 2:
                assert not following.done()
                await publisher.send_multipart([b"", bytes(8), said])
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait({following})
    finally:
        publisher.close(linger=0)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b'{"version": "\xff"}', b"\xff", b'{"promise": ' + DEEP_JSON + b"}"])
def test_a_state_that_is_no_text_is_no_state(tmp_path: Path, content: bytes) -> None:
    file = StateFile(tmp_path / "state.json")
    file.path.write_bytes(content)
    with pytest.raises(BadRequest, match="is not the state of a fleet"):
        file.read()


def test_a_report_that_is_no_text_is_none(tmp_path: Path) -> None:
    with closing(Followers(tmp_path / "state.json")) as ours, closing(Followers(tmp_path / "state.json")) as other:
        (tmp_path / "state.json.followers" / f"{other.name}{REPORT}").write_bytes(b'{"pid": 1, "failure": "\xff"}')
        assert (tmp_path / "state.json.followers" / f"{other.name}{ALIVE}").exists()
        assert ours.others() == []


@pytest.mark.parametrize("content", ["when: !!int x", "a: " + "[" * 5000], ids=["number", "deep"])
def test_yaml_that_breaks_its_parser_is_no_yaml(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(BadRequest, match="the file is not YAML"):
        read_yaml(tmp_path / "c.yaml")


# Python's compiler says so of the last annotation, which is wrong on purpose.
@pytest.mark.filterwarnings("ignore:'str' object is not callable:SyntaxWarning")
@pytest.mark.parametrize("annotation", ["inu", "int < 3", "5", "'int'()"])
def test_a_program_with_annotations_that_are_none_is_refused(tmp_path: Path, annotation: str) -> None:
    (tmp_path / "p.py").write_text(f"async def good(request, fleet, *, limit: {annotation} = 3):\n    yield\n")
    with pytest.raises(BadRequest):
        load_program(f"{tmp_path / 'p.py'}:good", {"limit": "5"})


@pytest.mark.parametrize("file", ["~nobody-of-that-name/x.yaml", "a\0b", "/dev/zero", "/nowhere.yaml"])
async def test_a_scheduling_file_that_is_none_is_refused(file: str) -> None:
    async with asyncio.timeout(LONGEST_WAIT_S):
        with pytest.raises(BadRequest):
            await load_scheduling_file(file)


# ---- what an engine says of itself and of its tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        [[[1, 0, [-1], None]], None],
        [[[1, 0, [2**31], None]], None],
        [[[1, 0, [5], {"usage": {"cached": -3}}]], None],
        [[], [-1, 0, 0.0, None, None]],
        [[], [0, 0, float("nan"), None, None]],
        [[], [0, 0, 0.5, None, float("inf")]],
    ],
    ids=str,
)
def test_tokens_and_counts_that_cannot_be_are_refused(batch: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=OutputBatch)


def test_a_lease_that_was_not_granted_is_not_remembered() -> None:
    region = KVRegion.create(1, 4, 64)
    agent = Agent(AgentSetup(0, region.fd, region.shape, "same", TransportSettings("tcp"), ()))
    try:
        with pytest.raises(BadRequest):
            agent._handle(GrantLease("ab" * 16, [[1]], 0, 48, 16, packed(range(48)), None, "inproc://nobody"))
        assert not agent._notify_of_lease
    finally:
        agent.close()
        region.close()


@pytest.mark.parametrize("offer", [b"\x92\x01" + NOT_UTF8, b"\x93\x01\xa1a" + DEEP_MSGPACK, b"\xc1"])
def test_an_offer_that_cannot_be_read_leaves_the_other_transports(offer: bytes) -> None:
    class Offer(msgspec.Struct, array_like=True):
        address: int
        name: str

    with pytest.raises(BackendUnavailable):
        understood("nixl", offer, Offer)
