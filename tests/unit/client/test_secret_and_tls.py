"""What a front door shows its engines: the fleet's secret, and over TLS who it is. Real sockets, simulated engine."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tercet.client import HttpEngine, engine_tls
from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, EngineUnreachable, TercetError, Unauthorized
from tercet.sim.sim_engine import SimEngine
from tercet.sim.sim_verbs import HttpNetwork, Verbs, errors_as_json
from tercet.streams import StreamListener
from tests.unit.client.certificates import HOST, Authority
from tests.unit.sim.models import profile_of, request_of
from tests.unit.sim.test_serving import QUICK


@asynccontextmanager
async def served(tls: ssl.SSLContext | None, seen: list[str | None]) -> AsyncGenerator[str]:
    """A simulated engine's verbs; ``seen`` gets the authorization of each call."""

    @web.middleware
    async def note(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
        seen.append(request.headers.get("authorization"))
        return await handler(request)

    profile = profile_of(QUICK, 1000)
    async with aiohttp.ClientSession() as session:
        network = HttpNetwork(profile.transfer, session)
        verbs = Verbs(SimEngine("e", profile, network))
        app = web.Application(middlewares=[note, errors_as_json])
        app.add_routes(verbs.routes())
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        (port,) = free_ports(HOST, 1)
        await web.TCPSite(runner, HOST, port, ssl_context=tls).start()
        try:
            yield f"http{'s' if tls else ''}://{HOST}:{port}"
        finally:
            await verbs.relay.close()
            await runner.cleanup()
            await network.posting.close()


def server_tls(authority: Authority, clients: Authority | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("engine"))
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.file)
    return context


@pytest.mark.parametrize(("secret", "shown"), [("s3cret", "Bearer s3cret"), ("", None), ("s3cret\n", "Bearer s3cret")])
async def test_every_call_shows_the_secret_if_there_is_one(secret: str, shown: str | None) -> None:
    seen: list[str | None] = []
    async with served(None, seen) as url, StreamListener() as listener:
        for listening in (None, listener):
            async with HttpEngine("e", url, listening, secret=secret) as engine:
                request = request_of("s", 8, max_tokens=3)
                async with engine.prep_recv(request):
                    pass
                outputs = [output async for output in engine.start_generate(request_of("s", 8, max_tokens=3))]
                assert outputs[-1].finished
                await engine.abort("nobody")
    assert set(seen) == {shown}


async def test_verbs_and_token_streams_of_an_engine_behind_tls(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    clients = Authority(tmp_path, "clients")
    certificate, key = clients.issue("front-door")
    seen: list[str | None] = []
    async with served(server_tls(ours, clients), seen) as url, StreamListener() as listener:
        tls = engine_tls(str(ours.file), str(certificate), str(key))
        async with HttpEngine("e", url, listener, secret="s", tls=tls) as engine:
            assert (await engine.status()).engine == "e"
            outputs = [output async for output in engine.start_generate(request_of("s", 8, max_tokens=3))]
            assert outputs[-1].finished
        assert set(seen) == {"Bearer s"}
        seen.clear()
        for wrong in (
            engine_tls(str(ours.file), None, None),  # who does not show a certificate
            engine_tls(str(ours.file), *map(str, ours.issue("stranger"))),  # or one of somebody else's
            engine_tls(str(clients.file), str(certificate), str(key)),  # and an engine that somebody else has signed
            None,
        ):
            async with HttpEngine("e", url, tls=wrong) as engine:
                with pytest.raises(EngineUnreachable):
                    await engine.status()
        assert not seen


async def test_an_engine_that_wants_another_secret_is_an_error_that_says_so() -> None:
    async def refuse(_: web.Request) -> web.Response:
        error = Unauthorized("this engine asks for its fleet's secret", "authorization")
        return web.json_response(error.to_wire(), status=error.status)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(HOST, 1)
    await web.TCPSite(runner, HOST, port).start()
    try:
        async with HttpEngine("e", f"http://{HOST}:{port}", secret="wrong") as engine:
            with pytest.raises(TercetError, match="fleet's secret") as caught:
                await engine.abort("s")
            assert "wrong" not in str(caught.value)
    finally:
        await runner.cleanup()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    certificate, _ = ours.issue("a")
    _, other_key = ours.issue("b")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for files, param in (
        ((str(tmp_path / "missing"), None, None), "engine-ca"),
        ((str(nonsense), None, None), "engine-ca"),
        ((None, str(tmp_path / "missing"), None), "engine-cert"),
        ((None, str(certificate), None), "engine-cert"),
        ((None, str(certificate), str(other_key)), "engine-cert"),
        ((None, None, str(other_key)), "engine-key"),
    ):
        with pytest.raises(BadRequest, match=f"^{param}: ") as caught:
            engine_tls(*files)
        assert caught.value.param == param
    assert engine_tls(None, None, None) is None
