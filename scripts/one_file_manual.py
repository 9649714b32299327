"""The manual for language models: ``llms.txt``, an index, and ``llms-full.txt``, all pages in one file.

The form is that of llmstxt.org. Pages come in the order of the manual's first page, then those that it does not name.

    python -m scripts.one_file_manual docs docs/_build/html
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_LINK = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w/.-]+\.md)\)[.:,]?\s*(?P<rest>.*)")
# Decisions explain the code's history, not its use.
LEFT_OUT = ("_build/", "adr/")


def pages_of(docs: Path) -> list[Path]:
    """Return all pages: the first one, those that it names in its order, and the others by name."""
    first = docs / "README.md"
    named = [docs / found["page"] for line in first.read_text().splitlines() if (found := _LINK.match(line))]
    found = [each for each in sorted(docs.rglob("*.md")) if not str(each.relative_to(docs)).startswith(LEFT_OUT)]
    return [*dict.fromkeys([first, *(each for each in named if each in found), *found])]


def index_of(docs: Path) -> Iterator[str]:
    """Yield the lines of ``llms.txt``: the title, the first paragraph as a quote, and the sections of links."""
    lines = (docs / "README.md").read_text().splitlines()
    paragraph = " ".join(lines[2 : lines.index("", 2)])
    yield from ("# Tercet", "", f"> {paragraph}", "")
    for line in lines:
        if line.startswith("## "):
            yield from ("", line, "")
        elif found := _LINK.match(line):
            page = found["page"].removesuffix(".md") + ".html"
            rest = found["rest"]
            yield f"- [{found['title']}]({page})" + (f": {rest}" if rest else "")


def whole_of(docs: Path) -> Iterator[str]:
    """Yield ``llms-full.txt``: each page below its path."""
    for page in pages_of(docs):
        yield f"<!-- {page.relative_to(docs)} -->\n\n{page.read_text().strip()}\n\n"


def main(docs: Path, into: Path) -> None:
    """Write both files into a folder."""
    (into / "llms.txt").write_text("\n".join(index_of(docs)) + "\n")
    (into / "llms-full.txt").write_text("".join(whole_of(docs)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
