"""The manual's pages and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
BUILT = {"_build", "reference"}
WRITTEN_BY_HAND = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if not BUILT & {*path.parts})]
_FENCE = re.compile(r"^( *)```([\w-]*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Fenced code: the page and line where it begins, its language, and the code."""

    place: str
    language: str
    code: str


def blocks(*languages: str) -> list[Block]:
    """Those of some languages, in all pages."""
    return [each for path in WRITTEN_BY_HAND for each in _blocks_of(path) if each.language in languages]


def _blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    return [Block(f"{name}:{text.count(chr(10), 0, at.start()) + 1}", at[2], at[3]) for at in _FENCE.finditer(text)]


def place(block: Block) -> str:
    """Its name as a test's parameter."""
    return block.place
