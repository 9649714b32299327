"""The table of docs/models.md is what a run has shown, and nobody's own words."""

from __future__ import annotations

from tests.models.families import FAMILIES
from tests.models.features import FEATURE_FAMILIES
from tests.models.record import PAGE, Record, page, page_of_features, recorded, with_table


def test_the_table_is_made_of_what_was_run() -> None:
    text = PAGE.read_text()
    assert with_table(text, recorded()) == text, "python -m tests.models.record writes it"


def test_each_family_has_a_row_that_says_what_was_run() -> None:
    rows = page({}).splitlines()[2:]
    assert len(rows) == len(FAMILIES)
    assert all("not run" in row for row in rows)
    partly = Record("llama", "2026-01-02", "1", "CPU, some", ["disaggregated", "balanced"])
    (row,) = (row for row in page({"llama": partly}).splitlines() if row.startswith("| Llama |"))
    assert row == (
        "| Llama | all blocks |  | all but migration of context, live moves, failover after tokens: "
        "CPU, some, 2026-01-02 |"
    )


def test_each_family_with_features_has_a_row_too() -> None:
    rows = page_of_features({}).splitlines()[2:]
    assert len(rows) == len(FEATURE_FAMILIES)
    assert all(row.endswith("| not run |") for row in rows)
    partly = Record("idefics3", "2026-01-02", "1", "CPU, some", ["disaggregated", "balanced", "live moves"])
    row = page_of_features({"idefics3": partly}).splitlines()[2]
    assert row == ("| Idefics 3 | image | all but migration of context, failover after tokens: CPU, some, 2026-01-02 |")
