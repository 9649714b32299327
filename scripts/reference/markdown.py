"""Markdown as the pages of the reference are made of it: GitHub's, so that the files can be read there as well."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars in cells are escaped, line ends become spaces."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def cell(text: str) -> str:
    """One cell's text."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """As code, or nothing if there is none."""
    return f"`{text}`" if text else ""


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: roles of reStructuredText become code, and its paragraphs stay."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def first_sentence(docstring: str | None) -> str:
    """What a docstring begins with."""
    return prose(docstring).partition("\n\n")[0].replace("\n", " ")
