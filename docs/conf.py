"""Settings of Sphinx for ``make docs`` and ``make test``. The sources are Markdown as GitHub shows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "Tercet"
html_title = "Tercet"
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # links to headings as GitHub makes them
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]


def setup(app: Sphinx) -> None:
    """Sphinx's hook. The pages of the reference are built before Sphinx looks for pages."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from scripts.reference.built import built

    built()
    app.connect("source-read", _with_contents)


def _with_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Make the table of contents: each heading of a README is a part of it, of the pages that are linked there."""
    if page.rpartition("/")[2] == "README":
        source[0] += "".join(_contents(part) for part in source[0].split("\n## ")[1:])


def _contents(part: str) -> str:
    title, _, text = part.partition("\n")
    pages = dict.fromkeys(re.findall(r"\]\(([\w/.-]+\.md)\)", text))
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n" if pages else ""
