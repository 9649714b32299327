"""The tables of settings in docs/operations.md: ``python -m tests.unit.settings.test_docs`` writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tercet.cluster.up_config import UpConfig
from tercet.settings import FrontDoorConfig, RouterConfig
from tercet.settings.declaration import settings_table

DOCS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
TABLES = {
    "every front door": settings_table(FrontDoorConfig),
    "tercet up": settings_table(UpConfig, but=[FrontDoorConfig]),
    "tercet router": settings_table(RouterConfig, but=[FrontDoorConfig]),
}


def written(text: str) -> str:
    """The page with its tables as they are declared."""
    for name, table in TABLES.items():
        place = rf"(<!-- settings of {name} -->\n).*?(<!-- end -->)"
        text = re.sub(place, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_the_declarations(name: str) -> None:
    assert f"<!-- settings of {name} -->\n{TABLES[name]}\n<!-- end -->" in DOCS.read_text(encoding="utf-8")


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
