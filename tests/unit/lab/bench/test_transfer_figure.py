"""The picture of ``python -m benchmarks.transfer``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.transfer.cases import KIB, MIB, Table, cases
from benchmarks.transfer.measurement import rows
from benchmarks.transfer.transfer_figure import draw_transfer

from .golden_images import check_image

RATES = {
    "memcpy": 8.0, "socket x1": 2.0, "socket x4": 3.4, "chunks x2": 2.2, "host": 6.0, "tcp": 2.4, "nixl": 1.5,
    "nixl direct": 1.7,
}  # fmt: skip


def measured(rounds: int = 7) -> Table:
    table, chance = Table(order=[*RATES, "mooncake"]), random.Random(1)
    for case in cases([6 * KIB, 96 * KIB, 1024 * KIB], [1 * MIB, 64 * MIB]):
        for way, best in RATES.items():
            for _ in range(rounds):
                rate = best * case.chunk_bytes / (case.chunk_bytes + 20 * KIB) * chance.uniform(0.85, 1.1)
                table.add(way, case, case.moved_bytes / rate / 1e9)
        table.fail("mooncake", case, "not installed")
    return table


@pytest.mark.slow
def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = lambda file: draw_transfer(measured(), file, "A machine, 2026-01-01")  # noqa: E731
    check_image("transfer.png", draw, tmp_path, monkeypatch)


@pytest.mark.slow
def test_one_round_and_few_ways_are_drawn_too(tmp_path: Path) -> None:
    table = Table(order=["memcpy"])
    (case,) = cases([6 * KIB], [MIB])
    table.add("memcpy", case, 0.001)
    draw_transfer(table, tmp_path / "a.svg", "")
    assert "Medians of 1 rounds" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_the_table_has_units_in_its_head_and_three_figures() -> None:
    head, lines = rows(measured(1))
    assert head[:2] == ["chunk, KiB", "total, MiB"]
    assert lines[0][:2] == ["6", "1"]
    assert all(len(cell.replace(".", "").lstrip("0")) == 3 for cell in lines[0][2:-1])
    assert lines[0][-1] == "-"
