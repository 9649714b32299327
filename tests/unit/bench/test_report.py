"""What is kept and shown: files that come back as they were, lines that are of one kind, tables, and figures."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tercet.protocol import BadRequest
from tercet_bench.bench_config import CompareConfig
from tercet_bench.bench_report import figure_of, markdown, point_text, pooled, ratio_table
from tercet_bench.experiment import ratios_of
from tercet_bench.figures import draw
from tercet_lab.bench.results import BenchResult, Point, Ratio, load_result, save_result, summarize, three_digits
from tercet_lab.drawing import require_drawing
from tercet_lab.slo import Slo
from tercet_lab.tables import RequestRow
from tests.unit.lab.bench.golden_images import check_image

CHANCE = np.random.default_rng(11)


@pytest.fixture
def fixed_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, whichever tests ran before."""
    monkeypatch.setattr(sys.modules[__name__], "CHANCE", np.random.default_rng(3))


def records(count: int = 20, ttft: float = 0.2, failed: int = 0) -> tuple[RequestRow, ...]:
    found: list[RequestRow] = []
    for index in range(count):
        first = index + ttft * (1 + float(CHANCE.random()))
        times = tuple(float(time) for time in first + np.cumsum([0.0, *CHANCE.random(4) / 20]))
        bad = index < failed
        found.append(
            RequestRow(
                id=index, scheduled=index - 0.001, sent=index, first_token=None if bad else first, ended=times[-1],
                token_times=() if bad else times, input_tokens=10, planned_input=10, output_tokens=5, wanted_tokens=5,
                failure="http" if bad else None, error="HTTP 503: no room" if bad else None,
            )
        )  # fmt: skip
    return tuple(found)


def point(label: str = "dp", rate: float | None = 1.0, number: int = 0, **more: Any) -> Point:
    measured = more.pop("records", None) or records()
    metrics = summarize(measured, Slo(ttft=0.3)).flat()
    return Point(label=label, request_rate=rate, round=number, metrics=metrics, records=measured, **more)


def result(*points: Point, **more: Any) -> BenchResult:
    return BenchResult(created="2026-01-01T00:00:00+00:00", points=points, machine={"cpu": "X", "cores": 2}, **more)


def sweep() -> list[BenchResult]:
    rates = (0.5, 1.0, 2.0)
    return [
        result(*(point(label, rate, records=records(ttft=slow * rate)) for rate in rates))
        for label, slow in (("data_parallel", 0.2), ("disaggregated", 0.15))
    ]


# Files


def test_a_file_comes_back_as_it_was_to_the_microsecond(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    ratio = Ratio(
        label="b", baseline="a", request_rate=1.0, concurrency=None, metric="mean TTFT", value=2.0, baseline_value=1.0,
        ratio=2.0, low=1.5, high=2.5, confidence=0.95, rounds=3,
    )  # fmt: skip
    original = result(point(), point(errors={"http": 1}, partial=True), ratios=(ratio,), seed=4, command=("bench",))
    save_result(original, file)
    found = load_result(file)
    assert (found.seed, found.command, found.ratios, found.points[1].partial) == (4, ("bench",), (ratio,), True)
    for before, after in zip(original.points[0].records, found.points[0].records, strict=True):
        np.testing.assert_allclose(after.token_times, before.token_times, atol=1e-6)
        assert after.id == before.id
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_numbers_can_be_made_again_from_a_files_records(tmp_path: Path) -> None:
    save_result(result(point(records=records(failed=3))), tmp_path / "run.json")
    (kept,) = load_result(tmp_path / "run.json").points
    again = summarize(kept.records, Slo(ttft=0.3)).flat()
    assert again.keys() == kept.metrics.keys()
    for name, value in again.items():
        assert value == pytest.approx(kept.metrics[name], abs=0.01), name


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not a result file of tercet bench"),
        ('{"created": "x", "format": 9}', "has format 9"),
        ("[]", "not a result"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(BadRequest, match=why):
        load_result(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.json: No such file"):
        load_result(tmp_path / "none.json")


# Numbers


def test_pooled_rounds_are_those_of_all_their_requests() -> None:
    rounds = [point(number=0), point(number=1, records=records(35, 0.6, failed=4))]
    found = pooled(rounds)
    good = [record for one in rounds for record in one.records if record.ok]
    ttft = np.array([record.first_token - record.sent for record in good if record.first_token is not None]) * 1000
    tpot = np.array([(record.ended - (record.first_token or 0)) / 4 for record in good]) * 1000
    assert found["mean_ttft_ms"] == pytest.approx(ttft.mean())
    assert found["p99_ttft_ms"] == pytest.approx(np.percentile(ttft, 99))
    assert found["median_tpot_ms"] == pytest.approx(np.median(tpot))
    assert (found["completed"], found["failed"]) == (51, 4)
    seconds = sum(float(one.metrics["duration"] or 0) for one in rounds)
    assert found["request_throughput"] == pytest.approx(51 / seconds)
    assert found["request_goodput"] == pytest.approx(np.sum((ttft + 1) <= 300) / seconds)


def test_rounds_without_records_cannot_be_pooled() -> None:
    bare = [Point(label="a", request_rate=1.0, round=n, metrics={"mean_ttft_ms": 1.0}) for n in range(2)]
    assert pooled(bare[:1])["mean_ttft_ms"] == 1.0
    with pytest.raises(BadRequest, match="cannot be pooled"):
        pooled(bare)


def test_a_figure_has_a_line_per_label_sorted_by_rate() -> None:
    figure = figure_of([result(point("b", 2.0)), result(point("b", 0.5), point("a", 1.0))])
    assert figure.x_label == "requests/s"
    found = [(line.label, [point.x for point in line.points]) for line in figure.lines]
    assert found == [("b", [0.5, 2.0]), ("a", [1.0])]


def test_a_closed_loop_has_its_users_on_x_and_a_trace_its_own_rate() -> None:
    assert figure_of([result(point(rate=None, concurrency=4))]).x_label == "requests at once"
    (line,) = figure_of([result(point(rate=None))]).lines
    assert line.points[0].x == pytest.approx(20 / (20 + 0.4), rel=0.1)


def test_files_that_do_not_go_together() -> None:
    with pytest.raises(BadRequest, match="open-loop and closed-loop"):
        figure_of([result(point()), result(point(rate=None, concurrency=4))])
    with pytest.raises(BadRequest, match="no point"):
        figure_of([result()])


def test_markdown() -> None:
    text = markdown(sweep())
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert len({len(cells) for cells in rows}) == 1
    assert [cells[0].strip() for cells in rows[2:]] == ["data_parallel"] * 3 + ["disaggregated"] * 3
    assert [cell.strip() for cell in rows[0]][1:9] == [
        "requests/s", "completed", "failed", "achieved, requests/s", "goodput, requests/s", "output tokens/s",
        "TTFT mean, ms", "TTFT P99, ms",
    ]  # fmt: skip
    assert {cells[8].strip() for cells in rows[2:]} == {"-"}
    assert "P99 needs 100 requests" in text
    assert "measured from X, 2 cores" in text


def test_a_percentile_is_told_from_the_requests_on_that_it_needs() -> None:
    few, many = (markdown([result(point(records=records(count)))]) for count in (99, 100))
    assert "P99 needs 100 requests" in few
    assert "P99 needs" not in many
    assert few.count("| - ") == 4
    assert "| - " not in many


# Lines


def served(program: str, url: str = "http://a:1", **more: Any) -> BenchResult:
    """A run that named no program, at a router that ran one."""
    target = {"base_url": url, "model": "m", "program": {"program": program, "args": more.pop("args", {})}}
    return result(point("m", records=more.pop("records", None)), target={**target, **more.pop("target", {})}, **more)


def labels(*results: BenchResult) -> list[str]:
    return [line.label for line in figure_of(results).lines]


def test_two_programs_are_two_lines_also_where_their_files_call_them_the_same() -> None:
    assert labels(served("data_parallel"), served("disaggregated")) == ["m (data_parallel)", "m (disaggregated)"]
    ratios = [replace(served("balanced", args={"balance_ratio": ratio}), points=(point("balanced"),)) for ratio in "01"]
    assert labels(*ratios) == ["balanced(balance_ratio=0)", "balanced(balance_ratio=1)"]


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"target": {"model": "other"}}, "other"),
    ({"target": {"engines": [{"role": "prefill"}, {"role": "decode"}, {"role": "decode"}]}}, "1P2D"),
    ({"target": {"engine_versions": ["tercet 0.1.0, simulated llama-h100"]}}, "simulated in real time, llama-h100"),
    ({"config": {"workload": ["sonnet,input_len=9"]}}, "sonnet,input_len=9"),
    ({"config": {"arrival": "gamma", "burstiness": 0.5}}, "gamma 0.5"),
    ({"config": {"goodput": {"ttft": 100, "tpot": None}}}, "SLO ttft=100"),
    ({"config": {"num-prompts": 7}}, "num-prompts 7"),
    ({"config": {"extra-body": {"priority": 1}}}, "extra-body priority=1"),
    ({"url": "http://b:1"}, "server b"),
    ({"versions": {"tercet": "9.9"}}, "tercet 9.9"),
]


@pytest.mark.parametrize(("other", "told"), DIFFERENT, ids=[told for _, told in DIFFERENT])
def test_runs_that_differ_are_not_merged_and_their_labels_say_in_what(other: dict[str, Any], told: str) -> None:
    config = {"workload": ["sonnet"], "arrival": "poisson", "burstiness": 1.0, "num-prompts": 20}
    first: dict[str, Any] = {"config": config, "target": {"engine_versions": ["0.32.0"], "engines": [{"role": "both"}]}}
    second: dict[str, Any] = {
        name: {**first[name], **value} if name in first else value for name, value in other.items()
    }
    found = labels(served("dp", **first), served("dp", **{**first, **second}))
    assert len(found) == len(set(found)) == 2
    assert told in found[1]
    assert told not in found[0]


def test_another_machine_is_another_line() -> None:
    there = replace(served("dp"), machine={"cpu": "Y", "cores": 64})
    assert labels(served("dp"), there) == ["m, X, 2 cores", "m, Y, 64 cores"]


def test_rounds_and_seeds_of_one_kind_are_one_line() -> None:
    (line,) = figure_of([served("dp", seed=seed) for seed in (1, 2)]).lines
    assert (line.label, line.points[0].metrics["completed"]) == ("m", 40)


def simulated(profile: str = "llama-h100", seed: int = 0) -> BenchResult:
    config = {"profile": profile, "fleet": "prefill=1,decode=1", "workload": {"input_mean": 512.0, "output_mean": 64.0}}
    bare = Point(label="dp", program="dp", request_rate=1.0, metrics={"completed": 200, "mean_ttft_ms": 30.0})
    return BenchResult(source="sim", created="simulation", config=config, seed=seed, points=(bare,))


def test_simulated_and_real_runs_are_never_one_line() -> None:
    real = served("dp", target={"model": "smollm2"})
    assert labels(simulated(), replace(real, points=(point("dp"),))) == [
        "dp, simulated, llama-h100", "dp, real, smollm2",
    ]  # fmt: skip
    assert labels(simulated(), simulated("qwen")) == ["dp, llama-h100", "dp, qwen"]
    assert labels(simulated(), simulated(seed=1)) == ["dp, seed 0", "dp, seed 1"]
    figure = figure_of([simulated()])
    assert (figure.common["fleet"], figure.common["workload"]) == ("1P1D", "512 tokens in, 64 out")


def test_the_same_run_twice_is_refused() -> None:
    once = served("dp")
    with pytest.raises(BadRequest, match="the same run, which would count twice"):
        figure_of([once, once])


def test_the_table_lists_in_what_lines_differ() -> None:
    text = markdown([served("dp"), served("dp", config={"temperature": 1.0})])
    assert "- m, temperature 1.0: temperature 1.0" in text
    assert "- m, temperature unknown: temperature not given" in text
    assert "All lines: source real; model m" in text


@pytest.mark.parametrize(
    ("number", "told"),
    [(None, ""), (0, "0"), (0.012345, "0.0123"), (0.9999, "1.00"), (9.996, "10.0"), (12.345, "12.3"), (999.9, "1000"),
     (12345, "12300"), (-5.4321, "-5.43"), (float("inf"), "inf")],
)  # fmt: skip
def test_three_digits(number: float | None, told: str) -> None:
    assert three_digits(number) == told


def test_ratios_as_a_table() -> None:
    ratios = [
        Ratio(
            label="b", baseline="a", request_rate=1.0, concurrency=None, metric=metric, value=2.0, baseline_value=1.0,
            ratio=2.0, low=1.5, high=2.5, confidence=0.9, rounds=3,
        )
        for metric in ("mean TTFT", "p99 TTFT")
    ]  # fmt: skip
    text = ratio_table(ratios)
    assert "| b / a | 1 | 2.00 (1.50 to 2.50) | 2.00 (1.50 to 2.50) |" in text
    assert "90% bootstrap intervals over 3 rounds" in text


def test_a_point_as_text_tells_what_is_odd() -> None:
    measured = records(failed=2)
    late = tuple(replace(one, scheduled=one.sent - 0.5, wanted_tokens=6) for one in measured)
    text = point_text(point(records=late, client={"p99_loop_lag_ms": 80.0}, partial=True), summarize(late))
    for told in ("18 completed, 2 failed", "2 x http: HTTP 503: no room", "18 answers are shorter", "500 ms late",
                 "client was slow: the P99 of its event-loop lag is 80 ms", "interrupted"):  # fmt: skip
        assert told in text
    assert "shorter" not in point_text(point(), summarize(records()))


# Figures


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_figures_are_drawn(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"evaluation{suffix}"
    draw(figure_of(sweep()), file, "Two engines")
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(begins)


def texts_of(file: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_figure_has_its_panels_a_legend_units_and_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.svg"
    draw(figure_of(sweep()), file, "Two engines")
    texts = texts_of(file)
    for name in ("TTFT", "TPOT", "JCT"):
        assert {f"mean {name}", f"P90 {name}"} <= set(texts)
    assert texts.count("data_parallel") == texts.count("disaggregated") == 1
    assert texts.count("offered load, requests/s") == 2
    assert {"Two engines", "achieved rate", "goodput", "ms", "requests/s", "0.5", "2.0"} <= set(texts)
    footer = " ".join(texts)
    assert "n = 20 requests per point" in footer
    assert "P99 needs 100 requests per point" in footer
    assert "2026-01-01" in footer


def compared(rounds: int = 5, requests: int = 24) -> list[BenchResult]:
    """Three programs at three rates, with the intervals of their ratios to the first."""
    rates, slow = (1.0, 2.0, 4.0), {"data_parallel": 0.2, "disaggregated": 0.15, "balanced": 0.17}
    points = [
        point(label, rate, number, program=label, records=records(requests, ttft=ttft * rate))
        for rate in rates
        for number in range(rounds)
        for label, ttft in slow.items()
    ]
    about = {
        "model": "smollm2", "base_url": "http://a:1", "engines": [{"role": "prefill"}, {"role": "decode"}],
        "engine_versions": ["0.32.0"],
    }  # fmt: skip
    config = CompareConfig(program=tuple(slow), request_rate=rates, rounds=rounds, resamples=200)
    plain = {"workload": ["sonnet,input_len=512"], "arrival": "poisson"}
    return [result(*points, ratios=tuple(ratios_of(points, config)), target=about, config=plain)]


@pytest.mark.slow
def test_lines_of_a_single_load_stand_side_by_side_at_that_load(tmp_path: Path) -> None:
    file = tmp_path / "one.svg"
    draw(figure_of([result(point("a", 4.0), point("b", 4.0))]), file)
    numbers = [text for text in texts_of(file) if re.fullmatch(r"[34]\.\d+|4", text)]
    assert numbers.count("4") >= 2
    assert "3.996" not in numbers


@pytest.mark.slow
def test_the_figure_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed_chance: None) -> None:
    figure = figure_of(compared())
    assert [line.is_baseline for line in figure.lines] == [True, False, False]
    assert {"mean TTFT", "p99 E2EL"} <= figure.lines[1].points[0].ratios.keys()
    check_image("comparison.png", lambda file: draw(figure, file), tmp_path, monkeypatch)
    check_image("comparison-dark.png", lambda file: draw(figure, file, log=True), tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    figure = figure_of(sweep())
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        draw(figure, file)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_line_may_lack_a_metric(tmp_path: Path) -> None:
    bare = Point(label="all failed", request_rate=1.0, metrics={"completed": 0, "failed": 3})
    draw(figure_of([result(point(), bare)]), tmp_path / "x.png")
    assert "all failed" in markdown([result(point(), bare)])


@pytest.mark.slow
def test_figures_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"must end with one of \.png"):
        require_drawing(tmp_path / "x.gif", "--figure")
    with pytest.raises(BadRequest, match="No such file"):
        draw(figure_of(sweep()), tmp_path / "none" / "x.png")


def test_an_infinite_rate_is_drawn_at_its_number_of_requests() -> None:
    assert math.isfinite(figure_of([result(point(rate=None, concurrency=20))]).lines[0].points[0].x)


def test_prefix_tokens_are_in_the_report_where_picks_predicted_some() -> None:
    counts = {"predicted": 200, "delivered": 150, "missing": 50}
    measured = point(prefix=counts)
    assert "predicted 200 prefix tokens" in point_text(measured, summarize(measured.records))
    assert "- dp, 1 requests/s: picks predicted 200 prefix tokens" in markdown([result(measured)])
    assert "prefix tokens" not in markdown([result(point())])
