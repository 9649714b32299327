"""Metrics and variables that pages name are those that the reference lists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from scripts.reference.built import page as reference

from tests.sources import PACKAGES

from .pages import WRITTEN_BY_HAND

SERIES = ("_bucket", "_sum", "_count")
# Of the tests and the Makefile, and as an example of the rule.
OTHERS = re.compile(r"TERCET_(TEST|LONG|KEY)")


@cache
def listed(name: str, beginning: str) -> frozenset[str]:
    return frozenset(re.findall(rf"`({beginning}_\w+)`", reference(name)))


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=lambda page: page.stem)
def test_names_are_declared(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\btercet_[a-z_]+[a-z]\b(?!\.)", text)) - PACKAGES.keys():
        base = next((name.removesuffix(end) for end in SERIES if name.endswith(end)), name)
        assert base in listed("metrics.md", "tercet"), f"{page.name}: there is no metric {name}"
    for name in set(re.findall(r"\bTERCET_[A-Z_]+[A-Z]\b", text)):
        assert name in listed("environment.md", "TERCET") or OTHERS.match(name), (
            f"{page.name}: there is no variable {name}"
        )
