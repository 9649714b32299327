"""Where requests go: endpoints of the pool, in a header and in metadata, and nobody but the picker says so."""

from __future__ import annotations

import asyncio
import json

import pytest

from .conftest import Target
from .envoy_side import BUFFERED, DESTINATION, DUPLEX, PREFILLER, SERVED, SUBSET


def completion(target: Target, prompt: str = "tell me", **fields: object) -> bytes:
    return json.dumps({"model": target.model, "prompt": prompt, **fields}).encode()


def chat(target: Target) -> bytes:
    return json.dumps({"model": target.model, "messages": [{"role": "user", "content": "tell me"}]}).encode()


async def test_an_endpoint_of_the_pool(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(completion(target), mode)
    assert verdict.status == 0
    assert set(verdict.endpoints) <= target.endpoints
    assert len(set(verdict.endpoints)) == len(verdict.endpoints)


async def test_header_and_metadata_say_the_same(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(completion(target), mode)
    assert verdict.metadata == verdict.headers[DESTINATION]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions?a=b"])
async def test_paths(target: Target, mode: int, path: str) -> None:
    body = chat(target) if "chat" in path else completion(target)
    verdict = await target.envoy.request(body, mode, path=path)
    assert set(verdict.endpoints) <= target.endpoints


async def test_a_request_without_a_body(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(None, mode, path="/v1/models")
    assert set(verdict.endpoints) <= target.endpoints


async def test_one_candidate(target: Target, mode: int) -> None:
    for candidate in sorted(target.endpoints):
        for given in ([candidate], candidate):
            verdict = await target.envoy.request(completion(target), mode, candidates=given)
            assert verdict.endpoints == [candidate]


async def test_some_candidates(target: Target, mode: int) -> None:
    some = sorted(target.endpoints)[:2]
    for given in (some, ",".join(some), ", ".join(some), [*some, "192.0.2.1:1"]):
        verdict = await target.envoy.request(completion(target), mode, candidates=given)
        assert set(verdict.endpoints) <= set(some)


@pytest.mark.parametrize("candidates", [[], "", ["192.0.2.1:1"], "192.0.2.1:1,192.0.2.2:1"])
async def test_no_candidate_is_503(target: Target, mode: int, candidates: list[str] | str) -> None:
    verdict = await target.envoy.request(completion(target), mode, candidates=candidates)
    assert verdict.status == 503


async def test_a_client_does_not_choose_for_itself(target: Target, mode: int) -> None:
    stranger = "192.0.2.66:6666"
    forged = {DESTINATION: stranger, PREFILLER: stranger, SERVED: stranger, SUBSET: stranger}
    verdict = await target.envoy.request(completion(target), mode, headers=forged)
    assert set(verdict.endpoints) <= target.endpoints
    kept = {name for name in forged if name not in verdict.removed and name not in verdict.headers}
    assert not kept & {DESTINATION, PREFILLER}
    assert stranger not in ",".join(verdict.headers.values())


async def test_many_requests_at_once(target: Target) -> None:
    modes = [DUPLEX, BUFFERED] * 25
    verdicts = await asyncio.gather(
        *(target.envoy.request(completion(target, f"n {n}"), m) for n, m in enumerate(modes))
    )
    assert all(set(verdict.endpoints) <= target.endpoints for verdict in verdicts)
    assert len({verdict.endpoints[0] for verdict in verdicts}) > 1, "all requests of a burst went to one endpoint"
