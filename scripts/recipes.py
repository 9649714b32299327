"""Write the simulated figures of the recipes: the row below each ``tercet sim`` in ``docs/recipes``.

python -m scripts.recipes
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
_FIGURES = re.compile(
    r"(?P<before>```bash\n(?P<command>tercet sim .*?)\n```\n\n\| requests/s .*?\n\|[ :|-]+\|\n)(?P<row>\|.*?\|)\n", re.S
)


def row_of(command: str) -> str:
    """Run a simulation, and return its row."""
    words = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-m", "tercet.cli", *words[1:], "--result-filename", "-"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(done.stdout[done.stdout.index("{") :])["points"][0]["metrics"]
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
    values = [found["request_throughput"], *(found[name] for name in names), found["mean_e2el_ms"] / 1e3]
    return "| " + " | ".join(f"{value:.3g}" for value in values) + " |"


def written(page: str) -> str:
    """Return a page with the figures of today."""
    return _FIGURES.sub(lambda found: f"{found['before']}{row_of(found['command'])}\n", page)


def main() -> None:
    """Write all recipes."""
    for path in sorted(RECIPES.glob("*.md")):
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
