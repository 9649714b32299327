"""Dashboards are what their script makes of the metrics, and they and the rules query only what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from scripts.dashboards import __main__ as dashboards
from scripts.dashboards.declared import Declared, Metric
from scripts.reference.built import page

from .pages import DOCS
from .promql import labels_by, wrong_in

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
WANTED = {"fleet", "engine", "programs", "moves", "endpoint-picker", "kv-hits"}
BOARDS = sorted(dashboards.FOLDER.glob("*.json"))


def read(board: Path) -> dict[str, Any]:
    return json.loads(board.read_text(encoding="utf-8"))


def panels(board: Path) -> list[dict[str, Any]]:
    return [panel for panel in read(board)["panels"] if panel["type"] != "row"]


@cache
def rules() -> tuple[dict[str, Any], ...]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return tuple(rule for group in groups for rule in group["rules"])


def recorded() -> dict[str, set[str]]:
    return {rule["record"]: labels_by(rule["expr"]) for rule in rules() if "record" in rule}


def test_they_are_what_the_script_makes() -> None:
    assert {board.stem for board in BOARDS} == WANTED
    assert dashboards.stale(dashboards.files()) == [], "run python -m scripts.dashboards"


def test_a_file_that_was_edited_or_is_too_many_is_found() -> None:
    made = dict(dashboards.files())
    assert dashboards.stale({**made, "fleet.json": "{}"}) == ["fleet.json"]
    assert dashboards.stale({name: text for name, text in made.items() if name != "moves.json"}) == ["moves.json"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_every_query_names_metrics_and_labels_that_exist(board: Path) -> None:
    queries = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    assert len(queries) > 5
    assert {query: found for query in queries if (found := wrong_in(query))} == {}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_variables_are_declared_and_used(board: Path) -> None:
    listed = {each["name"]: each["query"] for each in read(board)["templating"]["list"]}
    queries = " ".join(target["expr"] for panel in panels(board) for target in panel["targets"])
    asked = set(re.findall(r"\$(\w+)", queries.replace("$__rate_interval", "")))
    assert asked == listed.keys() - {"datasource"}
    for name in asked:
        metric, label = re.findall(r"label_values\((\w+), (\w+)\)", listed[name]["query"])[0]
        assert wrong_in(f'{metric}{{{label}="x"}}') == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_panels_have_a_place_a_meaning_and_a_unit(board: Path) -> None:
    found = read(board)
    assert found["uid"] == f"tercet-{board.stem}"
    assert max(Counter(panel["id"] for panel in found["panels"]).values()) == 1
    cells = Counter(
        (x, y)
        for panel in found["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    )
    assert max(cells.values()) == 1, "two panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in panels(board):
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        if len(panel["targets"]) > 1:
            assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda of: of.rate("tercet_nothing_total"), "is not a metric"),
        (lambda of: of.rate("tercet_engine_up"), "is a gauge, not a counter"),
        (lambda of: of.now("tercet_engine_up", "program"), "has no label program"),
        (lambda of: of.quantile(0.5, "tercet_ttft_seconds", engine='="a"'), "has no label engine"),
        (lambda of: of.values_of("program", "tercet_engine_up"), "has no label program"),
        (lambda of: of.values_of("program", "tercet_nothing"), "is not a metric"),
    ],
)
def test_no_query_is_made_of_what_does_not_exist(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make(Declared(page("metrics.md")))


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum by (program) (rate(tercet_nothing_total[5m]))", "tercet_nothing_total is no metric"),
        ('tercet_engine_up{program="x"}', "tercet_engine_up has no label program"),
        ("sum by (program) (tercet_engine_up)", "no metric has the label program"),
        ("tercet_ttft_seconds", "tercet_ttft_seconds is no metric"),
        ("tercet_engine_up and on (code) tercet_engine_up", "no metric has the label code"),
        ("1 + 1", "names no metric"),
    ],
)
def test_what_does_not_exist_is_found_in_a_query(query: str, wrong: str) -> None:
    assert wrong in wrong_in(query)


# ---- rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    assert wrong_in(rule["expr"], recorded()) == []


@pytest.mark.parametrize("rule", [each for each in rules() if "alert" in each], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert used <= labels_by(rule["expr"]) | {"instance", "job"} | recorded().get(rule["expr"].split()[0], set())


def test_every_rule_has_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules-test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {each["alertname"] for test in tests for each in test.get("alert_rule_test", ()) if each["exp_alerts"]}
    shown = {each["expr"].partition("{")[0] for test in tests for each in test.get("promql_expr_test", ())}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    assert shown == {rule["record"] for rule in rules() if "record" in rule}


def exposed(metric: Metric) -> str:
    """One series of a metric, as a scrape has it."""
    labels = ",".join(f'{label}="x"' for label in sorted(metric.labels))
    about = f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n"
    if metric.kind not in ("histogram", "summary"):
        return f"{about}{metric.name}{{{labels}}} 1\n"
    ends = (("_bucket", 'le="+Inf"'), ("_sum", ""), ("_count", ""))[metric.kind == "summary" :]
    return about + "".join(f"{metric.name}{end}{{{','.join(filter(None, (labels, le)))}}} 1\n" for end, le in ends)


def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    """Those of other projects, such as a picker's `llm_d_*`, have their names from there."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    metrics = Declared(page("metrics.md")).metrics.values()
    text = "".join(exposed(metric) for metric in metrics if metric.name.startswith("tercet_"))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = text.replace("tercet_queue_seconds", "tercet_queue_milliseconds")
    done = subprocess.run(["promtool", "check", "metrics"], input=wrong, capture_output=True, text=True, check=False)
    assert "tercet_queue_milliseconds" in done.stderr


@pytest.mark.parametrize("command", [["check", "rules", "rules.yaml"], ["test", "rules", "rules-test.yaml"]])
def test_promtool_agrees(command: list[str]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Queries for Prometheus in the manual are PromQL, with labels that their metrics have.

PAGE = (DOCS / "howto" / "prometheus.md").read_text(encoding="utf-8")


def queries() -> Iterator[tuple[str, str]]:
    for panel, cell in re.findall(r"^\| ([^|`]+) \| (`.*`) \|$", PAGE, re.MULTILINE):
        yield from ((panel, query) for query in re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize(("name", "query"), [*queries()])
def test_a_query_is_one_and_its_labels_are_there(name: str, query: str) -> None:
    assert wrong_in(query) == [], name


def test_there_are_some() -> None:
    assert len(list(queries())) > 5


@pytest.mark.parametrize("wrong", ["sum(rate(tercet_errors_total[5m])", "rate(tercet_errors_total)", "a ==> b"])
def test_what_is_no_query_is_found(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse(wrong)
