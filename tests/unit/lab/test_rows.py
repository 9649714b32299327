"""``lab.Rows``: requests that a script gives as rows, and the replay of a run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.protocol import BadRequest

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
