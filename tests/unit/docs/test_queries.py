"""Queries for Prometheus in the manual are PromQL, with labels that their metrics have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser
import pytest

from .pages import DOCS
from .promql import wrong_in

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
