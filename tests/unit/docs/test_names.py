"""Metrics and variables that pages name are those that the reference lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sources import PACKAGES

from .pages import DOCS, WRITTEN_BY_HAND

METRICS = set(re.findall(r"`(tercet_\w+)`", (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")))
VARIABLES = set(re.findall(r"`(TERCET_\w+)`", (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")))
SERIES = ("_bucket", "_sum", "_count")
# Of the tests and the Makefile, and as an example of the rule.
OTHERS = re.compile(r"TERCET_(TEST|LONG|KEY)")


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=lambda page: page.stem)
def test_names_are_declared(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\btercet_[a-z_]+[a-z]\b(?!\.)", text)) - PACKAGES.keys():
        base = next((name.removesuffix(end) for end in SERIES if name.endswith(end)), name)
        assert base in METRICS, f"{page.name}: there is no metric {name}"
    for name in set(re.findall(r"\bTERCET_[A-Z_]+[A-Z]\b", text)):
        assert name in VARIABLES or OTHERS.match(name), f"{page.name}: there is no variable {name}"
