"""What a run leaves behind: one JSON file that says what was measured, on what, and how to do it again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tercet.bench.records import RequestRecord
from tercet.protocol import BadRequest

FORMAT = 1


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: a program under one load.

    ``label`` names the line that it belongs to in a figure. ``request_rate`` is in requests per second, None in a
    closed loop or for a trace as it was recorded; ``concurrency`` is the number of users, or the cap on requests in
    flight. ``metrics`` are :meth:`~tercet.bench.summary.Summary.flat`. ``client`` tells how the measuring client fared:
    CPU seconds, and how late its event loop was. ``partial``: the run was interrupted during this point.
    """

    label: str
    program: str | None = None
    request_rate: float | None = None
    concurrency: int | None = None
    round: int = 0
    metrics: Mapping[str, float | int | None]
    errors: Mapping[str, int] = {}
    client: Mapping[str, float] = {}
    partial: bool = False
    records: tuple[RequestRecord, ...] = ()


class Ratio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statistic of one program over the baseline's, with the bounds of a bootstrap confidence interval."""

    label: str
    baseline: str
    request_rate: float | None
    concurrency: int | None
    metric: str
    value: float
    baseline_value: float
    ratio: float
    low: float
    high: float
    confidence: float
    rounds: int


class BenchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of ``tercet bench``. ``source`` tells real engines from simulated ones."""

    format: int = FORMAT
    source: Literal["bench", "sim"] = "bench"
    created: str
    command: tuple[str, ...] = ()
    config: Mapping[str, Any] = {}
    seed: int = 0
    versions: Mapping[str, str] = {}
    machine: Mapping[str, Any] = {}
    target: Mapping[str, Any] = {}
    partial: bool = False
    points: tuple[Point, ...] = ()
    ratios: tuple[Ratio, ...] = ()


def save_result(result: BenchResult, file: Path) -> None:
    """Write ``result`` as JSON; times are rounded to a microsecond. Raises :class:`~tercet.protocol.BadRequest`."""
    data = msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(result))), indent=1)
    # Arrays of numbers on one line: a record's token times are no reading matter.
    text = re.sub(rb"\[[\s\d.,eE+-]+\]", lambda found: re.sub(rb"\s+", b"", found[0]), data)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".part")
        temporary.write_bytes(text + b"\n")
        temporary.replace(file)
    except OSError as error:
        raise BadRequest(f"--result {file}: {error.strerror}", "result") from error


def load_result(file: Path) -> BenchResult:
    """Read a file; raises :class:`~tercet.protocol.BadRequest` that says what is wrong with it."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}", "file") from error
    try:
        result = msgspec.json.decode(data, type=BenchResult)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{file}: it is no result of tercet bench: {error}", "file") from error
    if result.format != FORMAT:
        raise BadRequest(f"{file}: its format is {result.format}, this version reads {FORMAT}", "file")
    return result


def load_results(files: Sequence[Path]) -> list[BenchResult]:
    """Read files in order."""
    return [load_result(file) for file in files]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
