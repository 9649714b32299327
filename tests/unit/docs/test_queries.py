"""Queries and rules for Prometheus in the manual are PromQL, with labels that their metrics have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser
import pytest
import yaml

from .pages import DOCS, blocks

PAGE = (DOCS / "howto" / "prometheus.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
LABELS = {
    name: {label for label in re.split(r",\s*", labels.strip()) if label}
    for name, labels in re.findall(r"^\| `(tercet_\w+)` \| \w+ \| ([^|]*) \|", REFERENCE, re.MULTILINE)
}


def rules() -> Iterator[tuple[str, str]]:
    for block in blocks("yaml"):
        found = yaml.safe_load(block.code)
        for group in found.get("groups", ()) if isinstance(found, dict) else ():
            yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"])


def queries() -> Iterator[tuple[str, str]]:
    for panel, cell in re.findall(r"^\| ([^|`]+) \| (`.*`) \|$", PAGE, re.MULTILINE):
        yield from ((panel, query) for query in re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize(("name", "query"), [*rules(), *queries()])
def test_a_query_is_one_and_its_labels_are_there(name: str, query: str) -> None:
    promql_parser.parse(query)
    metrics = [re.sub(r"_(bucket|sum|count)$", "", each) for each in re.findall(r"\btercet_\w+", query)]
    assert metrics, name
    known = {"le"}.union(*(LABELS[metric] for metric in metrics))
    asked = [label for listed in re.findall(r"\bby \(([^)]*)\)", query) for label in re.split(r",\s*", listed)]
    asked += re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", query)
    assert known.issuperset(asked), f"{name}: {metrics} have the labels {sorted(known)}"


def test_there_are_some() -> None:
    assert len(list(rules())) > 3
    assert len(list(queries())) > 5


@pytest.mark.parametrize("wrong", ["sum(rate(tercet_errors_total[5m])", "rate(tercet_errors_total)", "a ==> b"])
def test_what_is_no_query_is_found(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse(wrong)
