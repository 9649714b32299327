"""Requests that a script gives as rows, the replay of a run, tokens of a trace's blocks, and believed lengths of
answers that differ from the true ones.
"""

from __future__ import annotations

import csv
import itertools
import json
import shlex
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cli import app
from tercet.protocol import BadRequest, Fleet, Request
from tercet.protocol.content import chain
from tercet_lab.bench.workloads.conversations import HashedWords
from tercet_lab.bench.workloads.recorded import block_text
from tercet_lab.block_tokens import BlockText, BlockTokens, begin_alike, part_of
from tercet_lab.tables import REQUEST_COLUMNS

lab: Any = import_module("tercet.lab")


def row(at: float, prompt: Any, answer: int, **more: Any) -> dict[str, Any]:
    return {"at": at, "input_tokens": prompt, "output_tokens": answer, **more}


def simulated(work: Any, **parts: Any) -> Any:
    return lab.simulate("data_parallel", "both=2", work, **parts)


def test_rows_come_in_the_order_of_their_times_and_share_blocks() -> None:
    rows = [row(12.0, 100, 3), row(10.0, 96, 5, prefix=[7, 8]), row(11.0, 70, 4, prefix=(7, 8))]
    run = lab.simulate("data_parallel", "both=1", lab.Rows(iter(rows), block=32))
    told = [(each["scheduled"], each["input_tokens"], each["output_tokens"]) for each in run.requests.rows()]
    assert told == [(0.0, 96, 5), (1.0, 70, 4), (2.0, 100, 3)]
    assert [each["cached_tokens"] for each in run.requests.rows()] == [0, 64, 0], "blocks 7 and 8, and nothing else"
    stretched = simulated(lab.Rows(rows, rate=4.0, block=32))
    assert stretched.requests["scheduled"].tolist() == [0.0, 0.25, 0.5]


def test_a_later_turn_comes_at_its_time_or_after_the_answer_before() -> None:
    rows = [row(0, 50, 4, session="a"), row(9, 80, 4, session="a"), row(9.001, 120, 4, session="a"), row(1, 10, 2)]
    found = sorted(simulated(lab.Rows(rows)).requests.rows(), key=lambda each: each["scheduled"])
    assert [(each["turn"], each["input_tokens"]) for each in found] == [(0, 50), (0, 10), (1, 80), (2, 120)]
    assert [each["scheduled"] for each in found[:3]] == [0.0, 1.0, 9.0]
    assert found[3]["scheduled"] == found[2]["ended"] > 9.001


def test_a_run_can_be_repeated_from_its_requests() -> None:
    run = simulated(lab.Poisson(rate=30, requests=40, input=lab.Normal(300, 100), output=lab.Lognormal(20, 20)))
    for rows in (run.requests, list(run.requests.rows()), lab.Requests.of_plain(run.requests.plain())):
        again = simulated(lab.Rows(rows))
        first = min(run.requests["scheduled"])
        before, after = (
            sorted((each["scheduled"], each["input_tokens"], each["output_tokens"]) for each in of.requests.rows())
            for of in (run, again)
        )
        assert [(pytest.approx(at - first), *lengths) for at, *lengths in before] == after
    sessions = simulated(lab.Sessions(4.0, 12, turns=3, input_len=40, output_len=8))
    again = simulated(lab.Rows(sessions.requests))
    assert sorted(again.requests["turn"]) == sorted(sessions.requests["turn"])
    assert sorted(again.requests["input_tokens"]) == sorted(sessions.requests["input_tokens"])


@pytest.mark.parametrize(("library", "make"), [
    ("pandas", lambda pandas, rows: pandas.DataFrame(rows)),
    ("polars", lambda polars, rows: polars.DataFrame(rows)),
    ("pyarrow", lambda arrow, rows: arrow.Table.from_pylist(rows)),
])  # fmt: skip
def test_a_data_frame_is_rows(library: str, make: Any) -> None:
    rows = [row(0.0, 40, 3, session=None, klass="fast"), row(0.5, 60, 2, session="s", klass=None)]
    assert lab.Rows(make(pytest.importorskip(library), rows)) == lab.Rows(rows)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_run_goes_to_a_data_frame_and_comes_back(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    run = simulated(lab.Sessions(4.0, 12, turns=3, input_len=40, output_len=8), record=lab.Record(tokens=True))
    frame = getattr(run.requests, f"to_{library.removeprefix('py')}")()
    assert len(frame) == 12
    again = simulated(lab.Rows(frame))
    for column in ("turn", "input_tokens", "output_tokens"):
        assert sorted(again.requests[column]) == sorted(run.requests[column])
    if library == "pyarrow":
        run.requests.write(tmp_path / "run.parquet")
        assert lab.load(tmp_path / "run.parquet").requests.plain() == run.requests.plain()


def test_classes_of_rows_have_their_objectives() -> None:
    rows = [row(0.1 * number, 200, 4, klass="fast" if number % 2 else "") for number in range(20)]
    moves = lab.Moves(objective_ttft=5.0, objective_class=["fast,ttft=0.000001"], class_traffic={"fast": "1"})
    run = simulated(lab.Rows(rows), moves=moves)
    assert {each["klass"]: each["met_slo"] for each in run.requests.rows()} == {"default": True, "fast": False}


def test_the_file_of_a_report_names_the_rows_by_a_hash_and_a_command_line_refuses_them() -> None:
    experiments = [
        lab.Experiment(program="data_parallel", work=lab.Rows([row(0, tokens, 2)], warm_up=0)) for tokens in (9, 9, 8)
    ]
    hashes = [each.arguments()["workload"]["rows"] for each in experiments]
    assert hashes[0] == hashes[1] != hashes[2]
    with pytest.raises(BadRequest, match="work: a command line has no rows"):
        experiments[0].command()
    assert "rows" not in lab.Experiment(program="data_parallel", work=lab.Sessions(1.0, 2)).arguments()["workload"]
    grid = lab.sweep(experiments[0], work=lab.Rows([row(0, 9, 2), row(1, 9, 2)]), over={"rate": [1.0, 2.0]})
    assert len(grid.table("ttft.mean")) == 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "rows: are empty"),
        (3, "rows: must be a data frame, or mappings"),
        ([5], "rows: row 0 is 5, and must be a mapping"),
        ([{"at": 0, "input_tokens": 4}], "rows: row 0: output_tokens: is missing"),
        ([row(0, 9, 2), row(float("nan"), 9, 2)], "rows: row 1: at: is missing"),
        ([row(float("inf"), 9, 2)], "rows: row 0: at: is inf"),
        ([row(0, 0, 2)], "rows: row 0: input_tokens: is 0, and must be a whole number of at least 1"),
        ([row(0, "many", 2)], "rows: row 0: input_tokens: is 'many', and must be a number"),
        ([row(0, 9, 2, prefix=[1, 2])], "rows: row 0: prefix: has 2 blocks of 512 tokens, more than input_tokens, 9"),
        ([row(0, 900, 2, prefix=["x"])], "rows: row 0: prefix: is .* ids of blocks"),
        ([row(0, 900, 2, prefix=[-1])], "rows: row 0: prefix: an id must be 0 or more"),
        ([row(1, 11, 2, session="a"), row(0, 9, 2, session="a")], "row 0: input_tokens: is 11, and must exceed 11"),
        ([row(0, 9, 2, session="a"), row(1, 900, 2, session="a", prefix=[1])], "row 1: prefix: session a has begun"),
    ],
)
def test_a_wrong_row_is_named(rows: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        lab.Rows(rows)


def test_more_requests_than_rows_are_refused() -> None:
    work = msgspec.structs.replace(lab.Rows([row(0, 9, 2)]), requests=2)
    with pytest.raises(BadRequest, match="requests: is 2, and there are 1 rows"):
        simulated(work)


# Files of runs, and those of other load generators, as tables of requests.

SIM = ["sim", "--fleet", "both=2", "--num-prompts", "40"]


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_saved_run_is_the_same_after_loading(tmp_path: Path) -> None:
    work = lab.Poisson(rate=60, requests=80, input=300, output=lab.Lognormal(100, 300))
    run = lab.simulate(
        "data_parallel", lab.Fleet(both=4, total_blocks=400), work, slo=lab.Slo(ttft=0.2),
        moves=lab.Moves("neutral_load", interval=0.5), record=lab.Record(tokens=True, engines_every=1.0),
    )  # fmt: skip
    run.save(tmp_path / "run.json")
    again = lab.load(tmp_path / "run.json")
    for name in ("requests", "engines", "moves", "plans"):
        assert getattr(again, name).plain() == getattr(run, name).plain()
    assert (again.summary, again.attainment, again.goodput) == (run.summary, run.attainment, run.goodput)
    assert (again.engine_hours, again.slo) == (run.engine_hours, run.slo)
    assert again.about["program"] == "data_parallel"
    assert lab.load(tmp_path / "run.json", slo=lab.Slo(ttft=1e-9)).attainment == 0.0
    with pytest.raises(BadRequest, match=r"must end with \.json"):
        run.save(tmp_path / "run.parquet")


def test_sim_writes_its_requests(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    given = ["--request-rate", "4,8", "--goodput", "ttft:500", "--label", "x", "--records", str(file)]
    assert app._run([*SIM, *given]) == 0
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert [row["rate"] for row in rows] == ["4.0"] * 40 + ["8.0"] * 40
    assert {row["label"] for row in rows} == {"x"}
    assert set(REQUEST_COLUMNS) < set(rows[0])
    assert {row["met_slo"] for row in rows} == {"true"}
    assert len(lab.load(file).requests) == 80


def test_a_file_of_records_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("x.txt", "must end with .csv or .parquet"), ("no/x.csv", "no")):
        assert app._run([*SIM, "--records", str(tmp_path / name)]) == 2
        assert "--records" in (told := capsys.readouterr().err)
        assert said in told


def test_a_file_of_vllm_bench_serve(tmp_path: Path) -> None:
    content = {
        "duration": 5.0, "completed": 2, "input_lens": [10, 20, 30], "output_lens": [3, 0, 2],
        "ttfts": [0.5, 0.0, 0.25], "itls": [[0.25, 0.25], [], [0.5]], "latencies": [1.0, 0.75, 0.75],
        "start_times": [100.0, 101.0, 102.0], "errors": ["", "Traceback\nConnectionError: refused", ""],
    }  # fmt: skip
    rows = list(lab.load(written(tmp_path / "vllm.json", content)).requests.rows())
    assert [(row["sent"], row["first_token"], row["last_token"], row["ended"]) for row in rows] == [
        (0.0, 0.5, 1.0, 1.0), (1.0, None, None, 1.75), (2.0, 2.25, 2.75, 2.75),
    ]  # fmt: skip
    assert [row["failure"] for row in rows] == ["", "ConnectionError: refused", ""]
    assert [row["ok"] for row in rows] == [True, False, True]
    assert rows[0]["token_times"] == (0.5, 0.75, 1.0)
    assert rows[0]["cached_tokens"] is None
    run = lab.load(tmp_path / "vllm.json", slo=lab.Slo(ttft=0.3))
    assert run.attainment == pytest.approx(1 / 3)
    assert run.summary.tpot.mean == pytest.approx((0.25 + 0.5) / 2)
    del content["itls"]
    with pytest.raises(BadRequest, match=r"lacks itls; .*--save-detailed"):
        lab.load(written(tmp_path / "bare.json", content))


def guidellm_request(at: float, **more: Any) -> dict[str, Any]:
    timings = {"targeted_start": at - 0.125, "first_token_iteration": at + 0.25, "last_token_iteration": at + 1.0}
    info = {"conversation_id": "c1", "turn_index": 1, "timings": timings, "error": None}
    return {
        "request_id": f"g{at}", "info": info, "request_start_time": at, "request_end_time": at + 1.125,
        "prompt_tokens": 7, "cached_tokens": 4, "output_tokens": 4, "time_to_first_token_ms": 250.0, **more,
    }  # fmt: skip


def test_a_file_of_guidellm(tmp_path: Path) -> None:
    errored = guidellm_request(11.0)
    errored["info"] |= {"error": "500 Server Error"}
    requests = {"successful": [guidellm_request(12.0), guidellm_request(10.0)], "errored": [errored], "incomplete": []}
    one = {"config": {"strategy": {"type_": "constant"}}, "requests": requests}
    file = written(tmp_path / "benchmarks.json", {"benchmarks": [one, one]})
    with pytest.raises(BadRequest, match=r"has 2 runs; choose one by point= \(0: constant, 1: constant\)"):
        lab.load(file)
    rows = list(lab.load(file, point=1).requests.rows())
    assert [row["sent"] for row in rows] == [0.0, 1.0, 2.0]
    assert rows[0] == rows[0] | {
        "id": "g10.0", "session": "c1", "turn": 1, "scheduled": -0.125, "first_token": 0.25, "last_token": 1.0,
        "ended": 1.125, "input_tokens": 7, "cached_tokens": 4, "output_tokens": 4, "ok": True,
    }  # fmt: skip
    assert (rows[1]["ok"], rows[1]["failure"], rows[1]["first_token"]) == (False, "500 Server Error", None)


def test_a_file_of_aiperf(tmp_path: Path) -> None:
    def record(at: int, phase: str = "profiling", **more: Any) -> dict[str, Any]:
        metadata = {
            "session_num": at, "x_request_id": f"a{at}", "x_correlation_id": "s", "turn_index": 0,
            "request_start_ns": at * 10**9, "request_end_ns": at * 10**9 + 10**9, "benchmark_phase": phase,
        }  # fmt: skip
        metrics = {
            "input_sequence_length": {"value": 550, "unit": "tokens"}, "output_sequence_length": {"value": 3},
            "time_to_first_token": {"value": 250.0, "unit": "ms"}, "request_latency": {"value": 750.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [250.0, 250.0], "unit": "ms"},
        }  # fmt: skip
        return {"metadata": metadata, "metrics": metrics, "error": None, **more}

    failed = record(3, metrics={"error_isl": {"value": 9}}, error={"code": 499, "type": "RequestCancellationError"})
    file = tmp_path / "profile_export.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (record(1, "warmup"), failed, record(2))) + "\n")
    rows = list(lab.load(file).requests.rows())
    assert [(row["id"], row["sent"], row["ok"], row["failure"]) for row in rows] == [
        ("a2", 0.0, True, ""), ("a3", 1.0, False, "RequestCancellationError"),
    ]  # fmt: skip
    assert rows[0]["token_times"] == pytest.approx((0.25, 0.5, 0.75))
    assert (rows[0]["last_token"], rows[0]["ended"]) == (pytest.approx(0.75), 1.0)
    assert (rows[0]["input_tokens"], rows[0]["output_tokens"], rows[1]["input_tokens"]) == (550, 3, 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a file of requests that is known"),
        ('{"a": 1}', "its keys are not those of a file of requests"),
        ('{"a": 1}\n{"b": 2}', "a line without metadata and metrics"),
        ('{"benchmarks": []}', "has 0 runs"),
        ('{"kind": "tercet.lab run"}', "is not a file of requests that is known"),
        ('{"benchmarks": [{}]}', "has no requests"),
        ('{"metadata": {}, "metrics": {}}', "request_start_ns"),
    ],
)
def test_other_files_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BadRequest, match=f"path: {file}.*{said}"):
        lab.load(file)
    with pytest.raises(BadRequest, match="cannot be read"):
        lab.load(tmp_path / "none.json")


WORDS = HashedWords(8)  # few words, so that an id has several digits, and different blocks are alike in places
TEXTS = {size: block_text(WORDS, "seed", size, 40) for size in (3, 4, 7, 16)}


@st.composite
def prompts(draw: st.DrawFn, size: int | None = None) -> tuple[BlockTokens, tuple[int, ...]]:
    """Tokens of blocks, and the same as a tuple."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS))) if size is None else size]
    ids = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    end = draw(st.integers(1, len(ids) * text.size))
    begin = draw(st.integers(0, end - 1))
    whole = tuple(itertools.chain.from_iterable(text.tokens(each, 0, text.size) for each in ids))
    return BlockTokens(text, ids, begin, end), whole[begin:end]


@given(prompts(), st.slices(100), st.integers(-100, 100))
def test_they_are_a_sequence(found: tuple[BlockTokens, tuple[int, ...]], some: slice, index: int) -> None:
    tokens, plain = found
    assert (len(tokens), tuple(tokens), hash(tokens), repr(tokens)) == (len(plain), plain, hash(plain), repr(plain))
    assert tokens == plain
    assert plain == tokens
    assert tokens[some] == plain[some]
    assert type(tokens[some]) is tuple
    assert (tokens + (1,), (1,) + tokens) == ((*plain, 1), (1, *plain))  # noqa: RUF005 - what programs write
    assert (*tokens, 1) == (*plain, 1)
    if -len(plain) <= index < len(plain):
        assert tokens[index] == plain[index]
    else:
        with pytest.raises(IndexError, match=str(index)):
            tokens[index]


@given(prompts(), st.data())
def test_parts_make_no_tokens_and_are_equal(found: tuple[BlockTokens, tuple[int, ...]], data: st.DataObject) -> None:
    tokens, plain = found
    end = data.draw(st.integers(1, len(plain)))
    begin = data.draw(st.integers(0, end - 1))
    for each in (tokens, plain):
        part = part_of(each, begin, end)
        assert type(part) is type(each)
        assert part == plain[begin:end]


@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_beginnings_are_alike_if_their_tokens_are(size: int, data: st.DataObject) -> None:
    (one, plain), (other, plainly) = data.draw(prompts(size)), data.draw(prompts(size))
    count = data.draw(st.integers(1, min(len(plain), len(plainly))))
    expected = plain[:count] == plainly[:count]
    for this, that in itertools.product((one, plain), (other, plainly)):
        assert begin_alike(this, that, count) == expected
    assert begin_alike(one, BlockTokens(one._text, one._ids, one._begin, one._end), len(one))
    assert (one == other) == (plain == plainly)


@given(prompts(), st.integers(1, 20))
def test_the_hashes_of_its_blocks_are_those_of_tuples(found: tuple[BlockTokens, tuple[int, ...]], size: int) -> None:
    tokens, plain = found
    for _ in range(2):
        assert chain(7, tokens, size) == chain(7, plain, size)
    assert chain(7, tokens, size, 1, {0: (5,)}) == chain(7, plain, size, 1, {0: (5,)})


def test_different_ids_are_different_tokens() -> None:
    text: BlockText = TEXTS[4]
    assert len({text.tokens(each, 0, 4) for each in range(41)}) == 41


WORK = lab.Poisson(rate=45, requests=500, input=64, output=lab.Lognormal(150, 400))


def least_predicted() -> Any:
    """Return a program that sends each request to the engine with the fewest predicted tokens to come."""
    coming = defaultdict[str, int](int)

    async def program(request: Request, fleet: Fleet):  # type: ignore[no-untyped-def]
        tokens = int(request.headers["x-predicted-tokens"])
        name = min((member.name for member in fleet.members), key=lambda name: (coming[name], name))
        coming[name] += tokens
        try:
            with fleet.engine(name) as engine:
                yield engine.start_generate(request)
        finally:
            coming[name] -= tokens

    return program


def jct(error: float, seed: int) -> float:
    fleet = lab.Fleet(both=4, max_num_seqs=8)
    return lab.simulate(least_predicted(), fleet, WORK, seed=seed, predict_error=error).summary.e2el.mean


@pytest.mark.slow
def test_the_believed_length_differs_by_a_lognormal_factor_with_this_deviation() -> None:
    work = lab.Poisson(rate=100, requests=2_000, input=20, output=lab.Lognormal(400, 200))
    logs = dict[float, Any]()
    for error in (0.0, 0.5, 1.0):
        rows = lab.simulate("data_parallel", "both=4", work, predict_error=error).requests
        assert (rows["output_tokens"] == rows["wanted_tokens"]).all(), "answers have their true lengths"
        logs[error] = np.log(rows["predicted_tokens"] / rows["output_tokens"])
    assert not logs[0.0].any()
    assert np.std(logs[0.5]) == pytest.approx(0.5, rel=0.06)
    assert np.mean(logs[0.5]) == pytest.approx(0.0, abs=0.05)
    assert logs[1.0] == pytest.approx(2 * logs[0.5], abs=0.2), "the same luck, scaled"
    rows = lab.simulate("data_parallel", "both=4", lab.Poisson(10, 20)).requests
    assert np.isnan(rows["predicted_tokens"]).all()


@pytest.mark.slow
def test_policies_lose_as_predictions_get_worse() -> None:
    means = [np.mean([jct(error, seed) for seed in range(3)]) for error in (0.0, 1.0, 3.0)]
    assert means[0] < means[1] < means[2]
    assert means[2] > 1.05 * means[0]


@pytest.mark.parametrize("program", ["auto", "disaggregated"])
def test_predictions_without_error_change_nothing(program: str) -> None:
    work = lab.Poisson(rate=20, requests=150, input=lab.Lognormal(800, 800), output=lab.Lognormal(60, 100))
    told, plain = (
        lab.simulate(program, "2P2D", work, **({} if error is None else {"predict_error": error})).requests
        for error in (0.0, None)
    )
    told.fill("predicted_tokens", [float("nan")] * 150)
    assert told.plain() == plain.plain()


def test_auto_believes_the_prediction() -> None:
    work = lab.Poisson(rate=20, requests=150, input=lab.Lognormal(800, 800), output=lab.Lognormal(60, 100))
    right, wrong = (lab.simulate("auto", "2P2D", work, predict_error=error).requests for error in (0.0, 3.0))
    assert right["ended"].tolist() != wrong["ended"].tolist()


def test_later_turns_have_predictions_and_an_error_is_an_axis_of_a_sweep() -> None:
    run = lab.simulate("data_parallel", "both=1", lab.Sessions(4.0, 12, turns=3, output_len=20), predict_error=0.3)
    assert np.isfinite(run.requests["predicted_tokens"]).all()
    assert max(run.requests["turn"]) == 2
    grid = lab.sweep("auto", "2P2D", lab.Poisson(10, 60), over={"predict_error": [0.0, 2.0]})
    assert grid.points[0] != grid.points[1]
    with pytest.raises(BadRequest, match="--over: predict_error=much is not a number"):
        lab.sweep("auto", "2P2D", lab.Poisson(10, 60), over={"predict_error": ["much"]})
    with pytest.raises(BadRequest, match="predict_error: is -1, and must be 0 or more"):
        lab.simulate("auto", "2P2D", lab.Poisson(10, 60), predict_error=-1.0)


def test_the_command_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.simulate("auto", "2P2D", lab.Poisson(10, 60), predict_error=0.4)
    report = tmp_path / "report.json"
    assert app._run([*shlex.split(run.experiment.command())[1:], "--result-filename", str(report)]) == 0
    assert report.read_bytes() == run.experiment.report([10.0], run.experiment.name).to_json()
    assert app._run(["sim", "--num-prompts", "20", "--predict-error", "-1"]) == 2
    assert "--predict-error: is -1" in capsys.readouterr().err
