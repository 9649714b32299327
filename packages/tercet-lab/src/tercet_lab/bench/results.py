"""The results of a run: a record of each request, and one JSON file with the measured system and settings.

All times of a record are in seconds since the run's origin, the moment at which its schedule starts. A simulator fills
the same records.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from tercet import __version__
from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE

Failure = Literal["http", "refused", "disconnected", "timeout", "protocol", "server", "empty", "unsent", "interrupted"]
FORMAT = 1
PACKAGES = ("aiohttp", "msgspec", "numpy", "uvloop", "tokenizers", "transformers")


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The record of one request, from its scheduled time to its last token.

    - ``scheduled``: time at which the request was due. A later turn of a session is due when the turn before has ended
      and the think time is over; in a closed loop a request is due when a user is free.
    - ``sent``: time at which the client began to send it.
    - ``end``: time of its last token, or time at which it failed.
    - ``token_times``: arrival of each event of the stream that had tokens; ``token_counts``: number of tokens in each
      of them, if the server says so; empty means one each, or unknown.
    - ``first_token``: the first of ``token_times``; a simulator may store it without the others.
    - ``input_tokens`` and ``output_tokens``: counts of the server, if it sends them; ``planned_input`` and
      ``planned_output``: lengths that the workload planned.
    - ``failure``: the kind of failure, with ``error`` as one line of explanation; None for success. ``unsent`` is a
      turn after a failed turn of its session.
    - ``warmup``: True for requests that warm up the target; they are in no summary.
    - ``group``: the session or the shared prefix of the request; ``phase``: index of the workload's phase.
    """

    index: int
    scheduled: float
    sent: float
    end: float
    first_token: float | None = None
    token_times: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    planned_input: int = 0
    planned_output: int = 0
    failure: Failure | None = None
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    warmup: bool = False
    phase: int = 0
    group: str | None = None

    @property
    def ok(self) -> bool:
        """True if the request succeeded with at least one token."""
        return self.failure is None and self.first_token is not None

    @property
    def ttft(self) -> float | None:
        """Time from the send to the first token, in seconds; None without a token."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency (job completion time), from the send, in seconds."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (end-to-end - TTFT) / (output tokens - 1), in seconds.

        None for answers of fewer than two tokens; ``vllm bench serve`` leaves them out too.
        """
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.output_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive events with tokens, in seconds."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times))


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of one program under one load.

    ``label`` is the name of its line in a figure. ``request_rate`` is in requests per second, or None for a closed loop
    or a trace with its recorded times; ``concurrency`` is the number of users, or the cap on requests in flight.
    ``metrics`` are those of :meth:`~tercet_lab.bench.summary.Summary.flat`. ``client`` has the measuring client's CPU
    seconds and the delays of its event loop. ``prefix`` has numbers of prompt tokens: those that the router's picks
    ``predicted`` in caches, those that engines ``delivered``, and predicted ones that were ``missing``; it is empty
    without predictions. ``partial`` is True if the run was interrupted during this point.
    """

    label: str
    program: str | None = None
    request_rate: float | None = None
    concurrency: int | None = None
    round: int = 0
    metrics: Mapping[str, float | int | None]
    errors: Mapping[str, int] = {}
    client: Mapping[str, float] = {}
    prefix: Mapping[str, int] = {}
    partial: bool = False
    records: tuple[RequestRecord, ...] = ()


class Ratio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ratio of a program's statistic to the baseline's, with the bounds of a bootstrap confidence interval."""

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
    """The content of a result file of ``tercet bench``.

    ``source`` distinguishes measurements from simulations. ``timelines`` are recorded simulated runs by name, for the
    web page (:mod:`tercet.router.page.records`).
    """

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
    timelines: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET


def save_result(result: BenchResult, file: Path) -> None:
    """Write ``result`` as JSON, with times rounded to a microsecond.

    Raise :class:`~tercet.protocol.BadRequest` if the file cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(result))), indent=1)
    # Write arrays of numbers on one line: people do not read a record's token times.
    text = re.sub(rb"\[[\s\d.,eE+-]+\]", lambda found: re.sub(rb"\s+", b"", found[0]), data)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".part")
        temporary.write_bytes(text + b"\n")
        temporary.replace(file)
    except OSError as error:
        raise BadRequest(f"--result-filename {file}: {error.strerror}", "result-filename") from error


def load_result(file: Path) -> BenchResult:
    """Read a result file. Raise :class:`~tercet.protocol.BadRequest` that explains what is wrong with it."""
    try:
        data = read_named(file)
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}", "file") from error
    try:
        result = msgspec.json.decode(data, type=BenchResult)
    except UNREADABLE as error:
        raise BadRequest(f"{file}: is not a result file of tercet bench: {error}", "file") from error
    if result.format != FORMAT:
        raise BadRequest(f"{file}: has format {result.format}, and this version reads format {FORMAT}", "file")
    return result


def load_results(files: Sequence[Path]) -> list[BenchResult]:
    """Read result files in order, as :func:`load_result` does."""
    return [load_result(file) for file in files]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def versions() -> dict[str, str]:
    """Return the versions of Tercet, Python and the libraries that affect a measurement."""
    found = {"tercet": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str], secret: Sequence[str]) -> tuple[str, ...]:
    """Return ``argv`` with the values of ``secret`` headers replaced by ``...``."""
    found: list[str] = []
    for word in argv:
        flag = "--header=" if word.startswith("--header=") else ""
        key, equals, _ = word.removeprefix(flag).partition("=")
        found.append(f"{flag}{key}=..." if equals and key.lower() in secret else word)
    return tuple(found)


def machine() -> dict[str, Any]:
    """Return facts about this machine: CPU, cores, memory (GiB), system, and load average over 1 minute."""
    # Imported here: commands without a measurement start faster.
    import psutil

    return {
        "cpu": _cpu_model() or platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "usable_cores": len(psutil.Process().cpu_affinity() or ()) if psutil.LINUX else psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def where_and_when() -> str:
    """Return this machine and the date as one text, for figures."""
    on = machine()
    return f"{on['cpu']}, {on['cores']} cores, {now()[:10]}"


def now() -> str:
    """Return the date and time in UTC, to the second, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_model() -> str | None:
    """Return Linux's name of the processor, which psutil does not know, or None on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
