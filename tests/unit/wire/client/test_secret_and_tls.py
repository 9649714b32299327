"""What a router shows its engines: the fleet's secret by proofs of calls, also while it is changed, and over TLS who it
is.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tercet.protocol import BadRequest, EngineUnreachable, TercetError, Unauthorized
from tercet.protocol.access import secrets_of
from tercet.wire.callers import CHALLENGE_SECONDS, Callers, Prover, digest_of, require_digest
from tercet.wire.client import HttpEngine, StreamListener, engine_tls
from tercet.wire.serving.http_server import served as serving_http
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.sim_verbs import HttpNetwork, SimVerbs
from tests.abort import abort
from tests.clock import Clock
from tests.servers import served
from tests.unit.lab.sim.models import profile_of, request_of
from tests.unit.lab.sim.test_serving import QUICK
from tests.unit.wire.client.certificates import Authority


@asynccontextmanager
async def engine_served(
    tls: Mapping[str, Any], seen: list[str | None], keys: Sequence[str] = ()
) -> AsyncGenerator[str]:
    """A simulated engine's verbs; ``seen`` gets the authorization of each call, ``tls`` are uvicorn's options."""
    profile = profile_of(QUICK, 1000)
    async with aiohttp.ClientSession() as session:
        network = HttpNetwork(profile.transfer, session)
        verbs = SimVerbs(SimEngine("e", profile, network), keys)
        app = verbs.app()

        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(Headers(scope=scope).get("authorization"))
            await app(scope, receive, send)

        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with serving_http(note, listening, **tls):
                try:
                    yield f"{'https' if tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
                finally:
                    await verbs.relay.close()
                    await network.posting.close()


def server_tls(authority: Authority, clients: Authority | None = None) -> Mapping[str, Any]:
    certificate, key = authority.issue("engine")
    found = {"ssl_certfile": certificate, "ssl_keyfile": key}
    return found if clients is None else found | {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": clients.file}


@pytest.mark.parametrize(
    ("secret", "keys"),
    [
        ("s3cret", ["s3cret"]),
        ("", []),
        ("s3cret\n", ["s3cret"]),
        ("s3cret before", ["after", "s3cret"]),
        ("s3cret", []),
    ],
)
async def test_every_call_proves_the_secret_and_none_shows_it(secret: str, keys: list[str]) -> None:
    seen: list[str | None] = []
    async with engine_served({}, seen, keys) as url, StreamListener() as listener:
        for listening in (None, listener):
            async with HttpEngine("e", url, listening, secret=secret) as engine:
                request = request_of("s", 8, max_tokens=3)
                async with engine.prep_recv(request):
                    pass
                outputs = [output async for output in engine.start_generate(request_of("s", 8, max_tokens=3))]
                assert outputs[-1].finished
                await abort(engine, "nobody")
    assert not any("s3cret" in (shown or "") for shown in seen)
    proofs = [shown for shown in seen if shown is not None]
    assert len(set(proofs)) == len(proofs)
    assert len(proofs) >= len(seen) / 2 if keys else not proofs  # the first calls are answered with a challenge


@pytest.mark.parametrize(
    "challenge", [None, 'Tercet challenge="x"', "Bearer", 'Tercet challenge="", x', "Basic realm=x"]
)
async def test_nobody_gets_the_secret_by_asking_for_it(challenge: str | None) -> None:
    """Whatever a stranger at an engine's address says, it learns nothing that opens an engine of the fleet."""
    seen: list[str] = []

    async def refuse(http: web.Request) -> web.Response:
        seen.extend(f"{name}: {value}" for name, value in http.headers.items())
        headers = {} if challenge is None else {"www-authenticate": challenge}
        return web.json_response({}, status=401, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", refuse)
    async with served(app) as url, HttpEngine("e", url, secret="s3cret") as engine:
        with pytest.raises(TercetError):
            await engine.status()
    assert not any("s3cret" in line for line in seen)
    async with engine_served({}, [], ["s3cret"]) as url, aiohttp.ClientSession() as session:
        for line in seen:
            name, _, value = line.partition(": ")
            if name.lower() == "authorization":
                async with session.get(f"{url}/tercet/v1/status", headers={"authorization": value}) as answer:
                    assert answer.status == 401


async def test_a_redirect_is_not_followed() -> None:
    asked: list[str] = []

    async def redirect(http: web.Request) -> web.Response:
        asked.append(http.path)
        return web.Response(status=307, headers={"location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", redirect)
    async with served(app) as url, HttpEngine("e", url) as engine:
        with pytest.raises(TercetError):
            await engine.status()
    assert asked == ["/tercet/v1/status"]


async def test_verbs_and_token_streams_of_an_engine_behind_tls(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    clients = Authority(tmp_path, "clients")
    certificate, key = clients.issue("router")
    seen: list[str | None] = []
    async with engine_served(server_tls(ours, clients), seen) as url, StreamListener() as listener:
        tls = engine_tls(str(ours.file), str(certificate), str(key))
        async with HttpEngine("e", url, listener, secret="s", tls=tls) as engine:
            assert (await engine.status()).engine == "e"
            outputs = [output async for output in engine.start_generate(request_of("s", 8, max_tokens=3))]
            assert outputs[-1].finished
        assert seen
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
    async with served(app) as url, HttpEngine("e", url, secret="wrong") as engine:
        with pytest.raises(TercetError, match="fleet's secret") as caught:
            await abort(engine, "s")
        assert "wrong" not in str(caught.value)


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


BODY = b'{"prompt": [1]}'


def met(secret: str, callers: Callers) -> Prover:
    prover = Prover(secret)
    assert prover.headers("GET", "/status", digest_of(None)) == {}
    assert prover.meets([callers.challenge()])
    return prover


def call(prover: Prover, method: str = "POST", path: str = "/abort", body: bytes = BODY) -> list[str]:
    return [prover.headers(method, path, digest_of(body))["authorization"]]


def test_a_proof_opens_one_call_once() -> None:
    callers = Callers(["secret"])
    prover = met("secret", callers)
    for _ in range(3):
        shown = call(prover)
        assert "secret" not in shown[0]
        digest = callers.require(shown, "POST", "/abort", "no")
        require_digest(BODY, digest)
        with pytest.raises(Unauthorized, match="already been made"):
            callers.require(shown, "POST", "/abort", "no")
        with pytest.raises(Unauthorized, match="body"):
            require_digest(BODY + b" ", digest)


def test_a_proof_opens_nothing_else() -> None:
    callers = Callers(["secret"])
    shown = call(met("secret", callers))
    for method, path in (("GET", "/abort"), ("POST", "/release"), ("POST", "/abort/")):
        with pytest.raises(Unauthorized):
            callers.require(shown, method, path, "no")
    for old, new in (('number="1"', 'number="2"'), (digest_of(BODY), digest_of(b"")), ('own="', 'own="0')):
        with pytest.raises(Unauthorized):
            callers.require([shown[0].replace(old, new)], "POST", "/abort", "no")
    with pytest.raises(Unauthorized):
        Callers(["secret"]).require(shown, "POST", "/abort", "no")  # at another engine, or another start of it
    with pytest.raises(Unauthorized, match="2 Authorization"):
        callers.require([*shown, *shown], "POST", "/abort", "no")


@pytest.mark.parametrize(
    "shown",
    ["", "Tercet", "Tercet ", "Tercet x", 'Tercet challenge="a", own="b", number="1", body="", proof=""',
     'Tercet challenge="====", own="0123456789abcdef0123", number="99999999999999999999", body="", proof="x"',
     "tercet secret", "Basic secret", "Bearer", "Bearer wrong"],
)  # fmt: skip
def test_strangers_are_refused(shown: str) -> None:
    with pytest.raises(Unauthorized):
        Callers(["secret"]).require([shown] if shown else [], "GET", "/status", "no")


def test_another_secret_proves_nothing() -> None:
    callers = Callers(["secret"])
    with pytest.raises(Unauthorized, match="proof"):
        callers.require(call(met("other", callers)), "POST", "/abort", "no")


def test_keys_may_be_shown_by_people() -> None:
    callers = Callers(["secret", "key\n"])
    for key in ("secret", "key"):
        assert callers.require([f"Bearer {key}"], "GET", "/status", "no") is None
    assert Callers([""]).require([], "GET", "/status", "no") is None


def test_calls_overtake_one_another() -> None:
    callers = Callers(["secret"])
    prover = met("secret", callers)
    calls = [call(prover) for _ in range(50)]
    for shown in reversed(calls):
        callers.require(shown, "POST", "/abort", "no")
    for shown in calls:
        with pytest.raises(Unauthorized):
            callers.require(shown, "POST", "/abort", "no")


def test_a_challenge_ends_and_what_was_remembered_of_it() -> None:
    clock = Clock()
    callers = Callers(["secret"], clock)
    prover = met("secret", callers)
    callers.require(call(prover), "POST", "/abort", "no")
    clock.now += CHALLENGE_SECONDS + 1
    with pytest.raises(Unauthorized, match="has expired"):
        callers.require(call(prover), "POST", "/abort", "no")
    assert prover.meets([callers.challenge()])
    callers.require(call(prover), "POST", "/abort", "no")
    assert len(callers._seen) == 1


def test_two_secrets_are_valid_while_they_are_changed() -> None:
    assert secrets_of(" old  new\n") == ("old", "new")
    for engine in ("old", "old new", "new old", "new"):
        callers = Callers(secrets_of(engine))
        for router in ("old", "old new", "new old", "new"):
            shown = call(met(router, callers))
            if secrets_of(router)[0] in secrets_of(engine):
                callers.require(shown, "POST", "/abort", "no")
            else:
                with pytest.raises(Unauthorized):
                    callers.require(shown, "POST", "/abort", "no")


def test_a_challenge_is_answered_once_and_without_a_secret_never() -> None:
    challenge = Callers(["secret"]).challenge()
    prover = Prover("secret")
    assert prover.meets([challenge])
    assert not prover.meets([challenge])
    assert not Prover("").meets([challenge])
    assert not Prover("secret").meets([])
