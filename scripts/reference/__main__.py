"""``python -m scripts.reference`` writes ``docs/reference``; with ``--check`` it names files that are out of date."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.generated_files import write_or_check
from scripts.reference.command_pages import commands_page
from scripts.reference.environment_page import environment_page
from scripts.reference.http_page import http_page
from scripts.reference.llm_d_page import llm_d_page
from scripts.reference.metrics_page import metrics_page
from scripts.reference.settings_pages import files_page, settings_page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
NOTICE = "<!-- Written by `python -m scripts.reference` from the code's declarations. Do not edit. -->"


def pages() -> Mapping[str, str]:
    """Return every page, by file name."""
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


def main() -> int:
    """Write or check the pages. Return the exit code: 1 if ``--check`` found a file that is out of date."""
    return write_or_check("python -m scripts.reference", __doc__, FOLDER, "docs/reference", pages())


if __name__ == "__main__":
    sys.exit(main())
