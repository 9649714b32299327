"""Token streams, reports and KV events of real engines: the same tokens as by server-sent events, and nothing kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tercet.fleet import EngineFleet as Members
from tercet.fleet import Member
from tercet.fleet.membership import connecting
from tercet.protocol import BadRequest, Engine, EngineStatus, EngineUnreachable, Output, Request
from tercet.wire.client import HttpEngine, StreamListener
from tests import longest_wait
from tests.abort import abort

from .conftest import Fleet, settled

SECONDS = 120
SAMPLINGS: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"stop_token_ids": [260, 28]}, {"max_tokens": 1}]


def request_of(seq_id: str, first: int, length: int = 300, **sampling: Any) -> Request:
    """A prompt that no other test has."""
    prompt = tuple(1000 + (first * 7919 + place * 31) % 40_000 for place in range(length))
    return Request(seq_id=seq_id, prompt=prompt, sampling_params={"temperature": 0, "max_tokens": 12, **sampling})


async def all_of(engine: Engine, request: Request) -> list[Output]:
    return [output async for output in engine.start_generate(request)]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


until = partial(longest_wait.until, seconds=SECONDS)


@dataclass
class Here:
    """A small router of this test's own: its fleet and its connections to both engines."""

    members: Members
    listener: StreamListener
    prefill: Engine
    decode: Engine


def anybody(_: EngineStatus) -> None:
    """Whoever answers is admitted."""


@asynccontextmanager
async def router(fleet: Fleet) -> AsyncGenerator[Here]:
    members = Members(())
    urls = {"p": fleet.engine_url("prefill"), "d": fleet.engine_url("decode")}
    async with StreamListener() as listener:
        connect = connecting(members, listener)
        async with connect("p", urls["p"], anybody) as prefill, connect("d", urls["d"], anybody) as decode:
            for name, engine in (("p", prefill), ("d", decode)):
                members.add(Member(name, urls[name], "both", engine))
            yield Here(members, listener, prefill, decode)


async def test_outputs_are_those_of_server_sent_events(fleet: Fleet, decode: HttpEngine, nothing_leaks: None) -> None:
    async with router(fleet) as here:
        for index, sampling in enumerate(SAMPLINGS):
            by_stream = await all_of(here.decode, request_of(f"stream-{index}", 10 + index, **sampling))
            by_events = await all_of(decode, request_of(f"events-{index}", 10 + index, **sampling))
            assert tokens_of(by_stream) == tokens_of(by_events)
            assert by_stream[-1].finish_reason == by_events[-1].finish_reason
            assert by_stream[-1].stop_reason == by_events[-1].stop_reason
            assert (by_stream[0].logprobs is None) == (by_events[0].logprobs is None)
            assert by_stream[0].usage is not None


async def test_bad_input_is_a_bad_request_and_takes_nothing(fleet: Fleet, nothing_leaks: None) -> None:
    async with router(fleet) as here:
        with pytest.raises(BadRequest, match="temperature"):
            await all_of(here.decode, request_of("bad", 20, temperature=-1))
        assert tokens_of(await all_of(here.decode, request_of("bad", 20)))


async def test_leaving_and_abort_reach_the_engine(fleet: Fleet, decode: HttpEngine, nothing_leaks: None) -> None:
    endless = {"max_tokens": 1500, "ignore_eos": True}
    async with router(fleet) as here:
        leaving = here.decode.start_generate(request_of("leaving", 30, **endless))
        await anext(leaving)
        await leaving.aclose()
        await settled(decode)
        aborted = here.decode.start_generate(request_of("aborted", 31, **endless))
        outputs = [await anext(aborted)]
        await abort(here.decode, "aborted")
        outputs += [output async for output in aborted]
        assert outputs[-1].finish_reason == "abort"
        await settled(decode)


async def test_a_router_that_goes_leaves_nothing_running(fleet: Fleet, decode: HttpEngine) -> None:
    async with router(fleet) as here:
        generating = here.decode.start_generate(request_of("orphan", 40, max_tokens=1500, ignore_eos=True))
        await anext(generating)
        # As if its process had died: the listener closes every connection, and tells the engine nothing by HTTP.
        await here.listener.__aexit__(None, None, None)
        with pytest.raises(EngineUnreachable):
            async for _ in generating:
                pass
        await settled(decode)


async def test_load_is_reported_and_the_prefix_index_follows_the_cache(fleet: Fleet, nothing_leaks: None) -> None:
    async with router(fleet) as here:
        knowledge = here.members.knowledge
        rows = knowledge.rows(["p", "d"])
        await until(lambda: bool((knowledge.loads.column("age", rows) < 1.0).all()))
        request = request_of("indexed", 50)
        block_size = (await here.prefill.status()).block_size
        whole = request.num_tokens // block_size * block_size
        assert knowledge.cached_tokens("p", request) == 0
        await all_of(here.prefill, request)
        await until(lambda: knowledge.cached_tokens("p", request) == whole)
        assert knowledge.cached_tokens("d", request) == 0
        # KV that another engine pushed is the receiver's cache, although it ran no step for it.
        async with here.decode.prep_recv(request) as reservation:
            await here.prefill.remote_send(request, reservation, reservation.matched_len)
            await until(lambda: knowledge.cached_tokens("d", request) == whole)


async def test_an_engine_reports_what_it_generates(fleet: Fleet, decode: HttpEngine, nothing_leaks: None) -> None:
    async with router(fleet) as here:
        address = []
        for engine, streamed in ((here.decode, True), (decode, False)):
            request, seen = request_of("reported", 60, max_tokens=200, ignore_eos=True), 0
            async with aclosing(engine.start_generate(request)) as outputs:
                while seen < 20:
                    seen += len((await anext(outputs)).token_ids)
                (report,) = await decode.sequences()
                status = await decode.status()
                assert (report.seq_id, report.running) == ("reported", True)
                assert request.num_tokens + seen <= report.tokens <= request.num_tokens + 200
                # Under way is one token more than the edge has seen; blocks are had a step before.
                assert -(-(report.tokens - 1) // status.block_size) <= report.blocks
                assert report.blocks <= -(-(report.tokens + 8) // status.block_size)
                assert report.age > 0
                assert bool(report.router) is streamed
                address.append(report.router)
            await settled(decode)
            assert await decode.sequences() == []
        assert address[0].startswith("127.0.0.1:")
