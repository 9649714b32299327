"""Proofs of calls: what is refused, what a proof is good for, and two secrets while they are changed."""

from __future__ import annotations

import pytest

from tercet.protocol import Unauthorized
from tercet.protocol.access import secrets_of
from tercet.wire.callers import CHALLENGE_SECONDS, Callers, Prover, digest_of, require_digest
from tests.clock import Clock

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
