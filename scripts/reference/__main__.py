"""``python -m scripts.reference`` writes ``docs/reference``."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.reference.built import FOLDER
from scripts.reference.command_pages import commands_page
from scripts.reference.environment_page import environment_page
from scripts.reference.http_page import http_page
from scripts.reference.llm_d_page import llm_d_page
from scripts.reference.metrics_page import metrics_page
from scripts.reference.settings_pages import files_page, settings_page

NOTICE = "<!-- Written by `python -m scripts.reference` from the code's declarations. -->"


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


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
