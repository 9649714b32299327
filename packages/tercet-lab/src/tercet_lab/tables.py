"""Tables of results, column by column, and the table of requests: one row for each request, simulated or real.

A table needs NumPy only, and is written as CSV. Data frames, Arrow and Parquet need the extra
``tercet-lab[tables]``.
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.aio.files import read_named
from tercet.decisions.objectives import within
from tercet.protocol import BadRequest
from tercet_lab.slo import Slo

Floats = NDArray[np.float64]
Kind = Literal["time", "count", "maybe", "text", "flag", "verdict", "times"]
"""``time``: seconds, NaN if unknown; ``count``: a whole number; ``maybe``: a whole number, NaN if unknown; ``text``;
``flag``: true or false; ``verdict``: true, false, or None; ``times``: a tuple of seconds, or None."""
CODES: Mapping[Kind, str] = {"time": "d", "count": "q", "maybe": "d", "flag": "b"}
EXTRA = "tercet-lab[tables]"
MOST_READ = 4 * 1024**3
"""Largest CSV file that is read, in bytes."""
MOST_ROWS = 1024  # that wait for the columns, which need less memory
# A rate over fewer requests is not reliable.
ENDS_NEEDED = 10


class Table:
    """Rows of equal columns, whose names and kinds are ``columns``. A column is a NumPy array: ``table["sent"]``.

    Columns of text, verdicts and times are lists. Memory is 8 bytes for each number.
    """

    def __init__(self, columns: Mapping[str, Kind]) -> None:
        self.columns = dict(columns)
        self._filled: dict[str, Any] = {
            name: array(CODES[kind]) if kind in CODES else list[Any]() for name, kind in columns.items()
        }
        self._rows: list[tuple[Any, ...]] = []  # that wait to enter the columns

    def append(self, *row: Any) -> None:
        """Add a row, given in the order of the columns. Unknown numbers are NaN."""
        self._rows.append(row)
        if len(self._rows) >= MOST_ROWS:
            self._enter_rows()

    def _enter_rows(self) -> None:
        """Add the waiting rows to the columns, together: row by row, each value would cost a call."""
        if self._rows:
            for data, values in zip(self._filled.values(), zip(*self._rows, strict=True), strict=True):
                data.extend(values)
            self._rows.clear()

    @property
    def _data(self) -> dict[str, Any]:
        self._enter_rows()
        return self._filled

    def extend(self, other: Table) -> Self:
        """Add the rows of a table with equal columns; return this table."""
        for name, data in self._data.items():
            data.extend(other._data[name])
        return self

    def fill(self, name: str, values: Iterable[Any]) -> None:
        """Replace the values of one column."""
        kind = self.columns[name]
        if kind in CODES:
            number = float if CODES[kind] == "d" else int
            self._data[name] = array(CODES[kind], map(number, values))
        else:
            self._data[name] = list(values)

    def __len__(self) -> int:
        return len(next(iter(self._filled.values()))) + len(self._rows)

    def __getitem__(self, name: str) -> Any:
        kind, data = self.columns.get(name), self._data.get(name)
        if kind is None or data is None:
            raise BadRequest(f"column: there is no {name!r}; the columns are {', '.join(self.columns)}", "column")
        if kind not in CODES:
            return data
        return np.array(data, dtype=np.bool_ if kind == "flag" else None)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row by column; None if a value is unknown."""
        parts = [self._plain(name) for name in self.columns]
        for row in zip(*parts, strict=True):
            yield dict(zip(self.columns, row, strict=True))

    def _plain(self, name: str) -> list[Any]:
        """Return a column as Python's own values; None if a value is unknown."""
        kind, data = self.columns[name], self._data[name]
        if kind == "time":
            return [None if math.isnan(value) else value for value in data]
        if kind == "maybe":
            return [None if math.isnan(value) else int(value) for value in data]
        return [bool(value) for value in data] if kind == "flag" else list(data)

    def plain(self) -> dict[str, list[Any]]:
        """Return all columns as lists of Python's own values, for JSON; None if a value is unknown."""
        return {name: self._plain(name) for name in self.columns}

    def where(self, which: NDArray[np.bool_]) -> Self:
        """Return a table of the rows for which ``which`` is true."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        chosen = np.flatnonzero(which)
        found._rows = []
        found._filled = {
            name: array(CODES[kind], np.array(self._data[name])[chosen].tobytes())
            if kind in CODES
            else [self._data[name][index] for index in chosen]
            for name, kind in self.columns.items()
        }
        return found

    # ---- data frames and files -------------------------------------------------------------------------------

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``, with null for unknown values. It needs the extra ``tercet-lab[tables]``."""
        arrow = _extra("pyarrow")
        types = {"time": arrow.float64(), "count": arrow.int64(), "maybe": arrow.int64(), "flag": arrow.bool_()}
        types |= {"text": arrow.string(), "verdict": arrow.bool_(), "times": arrow.list_(arrow.float64())}
        return arrow.table(
            {name: arrow.array(self._plain(name), types.get(kind)) for name, kind in self.columns.items()}
        )

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``. Unknown numbers are NaN. It needs the extra ``tercet-lab[tables]``."""
        return _extra("pandas").DataFrame({name: self[name] for name in self.columns})

    def to_polars(self) -> Any:
        """Return a ``polars.DataFrame``, with null for unknown values. It needs the extra ``tercet-lab[tables]``."""
        return _extra("polars").DataFrame(self.plain(), infer_schema_length=None)

    def to_csv(self, path: str | Path | None = None) -> str | None:
        """Write CSV with a header; unknown values are empty. Without ``path``, return the text."""
        out = io.StringIO() if path is None else Path(path).expanduser().open("w", encoding="utf-8", newline="")
        with out:
            lines = csv.writer(out, lineterminator="\n")
            lines.writerow(self.columns)
            parts = [self._plain(name) for name in self.columns]
            lines.writerows([_cell(value) for value in row] for row in zip(*parts, strict=True))
            return out.getvalue() if isinstance(out, io.StringIO) else None

    def to_parquet(self, path: str | Path) -> None:
        """Write a Parquet file. It needs the extra ``tercet-lab[tables]``."""
        _extra("pyarrow.parquet").write_table(self.to_arrow(), Path(path).expanduser())

    def write(self, path: str | Path) -> None:
        """Write a ``.csv`` or ``.parquet`` file; raise :class:`~tercet.protocol.BadRequest` for any other name."""
        require_table_file(path, "path")
        (self.to_parquet if Path(path).suffix == ".parquet" else self.to_csv)(path)

    @classmethod
    def _read_columns(cls, path: Path) -> Mapping[str, Sequence[Any]]:
        """Return the columns of a ``.csv`` or ``.parquet`` file."""
        if path.suffix == ".parquet":
            return _extra("pyarrow.parquet").read_table(path).to_pydict()
        try:
            text = read_named(path, MOST_READ).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise BadRequest(f"path: {path} cannot be read: {error}", "path") from error
        header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
        for number, line in enumerate(lines, 2):
            if len(line) != len(header):
                raise BadRequest(f"path: {path}, line {number}: has {len(line)} of {len(header)} columns", "path")
        return dict(zip(header, zip(*lines, strict=True) if lines else [()] * len(header), strict=True))


def require_table_file(path: str | Path, name: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless tables can be written to ``path``."""
    if Path(path).suffix not in (".csv", ".parquet"):
        raise BadRequest(f"{name}: {path} must end with .csv or .parquet", name)
    if Path(path).suffix == ".parquet":
        _extra("pyarrow")


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise BadRequest(f"{package}: is not installed; pip install '{EXTRA}', or write CSV", package) from error


def _cell(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return " ".join(f"{each!r}" for each in value)  # pyright: ignore[reportUnknownVariableType]
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


REQUEST_COLUMNS: Mapping[str, Kind] = {
    "id": "text", "session": "text", "turn": "count", "klass": "text", "phase": "count",
    "scheduled": "time", "sent": "time", "first_token": "time", "last_token": "time", "ended": "time",
    "input_tokens": "count", "cached_tokens": "maybe", "output_tokens": "count", "wanted_tokens": "maybe",
    "predicted_tokens": "maybe",
    "engine_prefill": "text", "engine_decode": "text", "program": "text", "attempt": "maybe", "retries": "maybe",
    "fallback": "flag", "moves": "maybe", "pause_s": "time", "preempted": "maybe", "sent_bytes": "maybe",
    "ok": "flag", "failure": "text", "met_slo": "verdict", "token_times": "times",
}  # fmt: skip
DEFAULTS: Mapping[Kind, Any] = {
    "time": math.nan, "count": 0, "maybe": math.nan, "text": "", "flag": False, "verdict": None, "times": None,
}  # fmt: skip


Failure = Literal["http", "refused", "disconnected", "timeout", "protocol", "server", "empty", "unsent", "interrupted"]


class RequestRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True,
    rename={"id": "index", "session": "group", "ended": "end", "wanted_tokens": "planned_output"},
):  # fmt: skip
    """A row of :class:`Requests` of a real server, and what explains it; renamed fields have those names in files.

    - ``scheduled``: a later turn of a session is due when the turn before has ended and the think time is over; in a
      closed loop a request is due when a user is free.
    - ``token_times``: arrival of each event of the stream that had tokens; ``token_counts``: number of tokens in each
      of them, if the server says so; empty means one each, or unknown.
    - ``input_tokens`` and ``output_tokens``: counts of the server, if it sends them; ``planned_input`` and
      ``wanted_tokens``: lengths that the workload planned.
    - ``failure``: the kind of failure, with ``error`` as one line of explanation; None for success. ``unsent`` is a
      turn after a failed turn of its session.
    - ``warmup``: True for requests that warm up the target; they are in no table.
    """

    id: int
    session: str | None = None
    phase: int = 0
    scheduled: float
    sent: float
    first_token: float | None = None
    ended: float
    input_tokens: int = 0
    output_tokens: int = 0
    planned_input: int = 0
    wanted_tokens: int = 0
    token_times: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()
    failure: Failure | None = None
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    warmup: bool = False

    @property
    def ok(self) -> bool:
        """True if the request succeeded with at least one token."""
        return self.failure is None and self.first_token is not None


class Requests(Table):
    """One row for each measured request. Times are in seconds since the run's origin, NaN if there was none.

    - ``id``, ``session`` (empty: none), ``turn`` (from 0), ``klass`` of objectives, ``phase`` of the workload (from 0).
    - ``scheduled``: due; ``sent``: the client began to send; ``first_token``, ``last_token``: NaN for failed requests;
      ``ended``: the answer ended, or the request failed.
    - ``input_tokens``; ``cached_tokens``: those whose KV no engine computed for this request; ``output_tokens``;
      ``wanted_tokens``: the limit that the request asked for; ``predicted_tokens``: what policies believed.
    - ``engine_prefill``: the engine that computed the prompt; ``engine_decode``: the one with the last token;
      ``program``; ``attempt``: number of the last attempt (from 0); ``retries``: attempts after a failure;
      ``fallback``: one engine served it after its program failed; ``moves``: to other engines, ``pause_s`` the seconds
      without a token in them; ``preempted``: times; ``sent_bytes``: of KV between engines.
    - ``ok``: it succeeded; ``failure``: otherwise the code of its error; ``met_slo``: it met the objectives, None
      without any; ``token_times``: of each token (of a server: of each event), None if not recorded.

    What a real server does not tell is unknown. ``limits`` are the objectives of classes, by name.
    """

    def __init__(self, limits: Mapping[str, Slo] | None = None) -> None:
        super().__init__(REQUEST_COLUMNS)
        self.limits: Mapping[str, Slo] = limits or {}

    @classmethod
    def of(cls, columns: Mapping[str, Iterable[Any]], limits: Mapping[str, Slo] | None = None) -> Requests:
        """Return a table of the given columns; the others are empty or unknown."""
        found, size = cls(limits), 0
        for name, values in columns.items():
            found.fill(name, values)
            size = len(found._data[name])
        for name, kind in REQUEST_COLUMNS.items():
            if name not in columns:
                found.fill(name, [DEFAULTS[kind]] * size)
        return found

    @classmethod
    def of_rows(cls, rows: Iterable[RequestRow]) -> Requests:
        """Return the table of all rows except warm-up, in order."""
        kept = [row for row in rows if not row.warmup]
        same = (
            "id", "session", "phase", "scheduled", "sent", "ended", "input_tokens", "output_tokens", "wanted_tokens",
            "ok",
        )  # fmt: skip
        columns: dict[str, Sequence[Any]] = {name: [getattr(row, name) for row in kept] for name in same}
        columns["first_token"] = [row.first_token if row.ok else None for row in kept]
        columns["last_token"] = [row.ended if row.ok else None for row in kept]
        columns["failure"] = ["" if row.ok else row.failure or "empty" for row in kept]
        columns["token_times"] = [row.token_times or None for row in kept]
        return cls.of_plain(columns)

    @classmethod
    def of_plain(cls, columns: Mapping[str, Sequence[Any]]) -> Requests:
        """Return the table of columns of text or of Python's own values, in which None is unknown."""
        kinds = REQUEST_COLUMNS
        return cls.of(
            {name: [_value(kinds[name], each) for each in columns[name]] for name in kinds if name in columns}
        )

    @classmethod
    def read(cls, path: str | Path) -> Requests:
        """Return the table of a ``.csv`` or ``.parquet`` file; raise :class:`~tercet.protocol.BadRequest`."""
        file = Path(path).expanduser()
        given = cls._read_columns(file)
        if missing := [name for name in ("sent", "first_token", "ended") if name not in given]:
            raise BadRequest(f"path: {path} lacks the column {missing[0]}; a table of requests has one", "path")
        try:
            return cls.of_plain(given)
        except (ValueError, TypeError) as error:
            raise BadRequest(f"path: {path}: {error}", "path") from error

    # ---- what tables of requests are asked -------------------------------------------------------------------

    @property
    def failures(self) -> Counter[str]:
        """Number of failed requests by the code of their error; ``empty`` is an answer without a token."""
        kinds = zip(self._data["ok"], self._data["failure"], strict=True)
        return Counter(failure or "empty" for ok, failure in kinds if not ok)

    @property
    def ttft(self) -> Floats:
        """Time from the send to the first token, per request, in seconds."""
        return self["first_token"] - self["sent"]

    @property
    def e2el(self) -> Floats:
        """End-to-end latency from the send, per request, in seconds."""
        return self["last_token"] - self["sent"]

    @property
    def tpot(self) -> Floats:
        """(E2EL - TTFT) / (output tokens - 1) per request, in seconds; NaN for answers of fewer than two tokens."""
        tokens = self["output_tokens"]
        steps = np.where(tokens > 1, tokens - 1, np.nan)
        return (self["last_token"] - self["first_token"]) / steps

    @property
    def itl(self) -> Floats:
        """Gaps between successive tokens of all successful requests, in seconds; empty without token times."""
        times = zip(self._data["ok"], self._data["token_times"], strict=True)
        gaps = [np.diff(np.asarray(each, dtype=np.float64)) for ok, each in times if ok and each]
        return np.concatenate(gaps) if gaps else np.empty(0)

    @property
    def ttft_scheduled(self) -> Floats:
        """Time from the scheduled arrival to the first token, per request, in seconds."""
        return self["first_token"] - self["scheduled"]

    @property
    def e2el_scheduled(self) -> Floats:
        """End-to-end latency from the scheduled arrival, per request, in seconds."""
        return self["last_token"] - self["scheduled"]

    @property
    def steady_window(self) -> tuple[float, float] | None:
        """Time from the first end of a request to the last scheduled arrival, as (begin, end) in seconds.

        In this window the target neither fills nor drains. None if fewer than :data:`ENDS_NEEDED` requests ended in it.
        """
        if not len(self):
            return None
        ended = self["ended"]
        begin, end = float(ended.min()), float(self["scheduled"].max())
        inside = (ended > begin) & (ended <= end)
        return (begin, end) if int(inside.sum()) >= ENDS_NEEDED else None

    def steady_rate(self, which: NDArray[np.bool_]) -> float | None:
        """Return the number of these requests that ended per second of :attr:`steady_window`; None without a window."""
        window = self.steady_window
        if window is None:
            return None
        begin, end = window
        ended = self["ended"]
        return int((which & (ended > begin) & (ended <= end)).sum()) / (end - begin)

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Return, for each request, True if it succeeded within every limit of its class (without one: of ``slo``)."""
        good = self._within(slo)
        for name, limits in self.limits.items():
            of_class = self._are_of(name)
            good[of_class] = self._within(limits)[of_class]
        return good

    def _within(self, slo: Slo) -> NDArray[np.bool_]:
        limits = ((slo.ttft, self.ttft_scheduled), (slo.e2el, self.e2el_scheduled), (slo.tpot, self.tpot))
        good = self["ok"]
        for limit, values in limits:
            if limit is not None:
                good &= within(values, limit)
        return good

    def attainment(self, slo: Slo) -> dict[str, float]:
        """Return, by class, the share of requests that met the objectives."""
        good = self.meets(slo)
        return {each: float(good[self._are_of(each)].mean()) for each in dict.fromkeys(self._data["klass"])}

    def _are_of(self, name: str) -> NDArray[np.bool_]:
        return np.array([each == name for each in self._data["klass"]], dtype=np.bool_)

    def judge(self, slo: Slo | None) -> None:
        """Fill ``met_slo``; None for all requests without objectives."""
        self.fill("met_slo", [None] * len(self) if slo is None else map(bool, self.meets(slo)))


def _value(kind: Kind, given: Any) -> Any:
    """Return the value of a cell that was read: text from CSV, Python's own values from Parquet."""
    if kind == "text":
        return "" if given is None else str(given)
    if given is None or given == "":
        return DEFAULTS[kind]
    if kind in ("time", "maybe"):
        return float(given)
    if kind == "count":
        return int(given)
    if kind == "times":
        return tuple(float(each) for each in (given.split() if isinstance(given, str) else given))
    return given == "true" if isinstance(given, str) else bool(given)
