"""Where requests go: endpoints of the pool, in a header and in metadata, and nobody but the picker says so."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from .conftest import Saturated, Target
from .envoy_side import BUFFERED, DESTINATION, DUPLEX, NO_BODY, PREFILLER, SERVED, SUBSET, EnvoySide


def completion(target: Target, prompt: str = "tell me", **fields: object) -> bytes:
    return json.dumps({"model": target.model, "prompt": prompt, **fields}).encode()


def chat(target: Target) -> bytes:
    return json.dumps({"model": target.model, "messages": [{"role": "user", "content": "tell me"}]}).encode()


async def test_an_endpoint_of_the_pool(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(completion(target), mode)
    assert verdict.status == 0
    assert set(verdict.endpoints) <= target.endpoints
    assert len(set(verdict.endpoints)) == len(verdict.endpoints)


async def test_endpoints_are_addresses_joined_by_commas(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(completion(target), mode)
    address = r"(\[[0-9a-fA-F:]+\]|[^,:\[\]\s]+):[0-9]{1,5}"
    assert re.fullmatch(f"{address}(,{address})*", verdict.headers[DESTINATION])


async def test_the_route_is_looked_up_anew(target: Target, mode: int) -> None:
    """Else routes that match by the destination's header would not see it."""
    assert (await target.envoy.request(completion(target), mode)).clears_route


async def test_metadata_is_in_its_own_namespace(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(completion(target), mode)
    assert verdict.namespaces == {"envoy.lb"}


async def test_metadata_comes_with_the_header(target: Target, mode: int) -> None:
    """By the next answer Envoy may have chosen already."""
    assert (await target.envoy.request(completion(target), mode)).told_together


async def test_headers_alone_decide_where_no_body_is_shown(target: Target) -> None:
    async with target.envoy.stream(NO_BODY) as stream:
        await stream.send_headers("/v1/completions", {"content-length": "50"})
        verdict = await stream.until_it_goes_on()
    assert verdict.order == ["request_headers"]
    assert set(verdict.endpoints) <= target.endpoints
    assert verdict.metadata == verdict.headers[DESTINATION]


async def test_headers_as_text_and_as_bytes(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {DESTINATION: "192.0.2.66:6666"}, as_text=True)
        await stream.send_body(completion(target), 1000)
        verdict = await stream.until_it_goes_on()
    assert set(verdict.endpoints) <= target.endpoints


@pytest.mark.parametrize("field", ["prompt", "model"])
async def test_a_body_that_lacks_something_is_picked_for_or_refused(target: Target, mode: int, field: str) -> None:
    fields = {"model": target.model, "prompt": "tell me"}
    del fields[field]
    verdict = await target.envoy.request(json.dumps(fields).encode(), mode)
    assert set(verdict.endpoints) <= target.endpoints if not verdict.status else 400 <= verdict.status < 500


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


@pytest.mark.parametrize("header", ["x-gateway-inference-objective", "x-gateway-inference-fairness-id"])
async def test_an_objective_that_nobody_knows_is_no_reason_to_refuse(target: Target, mode: int, header: str) -> None:
    verdict = await target.envoy.request(completion(target), mode, headers={header: "nobody-knows-it"})
    assert set(verdict.endpoints) <= target.endpoints


async def test_a_header_that_stands_there_twice(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {"X-Twice": "a", "x-twice": "b"})
        await stream.send_body(completion(target), 1000)
        verdict = await stream.until_it_goes_on()
    assert set(verdict.endpoints) <= target.endpoints
    assert not {"x-twice"} & {*verdict.headers, *verdict.removed}


async def test_one_candidate(target: Target, mode: int) -> None:
    for candidate in sorted(target.endpoints):
        for given in ([candidate], candidate):
            verdict = await target.envoy.request(completion(target), mode, candidates=given)
            assert verdict.endpoints == [candidate]


async def test_some_candidates(target: Target, mode: int) -> None:
    some = sorted(target.endpoints)[:2]
    joined = ",".join(some)
    for given in (some, joined, ", ".join(some), [*some, "192.0.2.1:1"], [joined, "192.0.2.1:1"], f" ,{joined},"):
        verdict = await target.envoy.request(completion(target), mode, candidates=given)
        assert set(verdict.endpoints) <= set(some)


async def test_metadata_that_says_nothing_of_candidates(target: Target, mode: int) -> None:
    """The namespace is there, as other filters may make it, and the key is not: any endpoint of the pool."""
    seen = set[str]()
    for number in range(20):
        async with target.envoy.stream(mode) as stream:
            headers = {"x-request-id": f"without-{number}"}
            await stream.send_headers("/v1/models", headers, ends=True, hint={"another-key": "192.0.2.1:1"})
            seen |= set((await stream.until_it_goes_on(has_body=False)).endpoints)
    assert seen <= target.endpoints


@pytest.mark.parametrize("candidates", [[], "", " , ", ["192.0.2.1:1"], "192.0.2.1:1,192.0.2.2:1"])
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


async def test_without_a_ready_endpoint_the_answer_is_503(empty: EnvoySide, mode: int) -> None:
    assert (await empty.request(b'{"model": "m", "prompt": "tell me"}', mode)).status == 503


async def test_what_may_be_dropped_gets_429_while_the_pool_is_full(saturated: Saturated, mode: int) -> None:
    body = json.dumps({"model": saturated.model, "prompt": "tell me"}).encode()
    verdict = await saturated.envoy.request(body, mode, headers={"x-gateway-inference-objective": saturated.objective})
    assert verdict.status == 429
