"""``python -m scripts.dashboards`` writes ``deploy/grafana``; with ``--check`` it says what is not as it would be."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.dashboards.contents import dashboards
from scripts.dashboards.declared import PAGE, Declared
from scripts.dashboards.grafana import as_json

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"


def files() -> Mapping[str, str]:
    """Every dashboard's JSON by its file's name."""
    made = dashboards(Declared(PAGE.read_text(encoding="utf-8")))
    return {f"{each.name}.json": json.dumps(as_json(each), indent=1) + "\n" for each in made}


def stale(found: Mapping[str, str]) -> list[str]:
    """Names of files that are not what they should be, missing and superfluous ones included."""
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))


def main() -> int:
    """Exit code: with ``--check`` 1 if a dashboard is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    check: bool = parser.parse_args().check
    found = files()
    wrong = stale(found)
    if check:
        if wrong:
            print(f"deploy/grafana: {', '.join(wrong)} out of date; run python -m scripts.dashboards", file=sys.stderr)
        return bool(wrong)
    FOLDER.mkdir(exist_ok=True)
    for name in wrong:
        if name in found:
            (FOLDER / name).write_text(found[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(f"deploy/grafana/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
