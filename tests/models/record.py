"""What a run of the matrix has shown, and docs/models.md made of it: `python -m tests.models.record`.

Each family's outcome is a file of its own, so that a matrix may be run family by family.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tercet.vllm_plugin.hooks import vllm_version

from .families import FAMILIES

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "build" / "models"
PAGE = ROOT / "docs" / "models.md"
RUNS = ("disaggregated", "balanced", "migration of context", "live moves", "failover after tokens")


class Record(msgspec.Struct):
    """One family's outcome. ``sent`` is the share of the prompt's KV that a receiver was sent, for 500 tokens."""

    family: str
    day: str
    vllm: str
    machine: str
    runs: list[str] = []
    sent: float = 1.0
    refused: bool = False

    def ran(self, what: str) -> None:
        """It gave the tokens of one engine alone."""
        self.runs.append(what)


@contextmanager
def noted(family: str) -> Generator[Record]:
    """The outcome of what is done with a family while entered; without an error it is written down."""
    record = Record(
        family, f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", vllm_version(), f"CPU, {platform.machine()}"
    )
    path = OUTCOMES / f"{family}.json"
    path.unlink(missing_ok=True)
    yield record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(record))


def page(records: dict[str, Record]) -> str:
    """The table of docs/models.md."""
    rows = ["| family | what is sent | share of 500 tokens' KV | run |", "| --- | --- | ---: | --- |"]
    for name, family in FAMILIES.items():
        found = records.get(name)
        if family.refusal:
            how = f"refused at start on a CPU: {_where(found)}; mapping tested on vLLM's cache specs"
            rows.append(f"| {family.title} | {family.kv} | | {how} |")
        elif family.not_on_cpu:
            how = f"not run on a CPU ({family.not_on_cpu}); mapping tested on vLLM's cache specs"
            rows.append(f"| {family.title} | {family.kv} | | {how} |")
        elif found is None:
            rows.append(f"| {family.title} | {family.kv} | | not run |")
        else:
            missing = [run for run in RUNS if run not in found.runs]
            what = "all five" if not missing else "all but " + ", ".join(missing)
            share = f"{found.sent:.2f}" if "migration of context" in found.runs else ""
            rows.append(f"| {family.title} | {family.kv} | {share} | {what}: {_where(found)} |")
    return "\n".join(rows)


def _where(found: Record | None) -> str:
    return "not run" if found is None else f"{found.machine}, {found.day}"


def main() -> None:
    """Write the table between the page's two marks."""
    records = {path.stem: msgspec.json.decode(path.read_bytes(), type=Record) for path in OUTCOMES.glob("*.json")}
    before, mark, rest = PAGE.read_text().partition("<!-- matrix -->\n")
    _, end, after = rest.partition("<!-- /matrix -->")
    PAGE.write_text(f"{before}{mark}{page(records)}\n{end}{after}")


if __name__ == "__main__":
    main()
