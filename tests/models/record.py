"""What a run of the matrix has shown, and docs/models.md made of it: `python -m tests.models.record`.

Each family's last outcome is a file of its own in build/, so that a matrix may be run family by family. Those are put
into ``outcomes.json``, which is in the repository, and the table is made of that alone.
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
from .features import FEATURE_FAMILIES

ROOT = Path(__file__).parents[2]
LAST = ROOT / "build" / "models"
OUTCOMES = Path(__file__).parent / "outcomes.json"
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
    path = LAST / f"{family}.json"
    path.unlink(missing_ok=True)
    yield record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(record))


def page(records: dict[str, Record]) -> str:
    """The table of families in docs/models.md."""
    rows = ["| family | what is sent | share of 500 tokens' KV | run |", "| --- | --- | ---: | --- |"]
    for name, family in FAMILIES.items():
        found = records.get(name)
        if family.refusal:
            how = f"refused at start ({family.refusal}): {_where(found)}; mapping tested on vLLM's cache specs"
            rows.append(f"| {family.title} | {family.kv} | | {how} |")
        elif family.not_on_cpu:
            how = f"not run on a CPU ({family.not_on_cpu}); mapping tested on vLLM's cache specs"
            rows.append(f"| {family.title} | {family.kv} | | {how} |")
        elif found is None:
            rows.append(f"| {family.title} | {family.kv} | | not run |")
        else:
            share = f"{found.sent:.2f}" if "migration of context" in found.runs else ""
            rows.append(f"| {family.title} | {family.kv} | {share} | {_shown(found)}: {_where(found)} |")
    return "\n".join(rows)


def page_of_features(records: dict[str, Record]) -> str:
    """The table of families with images, sound or video in docs/models.md."""
    rows = ["| family | features | run |", "| --- | --- | --- |"]
    for name, family in FEATURE_FAMILIES.items():
        found = records.get(name)
        how = "not run" if found is None else f"{_shown(found)}: {_where(found)}"
        rows.append(f"| {family.title} | {', '.join(filter(None, (family.modality, family.notes)))} | {how} |")
    return "\n".join(rows)


def _shown(found: Record) -> str:
    missing = [run for run in RUNS if run not in found.runs]
    return "all five" if not missing else "all but " + ", ".join(missing)


def _where(found: Record | None) -> str:
    return "not run" if found is None else f"{found.machine}, {found.day}"


def recorded() -> dict[str, Record]:
    """What is known of each family."""
    return msgspec.json.decode(OUTCOMES.read_bytes(), type=dict[str, Record])


def with_table(text: str, records: dict[str, Record]) -> str:
    """The page with its tables between their marks."""
    for name, table in (("matrix", page(records)), ("features", page_of_features(records))):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}{mark}{table}\n{end}{after}"
    return text


def main() -> None:
    """Add the last outcomes to those that are known, and write the table."""
    last = {path.stem: msgspec.json.decode(path.read_bytes(), type=Record) for path in LAST.glob("*.json")}
    known = {*FAMILIES, *FEATURE_FAMILIES}
    records = {name: each for name, each in sorted({**recorded(), **last}.items()) if name in known}
    OUTCOMES.write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")
    PAGE.write_text(with_table(PAGE.read_text(), records))


if __name__ == "__main__":
    main()
