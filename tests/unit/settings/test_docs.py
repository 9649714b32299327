"""The tables of settings in docs: ``python -m tests.unit.settings.test_docs`` writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tercet.cluster.up_config import UpConfig
from tercet.settings import Declared, FrontDoorConfig, PickerConfig, ReschedulerConfig, RouterConfig, Settings, declared

HEADER = "| flag | key | variable | default | |\n| --- | --- | --- | --- | --- |"


def settings_table(kind: type[Settings], but: Sequence[type[Settings]] = ()) -> str:
    """A Markdown table of the settings of ``kind`` that none of the others has."""
    elsewhere = {each.key for other in but for each in declared(other)}
    return "\n".join([HEADER, *(row(each) for each in declared(kind) if each.key not in elsewhere)])


def row(of: Declared) -> str:
    default = of.shown_default or ("needed" if of.is_required else "")
    cells = (
        f"`{of.flag} {of.shown_kind}`".replace(" `", "`") if of.flag else "",
        f"`{of.key}`",
        f"`{of.env}`",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {default} | {of.help} |"


DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"tercet epp": DOCS / "gateway.md"}
OPERATIONS = DOCS / "operations.md"
TABLES = {
    "tercet epp": settings_table(PickerConfig),
    "every front door": settings_table(FrontDoorConfig),
    "tercet up": settings_table(UpConfig, but=[FrontDoorConfig]),
    "tercet router": settings_table(RouterConfig, but=[FrontDoorConfig]),
    "tercet rescheduler": settings_table(ReschedulerConfig, but=[RouterConfig]),
}


def written(text: str) -> str:
    """The page with its tables as they are declared."""
    for name, table in TABLES.items():
        place = rf"(<!-- settings of {name} -->\n).*?(<!-- end -->)"
        text = re.sub(place, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_the_declarations(name: str) -> None:
    page = PAGES.get(name, OPERATIONS).read_text(encoding="utf-8")
    assert f"<!-- settings of {name} -->\n{TABLES[name]}\n<!-- end -->" in page


if __name__ == "__main__":
    for page in {OPERATIONS, *PAGES.values()}:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
