"""Calls that are more than an engine takes: whoever makes them learns which field it is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from tercet.protocol import MultiModalFeature, Request, RequestTooLarge
from tercet.wire.client import HttpEngine
from tests.servers import served

from .test_idle_connections import STATUS

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
