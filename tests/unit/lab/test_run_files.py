"""Files of runs, and those of other load generators, as tables of requests."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tercet.cli import app
from tercet.protocol import BadRequest
from tercet_lab.tables import REQUEST_COLUMNS

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
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
