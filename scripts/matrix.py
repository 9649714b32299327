"""What tests have verified: by vLLM, Python, device, KV transport and feature, with the day.

RECORD_VERIFIED=1 make test   each pytest adds the outcomes of its marked tests to build/verified
python -m scripts.matrix --record    put these into docs/verified.json, then write the table
python -m scripts.matrix             write the table in README.md, from docs/verified.json alone

A row is renewed by a run of at least as many tests as it has, or by any run with --fewer; a failed test removes it.
Rows with a ``source`` are written by hand: that page has their day.
"""

from __future__ import annotations

import argparse
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PENDING, PAGE = ROOT / "docs" / "verified.json", ROOT / "build" / "verified", ROOT / "README.md"
BEGIN, END = "<!-- verified -->\n", "<!-- /verified -->"
NO_VLLM, NO_TRANSPORT = "none", ""


class Place(msgspec.Struct, frozen=True, order=True):
    """On what tests ran. ``vllm`` is :data:`NO_VLLM` where no engine computes."""

    vllm: str
    python: str
    device: str
    transport: str = NO_TRANSPORT


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run of a test."""

    test: str
    feature: str
    place: Place
    day: str
    passed: bool


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A feature that all ``tests`` of a run have verified on the last ``day``."""

    feature: str
    place: Place
    day: str
    tests: int
    source: str = ""


def merged(rows: Iterable[Row], outcomes: Iterable[Outcome], *, fewer: bool = False) -> tuple[list[Row], list[str]]:
    """Return the rows after a run, and what was not renewed, with the reason; the last run of a test counts."""
    last = {(each.test, each.feature, each.place): each for each in outcomes}
    found: defaultdict[tuple[str, Place], list[Outcome]] = defaultdict(list)
    for each in last.values():
        found[each.feature, each.place].append(each)
    kept, notes = {(row.feature, row.place): row for row in rows}, list[str]()
    for key, ran in found.items():
        name = f"{key[0]} ({' '.join(filter(None, msgspec.structs.astuple(key[1])))})"
        failed = [each.test for each in ran if not each.passed]
        had = kept.get(key)
        if failed:
            kept.pop(key, None)
            notes.append(f"{name}: not verified: {', '.join(failed)}")
        elif had is not None and had.tests > len(ran) and not fewer:
            notes.append(f"{name}: kept: {len(ran)} tests ran, and {had.tests} on {had.day}; --fewer renews it")
        else:
            kept[key] = Row(*key, max(each.day for each in ran), len(ran))
    return sorted(kept.values(), key=lambda row: (row.place, row.feature)), notes


def table(rows: Iterable[Row]) -> str:
    """Return the table: a line for each place, with its features by day."""
    places: defaultdict[Place, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        places[row.place][row.day].append(row.feature)
    return "\n".join(["| vLLM | Python | device | KV transport | verified |", "| --- | --- | --- | --- | --- |"]
                     + [_line(place, days) for place, days in sorted(places.items())])  # fmt: skip


def _line(place: Place, days: dict[str, list[str]]) -> str:
    shown = "; ".join(f"{', '.join(sorted(features))} ({day})" for day, features in sorted(days.items()))
    return f"| {place.vllm} | {place.python} | {place.device} | {place.transport} | {shown} |"


def with_table(text: str, rows: Iterable[Row]) -> str:
    """Return a page with the table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no {BEGIN.strip()} before {END}")
    return f"{before}{begin}{table(rows)}\n{end}{after}"


def recorded() -> list[Row]:
    """Return the rows of the repository."""
    return msgspec.json.decode(RECORDS.read_bytes(), type=list[Row])


def pending() -> Iterator[Outcome]:
    """Yield what marked tests have recorded since the last merge, the oldest run first."""
    for file in sorted(PENDING.glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns):
        for line in file.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=Outcome)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, with ``--record`` after the outcomes of tests."""
    parser = argparse.ArgumentParser(prog="python -m scripts.matrix", description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="add the outcomes in build/verified")
    parser.add_argument("--fewer", action="store_true", help="also where fewer tests ran than before")
    given = parser.parse_args(arguments)
    rows = recorded()
    if given.record:
        rows, notes = merged(rows, pending(), fewer=given.fewer)
        print("\n".join(notes) or "all that ran was verified")
        RECORDS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
        shutil.rmtree(PENDING, ignore_errors=True)
    PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
