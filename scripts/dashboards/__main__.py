"""``python -m scripts.dashboards`` writes ``deploy/grafana``; with ``--check`` it names files that are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.dashboards.contents import dashboards
from scripts.dashboards.declared import PAGE, Declared
from scripts.dashboards.grafana import as_json
from scripts.generated_files import write_or_check

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"


def files() -> Mapping[str, str]:
    """Return the JSON of every dashboard, by file name."""
    made = dashboards(Declared(PAGE.read_text(encoding="utf-8")))
    return {f"{each.name}.json": json.dumps(as_json(each), indent=1) + "\n" for each in made}


def main() -> int:
    """Write or check the files. Return the exit code: 1 if ``--check`` found a file that is out of date."""
    return write_or_check("python -m scripts.dashboards", __doc__, FOLDER, "deploy/grafana", files(), "*.json")


if __name__ == "__main__":
    sys.exit(main())
