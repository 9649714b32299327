"""``python -m scripts.reference`` writes ``docs/reference``; with ``--check`` it says what is not as it would be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.reference.command_pages import commands_page
from scripts.reference.environment_page import environment_page
from scripts.reference.http_page import http_page
from scripts.reference.llm_d_page import llm_d_page
from scripts.reference.metrics_page import metrics_page
from scripts.reference.settings_pages import files_page, settings_page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
NOTICE = "<!-- Written by `python -m scripts.reference` from the code's declarations. Do not edit. -->"


def pages() -> Mapping[str, str]:
    """Every page by its file's name."""
    made = {
        "commands.md": commands_page(),
        "settings.md": settings_page(),
        "files.md": files_page(),
        "environment.md": environment_page(),
        "http.md": http_page(),
        "metrics.md": metrics_page(),
        "llm-d.md": llm_d_page(),
    }
    return {name: f"{NOTICE}\n\n{text.strip()}\n" for name, text in made.items()}


def stale(found: Mapping[str, str]) -> list[str]:
    """Names of files that are not what they should be, missing and superfluous ones included."""
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    return sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))


def main() -> int:
    """Exit code: with ``--check`` 1 if a page is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check: bool = parser.parse_args().check
    found = pages()
    if check:
        wrong = stale(found)
        if wrong:
            print(f"docs/reference: {', '.join(wrong)} out of date; run python -m scripts.reference", file=sys.stderr)
        return bool(wrong)
    FOLDER.mkdir(exist_ok=True)
    for name in stale(found):
        file = FOLDER / name
        if name in found:
            file.write_text(found[name], encoding="utf-8")
        else:
            file.unlink()
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
