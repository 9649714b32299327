"""Moves that are proposed through the engines: they reach the process that runs the sequence, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI

from tercet.cluster.ports import free_ports, url_of
from tercet.fleet import EngineFleet, Trace
from tercet.fleet.membership import Membership, connecting
from tercet.protocol import Conflict, EngineLoad, MoveProposal, Role, UnknownSequence
from tercet.protocol.names import find_id, further_id
from tercet.router import admin
from tercet.router.observe.metrics import MOST_REASONS, Metrics
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.service import Service
from tercet.settings import EngineAddress, MoveSettings
from tercet.wire.client import HttpEngine, StreamListener
from tercet.wire.serving.server_access import ADMITTED
from tercet_lab.sim import SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.sim.step_times import StepTimes
from tests.longest_wait import until
from tests.unit.lab.sim.models import is_empty, profile_of, request_of

HOST = "127.0.0.1"
# Steps of 5 ms: a request of 400 tokens takes two seconds, if nobody hurries.
STEPS = StepTimes(knots=((1, 0.005), (1001, 0.006)), pair=0.0, context=0.0)
TOKENS = 400


class Process:
    """One router process: what it runs, and its routes."""

    def __init__(self, fleet: EngineFleet, metrics: Metrics, moves: MoveSettings) -> None:
        self.fleet = fleet
        self.service = Service(fleet, "data_parallel", {"role": "prefill"}, metrics, moves=moves)
        self.tokens: dict[str, list[int]] = {}
        app = FastAPI()
        shared: Any = SimpleNamespace(service=self.service)
        admin.install(app, shared, ["m"])

        async def admitted(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, ADMITTED: True}, receive, send)

        self.routes = httpx.AsyncClient(transport=httpx.ASGITransport(admitted), base_url="http://localhost/tercet/v1")

    async def run(self, seq_id: str) -> asyncio.Task[None]:
        """Begin a request; returns when its client has a few tokens."""
        tokens = self.tokens[seq_id] = []
        stream = self.service.run(request_of(seq_id, max_tokens=TOKENS), Trace())
        task = asyncio.create_task(stream.run(lambda output: tokens.extend(output.token_ids)))
        await until(lambda: len(tokens) > 3)
        return task

    @property
    def moves(self) -> list[MoveRecord]:
        return list(self.service.moves.since(0))

    async def settled_moves(self, count: int) -> list[MoveRecord]:
        await until(lambda: [move.outcome != "under_way" for move in self.moves] == [True] * count)
        return self.moves

    def engine_of(self, seq_id: str) -> str:
        return self.service.sequences.named(seq_id).engine


@dataclass
class World:
    """Two processes of one router, and two engines; new sequences begin on ``a``."""

    owner: Process
    other: Process
    engines: dict[str, SimEngine]
    urls: dict[str, str]

    def whole(self, seq_id: str) -> list[int]:
        network = self.engines["a"].network
        return list(network.prompt(request_of(seq_id).prompt, None, None).output(0, TOKENS))


@asynccontextmanager
async def world(metrics: Metrics, **moves: Any) -> AsyncGenerator[World]:
    async with AsyncExitStack() as stack:
        engines, urls = dict[str, SimEngine](), dict[str, str]()
        for name, port in zip("ab", free_ports(HOST, 2), strict=True):
            urls[name] = url_of(HOST, port)
            config = ServerConfig(name=name, profile=profile_of(STEPS), port=port, url=urls[name], model="m")
            engines[name] = await stack.enter_async_context(serving(config))
        processes = list[Process]()
        roles: dict[str, Role] = {"a": "prefill", "b": "decode"}
        for _ in range(2):
            fleet = EngineFleet(())
            listener = await stack.enter_async_context(StreamListener())
            membership = await stack.enter_async_context(Membership(fleet, connecting(fleet, listener)))
            for name, role in roles.items():
                await membership.enter(EngineAddress(name, urls[name], role))
            await membership.until_ready(30)
            processes.append(Process(fleet, metrics, MoveSettings(**moves)))
            await stack.enter_async_context(processes[-1].routes)
        yield World(processes[0], processes[1], engines, urls)
        await until(lambda: all(is_empty(engine) for engine in engines.values()))


@pytest.mark.slow
async def test_an_engine_passes_a_proposal_on_to_the_process_that_runs_the_sequence(metrics: Metrics) -> None:
    async with world(metrics) as found, HttpEngine("a", found.urls["a"]) as a, HttpEngine("b", found.urls["b"]) as b:
        task = await found.owner.run("s")
        await a.propose_move("s", "b", "rebalance")
        (move,) = await found.owner.settled_moves(1)
        assert (move.outcome, move.source, move.destination, move.reason) == ("moved", "a", "b", "rebalance")
        assert found.owner.engine_of("s") == "b"
        assert not found.other.moves
        # It has another id there, and goes by its client's, too.
        (report,) = await b.sequences()
        assert report.seq_id == "s.1"
        await b.propose_move("s", "a", "back")
        moves = await found.owner.settled_moves(2)
        assert [move.outcome for move in moves] == ["moved", "moved"]
        await task
        assert found.owner.tokens["s"] == found.whole("s")


@pytest.mark.slow
async def test_a_process_that_does_not_run_a_sequence_has_the_engines_pass_it_on(metrics: Metrics) -> None:
    async with world(metrics) as found:
        task = await found.owner.run("cmpl-a/b?c d-0")  # a client may have had a say in its id
        path = "/sequences/cmpl-a%2Fb%3Fc%20d-0/move"
        for number, to in enumerate("ba", 1):
            answer = await found.other.routes.post(path, json={"destination": to})
            assert (answer.status_code, answer.json()) == (202, {"accepted": True})
            assert (await found.owner.settled_moves(number))[-1].outcome == "moved"
            assert found.owner.engine_of("cmpl-a/b?c d-0") == to
        asked = await found.owner.routes.post(path, json={"destination": "b", "reason": "because"})
        assert (asked.status_code, asked.json()["outcome"], asked.json()["reason"]) == (200, "moved", "because")
        await task
        assert found.owner.tokens["cmpl-a/b?c d-0"] == found.whole("s")


async def test_what_nobody_can_move_is_refused(metrics: Metrics) -> None:
    async with world(metrics) as found, HttpEngine("a", found.urls["a"]) as a:
        with pytest.raises(UnknownSequence, match="does not generate 's'"):
            await a.propose_move("s", "b", "test")
        none = await found.other.routes.post("/sequences/s/move", json={"destination": "b"})
        assert (none.status_code, none.json()["error"]["code"]) == (404, "unknown_sequence")
        nowhere = await found.other.routes.post("/sequences/s/move", json={"destination": "x"})
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_engine")
        async with aclosing(a.start_generate(request_of("s", max_tokens=TOKENS))) as outputs:
            await anext(outputs)
            with pytest.raises(Conflict, match="not run by a router"):
                await a.propose_move("s", "b", "test")
            plain = await found.other.routes.post("/sequences/s/move", json={"destination": "b"})
            assert (plain.status_code, plain.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.slow
async def test_what_is_over_a_limit_is_dropped_and_on_record(metrics: Metrics) -> None:
    async with world(metrics, ceiling=0.001) as found, HttpEngine("a", found.urls["a"]) as a:
        loads = found.owner.fleet.knowledge.loads
        there = await found.owner.run("t")
        await a.propose_move("t", "b", "first")
        await found.owner.settled_moves(1)
        task = await found.owner.run("s")
        await until(lambda: (loads.last("b") or [EngineLoad(waiting=0, running=0, kv_usage=0)])[0].kv_usage > 0.001)
        codes = "no_space", "unknown_engine"
        before = [count_of("rebalance", "dropped", code) for code in codes]
        await a.propose_move("s", "b", "rebalance")
        await a.propose_move("s", "x", "rebalance")
        moves = (await found.owner.settled_moves(3))[1:]
        assert [(move.outcome, move.source, move.destination) for move in moves] == [
            ("dropped", "a", "b"),
            ("dropped", "a", "x"),
        ]
        assert "of its KV cache" in moves[0].error
        assert "no engine 'x'" in moves[1].error
        assert [count_of("rebalance", "dropped", code) for code in codes] == [count + 1 for count in before]
        assert [move.code for move in moves] == list(codes)
        assert found.owner.engine_of("s") == "a"
        await asyncio.gather(task, there)
        assert found.owner.tokens["s"] == found.whole("s")


@pytest.mark.slow
async def test_a_proposal_for_what_is_not_there_any_more_moves_nothing(metrics: Metrics) -> None:
    async with world(metrics) as found:
        task = await found.owner.run("s")
        found.owner.fleet.proposed("b", MoveProposal("s", "a", "late"))  # it runs on the other one
        found.owner.fleet.proposed("a", MoveProposal("s.1", "b", "late"))
        await task
        assert not found.owner.moves


def count_of(reason: str, outcome: str, code: str = "") -> float:
    labels = {"reason": reason, "outcome": outcome, "code": code}
    return prometheus_client.REGISTRY.get_sample_value("tercet_moves_total", labels) or 0.0


def test_reasons_of_others_do_not_fill_the_metrics(metrics: Metrics) -> None:
    for number in range(MOST_REASONS + 5):
        metrics.moved(MoveRecord(number, "s", "a", "b", f"reason {number}", 0.0, 0, "moved"))
    assert count_of("reason 0", "moved") == 1
    assert count_of(f"reason {MOST_REASONS}", "moved") == 0
    assert count_of("other", "moved") == 5


def test_ids_of_one_request() -> None:
    assert further_id("s", 3) == "s.3"
    assert find_id(["s", "s.1"], "s") == "s"
    assert find_id(["s.1", "s.2", "t"], "s") == "s.2"
    assert find_id(["s.1", "s.2"], "s.1") == "s.1"
    for stranger in ("s1", "s.", "s.x", "s.1.2", "ss.1", "s.-1"):
        assert find_id([stranger], "s") is None
