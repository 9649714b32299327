"""A whole configuration against a server: points, repeatability, salts, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tercet.protocol import BadRequest, EngineUnreachable
from tercet.settings import Source
from tercet_bench.bench_config import ServeConfig, load_config
from tercet_bench.experiment import Cell, Contender, Experiment, prepare
from tercet_lab.bench.results import Point
from tests.unit.bench.openai_server import FakeServer

SMALL = "random,input_len=20,output_len=4"


async def measure(server: FakeServer, **given: Any) -> list[Point]:
    keys = {name.replace("_", "-"): value for name, value in given.items()}
    config = load_config(ServeConfig, None, Source({"base-url": server.url, "workload": [SMALL], **keys}))
    contender = Contender("x", config.base_url, config.program)
    bench = await prepare(config, [contender], str)
    return await Experiment(bench, [Cell(contender, load) for load in config.loads], lambda *_: None).run()


@pytest.mark.slow
async def test_the_same_seed_asks_the_same(server: FakeServer) -> None:
    asked: list[list[Any]] = []
    for seed in (1, 1, 2):
        await measure(server, request_rate=["inf"], num_prompts=3, seed=seed)
        asked.append(sorted(body["prompt"] for body in server.bodies))
        server.bodies.clear()
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.slow
async def test_points_of_a_sweep_share_no_words(server: FakeServer) -> None:
    found = await measure(server, request_rate=[50, 100], num_prompts=4)
    assert [point.request_rate for point in found] == [50.0, 100.0]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 8


async def test_a_closed_loop_sends_text_when_asked_to(server: FakeServer) -> None:
    (found,) = await measure(server, arrival="closed", concurrency=[2], num_prompts=5, prompt_as="text")
    assert (found.concurrency, found.request_rate, found.metrics["completed"]) == (2, None, 5)
    assert {len(body["prompt"].split()) for body in server.bodies} == {20}
    assert server.most_at_once <= 2


@pytest.mark.slow
async def test_an_infinite_rate_is_a_point_of_all_at_once(server: FakeServer) -> None:
    (found,) = await measure(server, request_rate=["inf"], num_prompts=5)
    assert (found.request_rate, found.concurrency) == (None, 5)


async def test_the_rate_counts_requests_of_sessions_too(server: FakeServer) -> None:
    workload = "sessions,turns=4,think_time=0,input_len=5,output_len=2"
    (found,) = await measure(server, workload=[workload], arrival="constant", request_rate=[40], num_prompts=12)
    begins = [record.scheduled for record in found.records][::4]
    assert begins == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.slow
async def test_a_trace_is_replayed_at_its_own_times_or_at_a_rate(server: FakeServer, tmp_path: Path) -> None:
    rows = [f'{{"timestamp": {at}, "input_length": {9 + at}, "output_length": 2}}' for at in (0, 100, 150)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    trace = {"arrival": "trace", "workload": [f"mooncake,path={tmp_path / 't.jsonl'}"]}
    (found,) = await measure(server, **trace)
    assert [record.scheduled for record in found.records] == [0.0, 0.1, 0.15]
    assert [record.input_tokens for record in found.records] == [9, 109, 159]
    (faster,) = await measure(server, request_rate=[40], **trace)
    assert [record.scheduled for record in faster.records] == pytest.approx([0.0, 1 / 30, 0.05])


@pytest.mark.slow
async def test_texts_from_a_file_are_salted_so_that_points_do_not_find_each_others(
    server: FakeServer, tmp_path: Path
) -> None:
    talk = '[{"conversations": [{"from": "human", "value": "w1 w2 w3 w4"}, {"from": "gpt", "value": "w1 w2 w3 w4"}]}]'
    (tmp_path / "s.json").write_text(talk)
    workload = [f"sharegpt,path={tmp_path / 's.json'}"]
    await measure(server, workload=workload, request_rate=[50, 100], num_prompts=2)
    assert len({body["cache_salt"] for body in server.bodies}) == 2
    server.bodies.clear()
    await measure(server, workload=workload, request_rate=[50], num_prompts=2)
    assert not any("cache_salt" in body for body in server.bodies)


@pytest.mark.slow
async def test_an_interrupt_between_points_leaves_the_rest_out(server: FakeServer) -> None:
    flags = {"base-url": server.url, "workload": [SMALL], "request-rate": [50, 100, 150], "num-prompts": 2}
    config = load_config(ServeConfig, None, Source(flags))
    contender = Contender("x", config.base_url)
    bench = await prepare(config, [contender], str)
    cells = [Cell(contender, load) for load in config.loads]
    experiment = Experiment(bench, cells, lambda cell, *_: experiment.interrupt() if cell is cells[1] else None)
    assert [point.request_rate for point in await experiment.run()] == [50.0, 100.0]


@pytest.mark.slow
async def test_a_key_in_the_environment_is_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    await measure(server, request_rate=["inf"], num_prompts=1)
    await measure(server, request_rate=["inf"], num_prompts=1, header={"Authorization": "mine"})
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer k", "mine"]


async def test_who_cannot_be_measured(server: FakeServer) -> None:
    with pytest.raises(BadRequest, match="does not serve other; it serves words"):
        await measure(server, request_rate=[1], model="other")
    server.url = "http://127.0.0.1:9"
    with pytest.raises(EngineUnreachable, match="does not answer"):
        await measure(server, request_rate=[1])
