"""``python -m scripts.dashboards`` writes ``deploy/grafana``; with ``--check`` it names files that are out of date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.dashboards.contents import dashboards
from scripts.dashboards.declared import Declared
from scripts.dashboards.grafana import as_json
from scripts.reference.built import page

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"


def files() -> Mapping[str, str]:
    """Return the JSON of every dashboard, by file name."""
    made = dashboards(Declared(page("metrics.md")))
    return {f"{each.name}.json": json.dumps(as_json(each), indent=1) + "\n" for each in made}


def stale(found: Mapping[str, str]) -> list[str]:
    """Return the names of files that are out of date, missing, or no longer generated."""
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))


def main() -> int:
    """Write or check the files. Return the exit code: 1 if ``--check`` found a file that is out of date."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    check: bool = parser.parse_args().check
    found = files()
    wrong = stale(found)
    if check:
        if wrong:
            print(f"deploy/grafana: {', '.join(wrong)} out of date; run python -m scripts.dashboards", file=sys.stderr)
        return bool(wrong)
    for name in wrong:
        if name in found:
            (FOLDER / name).write_text(found[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(f"deploy/grafana/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
