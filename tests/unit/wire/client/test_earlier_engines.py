"""What engines of an earlier version are asked: they refuse fields that they do not know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tercet.protocol import EngineUnreachable, MultiModalFeature, Request, RequestTooLarge
from tercet.protocol.wire import TokenId
from tercet.wire.client import HttpEngine
from tests.servers import served

from .test_idle_connections import STATUS

PROMPT = [1, 2, 3]
PLAIN = Request(seq_id="s", prompt=tuple(PROMPT), sampling_params={"max_tokens": 4})
LAYOUT = {
    "model": "m", "dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_size": 8, "block_size": 16,
    "block_bytes": 1024, "tp_size": 1, "packing": "cpu",
}  # fmt: skip
INFO = {
    "lease": "l", "engine": "d", "begin": 0, "end": 3, "transport": "tcp",
    "ranks": [{"rank": 0, "addresses": ["tcp://127.0.0.1:9"]}], "layout": LAYOUT,
}  # fmt: skip


class PrepRecvBefore(msgspec.Struct, forbid_unknown_fields=True):
    """As version 0.1 had it before adapters and images."""

    prompt: str | list[TokenId]
    seq_id: str
    end: int | None = None
    cache_salt: str | None = None
    ttl: float | None = None
    lease: str | None = None


class RemoteSendBefore(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[TokenId]
    kv_addr_info: dict[str, Any]
    begin: int
    seq_id: str
    end: int | None = None
    sample: bool = False
    sampling_params: Mapping[str, Any] = {}
    cache_salt: str | None = None
    priority: int = 0


class StartGenerateBefore(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[TokenId]
    seq_id: str
    begin: int = 0
    output: list[TokenId] = []
    stream: bool = True
    router: Any = None
    sampling_params: Mapping[str, Any] = {}
    cache_salt: str | None = None
    priority: int = 0


BEFORE = {"prep_recv": PrepRecvBefore, "remote_send": RemoteSendBefore, "start_generate": StartGenerateBefore}


class Earlier:
    """An engine whose verbs have the fields of before; ``asked`` is what it was asked, ``refused`` what it refused."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.refused: list[str] = []

    async def status(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(STATUS))

    async def verb(self, request: web.Request) -> web.Response:
        verb, body = request.match_info["verb"], await request.read()
        if verb not in BEFORE:
            return web.json_response({})
        try:
            self.asked[verb] = msgspec.json.decode(body)
            msgspec.json.decode(body, type=BEFORE[verb])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # tensors are not even in JSON
            self.refused.append(str(error))
        answers: dict[str, Any] = {
            "prep_recv": {"kv_addr_info": INFO, "matched_len": 0, "ttl": 60.0},
            "remote_send": {"begin": 0, "end": 3, "bytes": 1, "chunks": 1, "seconds": 0.1, "usage": {}},
        }
        return web.json_response(answers.get(verb, {}))


@pytest.fixture
async def earlier() -> AsyncIterator[tuple[Earlier, HttpEngine]]:
    engine = Earlier()
    app = web.Application()
    app.router.add_get("/tercet/v1/status", engine.status)
    app.router.add_post("/tercet/v1/{verb}", engine.verb)
    async with served(app) as url, HttpEngine("e", url) as client:
        yield engine, client


async def ask(client: HttpEngine, request: Request) -> None:
    async with client.prep_recv(request) as reservation:
        await client.remote_send(request, reservation, 0)
        with suppress(EngineUnreachable):  # it has no tokens to say
            async for _ in client.start_generate(request):
                pass


async def test_calls_without_adapters_and_images_have_the_fields_of_before(earlier: tuple[Earlier, HttpEngine]) -> None:
    engine, client = earlier
    await ask(client, PLAIN)
    assert engine.refused == []
    assert engine.asked["prep_recv"] == {"prompt": PROMPT, "seq_id": "s"}
    assert engine.asked["remote_send"]["kv_addr_info"] == INFO  # as the receiver said it
    assert engine.asked["start_generate"] == {"prompt": PROMPT, "seq_id": "s", "sampling_params": {"max_tokens": 4}}


@pytest.mark.parametrize(
    "asked",
    [
        {"adapter": "a", "adapter_digest": "d"},
        {"mm_features": (MultiModalFeature(modality="image", digest="0" * 64, offset=0, length=2, data=b"x"),)},
    ],
)
async def test_those_that_need_more_are_refused_and_not_served_without(
    asked: dict[str, Any], earlier: tuple[Earlier, HttpEngine]
) -> None:
    engine, client = earlier
    await ask(client, msgspec.structs.replace(PLAIN, **asked))
    assert len(engine.refused) == 3
    # Calls with tensors are in no form that it knows.
    assert all("unknown field" in each or "malformed" in each for each in engine.refused)


async def test_a_send_of_cached_kv_alone_is_refused_and_computes_nothing(earlier: tuple[Earlier, HttpEngine]) -> None:
    engine, client = earlier
    async with client.prep_recv(PLAIN) as reservation:
        await client.remote_send(PLAIN, reservation, 0, cached_only=True)
    assert engine.asked["remote_send"]["cached_only"] is True
    assert engine.refused == ["Object contains unknown field `cached_only`"]


# Calls that are more than an engine takes: whoever makes them learns which field it is.


REQUEST = Request(seq_id="s", prompt=(1, 2, 3))
PICTURE = MultiModalFeature(modality="image", digest="0" * 64, offset=0, length=2, data=b"x")


@pytest.fixture
async def small() -> AsyncIterator[HttpEngine]:
    """An engine that has read nothing of what it refuses."""

    async def refuse(_: web.Request) -> web.Response:
        error = RequestTooLarge("the request's body has more than 5 bytes, which is all that this engine takes")
        return web.json_response(error.to_wire(), status=error.status)

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(STATUS))

    app = web.Application()
    app.router.add_get("/tercet/v1/status", status)
    app.router.add_post("/tercet/v1/{verb}", refuse)
    async with served(app) as url, HttpEngine("e", url) as client:
        yield client


@pytest.mark.parametrize(("features", "field"), [((), "prompt"), ((PICTURE,), "mm_features")])
async def test_the_field_is_named(small: HttpEngine, features: tuple[MultiModalFeature, ...], field: str) -> None:
    request = msgspec.structs.replace(REQUEST, mm_features=features)
    with pytest.raises(RequestTooLarge, match=f"{field}: too large for e: .* more than 5 bytes") as refused:
        await anext(small.start_generate(request))
    assert (refused.value.param, refused.value.status) == (field, 413)
    with pytest.raises(RequestTooLarge):
        async with small.prep_recv(request):
            pass
