"""The Markdown of the reference pages. It is GitHub's, so that the files can also be read on GitHub."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Bars in cells are escaped, and line ends become spaces."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def cell(text: str) -> str:
    """Return the text of a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return ``text`` as code; an empty text stays empty."""
    return f"`{text}`" if text else ""


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown. Roles of reStructuredText become code; paragraphs stay."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def first_sentence(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return prose(docstring).partition("\n\n")[0].replace("\n", " ")
