"""Files of runs: those of ``run.save``, of ``tercet bench`` and ``tercet sim``, and of other load generators.

The per-request files of ``vllm bench serve --save-result --save-detailed`` (vLLM 0.32), of guidellm 0.5 and later
(``benchmarks.json``) and of aiperf (``profile_export.jsonl``) give the same table of requests. Times are shifted so
that the first request was sent at second 0, except in files of Tercet, which keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import msgspec

from tercet import __version__
from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_lab.bench.results import BenchResult, Point
from tercet_lab.bench.simulated.experiment import Run
from tercet_lab.bench.simulated.grid import Grid
from tercet_lab.bench.simulated.simulation import SimulatedPoint
from tercet_lab.bench.simulated.sweep import grid_from
from tercet_lab.slo import Slo
from tercet_lab.tables import MOST_READ, REQUEST_COLUMNS, Kind, Requests, Table

KIND = "tercet.lab run"
FORMAT = 1
NS = 1e-9
RECORD_COLUMNS: Mapping[str, Kind] = {
    "label": "text", "rate": "time", "concurrency": "maybe", "round": "count", "seed": "count", **REQUEST_COLUMNS,
}  # fmt: skip
Rows = list[dict[str, Any]]


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file of :func:`save`."""

    kind: str = KIND
    format: int = FORMAT
    version: str = __version__
    about: Mapping[str, Any]
    slo: Slo | None
    engine_hours: float | None
    requests: Mapping[str, list[Any]]
    engines: Mapping[str, list[Any]]
    moves: Mapping[str, list[Any]]
    plans: Mapping[str, list[Any]]
    point: SimulatedPoint | None = None


def save(run: Run, path: str | Path) -> None:
    """Write a run into a JSON file, with all its tables, for :func:`load`."""
    file = Path(path).expanduser()
    if file.suffix != ".json":
        raise BadRequest(f"path: {path} must end with .json; run.requests.write() writes CSV and Parquet", "path")
    hours = None if math.isnan(run.engine_hours) else run.engine_hours
    tables = {name: getattr(run, name).plain() for name in ("requests", "engines", "moves", "plans")}
    point = None if run.point is None else msgspec.structs.replace(run.point, timeline=())
    saved = SavedRun(about=run.about, slo=run.slo, engine_hours=hours, point=point, **tables)
    file.write_bytes(msgspec.json.encode(saved))


def load(path: str | Path, *, point: int | None = None, slo: Slo | None = None) -> Run | Grid:
    """Return the run of a file: a ``.csv`` or ``.parquet`` table of requests, or one of this module's formats.

    The file of a sweep (``grid.save``, or ``tercet sim --over``) gives its grid. ``point`` is the index of a run in a
    file that has several. ``slo`` replaces the limits of the file, if it has any. Raise
    :class:`~tercet.protocol.BadRequest` for a file without requests.
    """
    file = Path(path).expanduser()
    if file.suffix in (".csv", ".parquet"):
        found = Run(requests=Requests.read(file))
        return found if slo is None else found.under(slo)
    try:
        data = read_named(file, MOST_READ)
    except OSError as error:
        raise BadRequest(f"path: {path} cannot be read: {error.strerror}", "path") from error
    try:
        found = _loaded(data, point)
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise BadRequest(f"path: {path} is not a file of requests that is known: {error}", "path") from error
    except BadRequest as error:
        raise BadRequest(f"path: {path}: {error.message}", "path") from error
    if isinstance(found, Grid):
        if point is not None or slo is not None:
            raise BadRequest(f"path: {path} is a sweep, without requests; leave out point and slo", "path")
        return found
    return found if slo is None else found.under(slo)


def _loaded(data: bytes, point: int | None) -> Run | Grid:
    lines = data.split(b"\n", 1)
    if len(lines) > 1 and lines[0].rstrip().endswith(b"}"):  # a line is a whole object
        records = [msgspec.json.decode(line, type=dict[str, Any]) for line in data.splitlines() if line.strip()]
        return Run(requests=_requests(_of_aiperf(records)))
    found = msgspec.json.decode(data, type=dict[str, Any])
    if found.get("kind") == KIND:
        return _saved(msgspec.json.decode(data, type=SavedRun))
    if "points" in found and "sweep" in (found.get("config") or {}):
        return grid_from(found["config"])
    if "points" in found:
        measured = _one(msgspec.json.decode(data, type=BenchResult).points, point)
        if not measured.records:
            raise BadRequest("has results without requests; write them with --records FILE", "path")
        return Run(requests=Requests.of_rows(measured.records), about=dict(measured.metrics))
    if "metadata" in found and "metrics" in found:
        return Run(requests=_requests(_of_aiperf([found])))
    if "benchmarks" in found:
        return Run(requests=_requests(_of_guidellm(_one(found["benchmarks"], point))))
    if "input_lens" in found:
        return Run(requests=_requests(_of_vllm(found)))
    raise BadRequest("its keys are not those of a file of requests; see lab.load for the formats", "path")


def _saved(found: SavedRun) -> Run:
    if found.format != FORMAT:
        raise BadRequest(f"has format {found.format}, and this version reads format {FORMAT}", "path")
    requests = Requests.of_plain(found.requests)
    hours = math.nan if found.engine_hours is None else found.engine_hours
    run = Run(requests=requests, slo=found.slo, engine_hours=hours, about=dict(found.about), point=found.point)
    for name in ("engines", "moves", "plans"):
        table: Table = getattr(run, name)
        for column, kind in table.columns.items():
            nan = kind in ("time", "maybe")
            table.fill(column, [math.nan if nan and each is None else each for each in getattr(found, name)[column]])
    return run


def _one(found: Sequence[Any], point: int | None) -> Any:
    """Return the chosen run of a file that may have several: points of Tercet, or benchmarks of guidellm."""
    if point is None and len(found) == 1:
        return found[0]
    if point is not None and 0 <= point < len(found):
        return found[point]
    names = list[str]()
    for index, each in enumerate(found):
        if isinstance(each, Point):
            load = each.concurrency if each.request_rate is None else f"{each.request_rate:g}/s"
            names.append(f"{index}: {each.label} at {load}, round {each.round}")
        else:
            kind = _at(each, "config", "strategy", "type_")
            names.append(f"{index}: {kind or _at(each, 'id_') or 'a benchmark'}")
    raise BadRequest(f"has {len(found)} runs; choose one by point= ({', '.join(names)})", "point")


def _at(found: object, *keys: str) -> Any:
    """Return what nested mappings have under these keys; None if one of them is missing."""
    for key in keys:
        found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    return found


def _requests(rows: Rows) -> Requests:
    """Return the table of rows; the first send is second 0."""
    if not rows:
        raise BadRequest("has no requests", "path")
    begin = min(row["sent"] for row in rows)
    times = [name for name, kind in REQUEST_COLUMNS.items() if kind == "time" and name != "pause_s"]
    for row in rows:
        for name in times:
            if row.get(name) is not None:
                row[name] -= begin
        if row.get("token_times"):
            row["token_times"] = tuple(at - begin for at in row["token_times"])
    return Requests.of_plain({name: [row.get(name) for row in rows] for name in REQUEST_COLUMNS})


def _answered(sent: float, ttft: float | None, gaps: Iterable[float], last: float | None) -> dict[str, Any]:
    """Return the times of an answer with a first token ``ttft`` seconds after the send, and ``gaps`` behind it."""
    if ttft is None:
        return {"first_token": None, "last_token": last, "ended": last}
    times = tuple(accumulate([sent + ttft, *gaps]))
    end = times[-1] if last is None else last
    return {"first_token": times[0], "last_token": end, "ended": end, "token_times": times}


def _failed(ended: float, why: str) -> dict[str, Any]:
    return {"first_token": None, "last_token": None, "ended": ended, "ok": False, "failure": why or "unknown"}


def _of_vllm(found: Mapping[str, Any]) -> Rows:
    if missing := [name for name in ("ttfts", "itls", "start_times", "output_lens", "errors") if name not in found]:
        raise BadRequest(f"lacks {missing[0]}; measure with vllm bench serve --save-result --save-detailed", "path")
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    latencies = found.get("latencies") or [None] * len(found["ttfts"])
    rows = Rows()
    for index, (sent, ttft, gaps, prompt, answer, error) in enumerate(
        zip(*(found[name] for name in names), strict=True)
    ):
        row: dict[str, Any] = {"id": str(index), "scheduled": sent, "sent": sent}
        row |= {"input_tokens": prompt, "output_tokens": answer}
        if error or not answer:
            row |= _failed(sent + (latencies[index] or 0.0), _first_line(error) or "empty")
        else:
            row |= {"ok": True, **_answered(sent, ttft, gaps, None)}
        rows.append(row)
    return rows


def _of_guidellm(benchmark: Mapping[str, Any]) -> Rows:
    rows = Rows()
    for status in ("successful", "incomplete", "errored"):
        for each in _at(benchmark, "requests", status) or ():
            times = cast("dict[str, Any]", _at(each, "info", "timings") or {})
            sent = each.get("request_start_time")
            if sent is None:  # it was never sent
                continue
            row: dict[str, Any] = {
                "id": str(each.get("request_id", len(rows))), "sent": sent,
                "scheduled": times.get("targeted_start") or sent,
                "session": _at(each, "info", "conversation_id"), "turn": _at(each, "info", "turn_index"),
                "input_tokens": each.get("prompt_tokens"), "cached_tokens": each.get("cached_tokens"),
                "output_tokens": each.get("output_tokens"),
            }  # fmt: skip
            ended = each.get("request_end_time") or sent
            if status == "successful":
                first = times.get("first_token_iteration")
                wait = each.get("time_to_first_token_ms")
                ttft = first - sent if first is not None else None if wait is None else wait / 1000
                row |= {"ok": True, **_answered(sent, ttft, (), times.get("last_token_iteration") or ended)}
                row |= {"ended": ended, "token_times": None}  # it has no times between the first and the last token
            else:
                row |= _failed(ended, _first_line(_at(each, "info", "error")) or status)
            rows.append(row)
    return sorted(rows, key=lambda row: row["sent"])


def _of_aiperf(records: Iterable[Mapping[str, Any]]) -> Rows:
    rows = Rows()
    for each in records:
        about, metrics = each.get("metadata"), each.get("metrics")
        if not isinstance(about, dict) or not isinstance(metrics, dict):
            raise BadRequest("has a line without metadata and metrics, which aiperf's profile_export.jsonl has", "path")
        known, metrics = cast("dict[str, Any]", about), cast("dict[str, Any]", metrics)
        if known.get("benchmark_phase", "profiling") != "profiling":
            continue
        sent, ended = known["request_start_ns"] * NS, known["request_end_ns"] * NS
        credit = known.get("credit_issued_ns")
        row: dict[str, Any] = {
            "id": str(known.get("x_request_id") or known.get("session_num", len(rows))), "sent": sent,
            "scheduled": sent if credit is None else credit * NS, "turn": known.get("turn_index"),
            "session": known.get("x_correlation_id"),
            "input_tokens": _at(metrics, "input_sequence_length", "value") or _at(metrics, "error_isl", "value"),
            "output_tokens": _at(metrics, "output_sequence_length", "value"),
        }  # fmt: skip
        if each.get("error"):
            row |= _failed(ended, str(_at(each, "error", "type") or "unknown"))
        else:
            wait, whole = (_at(metrics, name, "value") for name in ("time_to_first_token", "request_latency"))
            gaps = [gap / 1000 for gap in _at(metrics, "inter_chunk_latency", "value") or ()]
            last = ended if whole is None else sent + whole / 1000
            row |= {"ok": True, **_answered(sent, None if wait is None else wait / 1000, gaps, last), "ended": ended}
            row["token_times"] = row.get("token_times") if gaps else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["sent"])


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[-1] if error and str(error).strip() else ""


# ---- tables of several runs ------------------------------------------------------------------------------------


def add_records(
    table: Table, requests: Requests, label: str, rate: float | None, seed: int = 0, round: int = 0,
    concurrency: int | None = None, settings: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Add a run's requests to a table of :data:`RECORD_COLUMNS`, which has the requests of several runs.

    ``settings`` are the values of further columns.
    """
    rate, users = math.nan if rate is None else rate, math.nan if concurrency is None else concurrency
    of_run, about = Table(table.columns), dict(settings or {})
    about |= {"label": label, "rate": rate, "concurrency": users, "round": round, "seed": seed}
    for name, value in about.items():
        of_run.fill(name, [value] * len(requests))
    for name in REQUEST_COLUMNS:
        of_run.fill(name, requests[name])
    table.extend(of_run)
