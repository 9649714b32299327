"""The manual in one file has every page once, and its index only pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.one_file_manual import LEFT_OUT, main, pages_of

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_each_page_is_in_it_once(tmp_path: Path) -> None:
    main(DOCS, tmp_path)
    names = re.findall(r"^<!-- ([\w/.-]+\.md) -->$", (tmp_path / "llms-full.txt").read_text(), re.M)
    every = {str(each.relative_to(DOCS)) for each in DOCS.rglob("*.md")}
    assert set(names) == {each for each in every if not each.startswith(LEFT_OUT)}
    assert len(names) == len(set(names))
    assert names[0] == "README.md"
    index = (tmp_path / "llms.txt").read_text()
    linked = re.findall(r"\(([\w/.-]+)\.html\)", index)
    assert len(linked) > 40
    assert all((DOCS / f"{page}.md").is_file() for page in linked)
    assert index.startswith("# Tercet\n\n> Tercet orchestrates")


def test_the_order_is_that_of_the_first_page() -> None:
    names = [each.name for each in pages_of(DOCS)]
    assert names.index("tutorial.md") < names.index("install.md") < names.index("router.md")
