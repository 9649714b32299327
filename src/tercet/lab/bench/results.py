"""Results of a run: a record of each request, and one JSON file with the measured system and settings.

Every time of a record is in seconds since the run's origin, the moment at which its schedule starts; a simulator fills
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
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE

Failure = Literal["http", "refused", "disconnected", "timeout", "protocol", "server", "empty", "unsent", "interrupted"]
FORMAT = 1
PACKAGES = ("aiohttp", "msgspec", "numpy", "uvloop", "tokenizers", "transformers")


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request, from the moment it should have been sent to its last token.

    - ``scheduled``: when it should have been sent. A later turn of a session is due when its predecessor has ended and
      the think time is over; in a closed loop a request is due when a slot is free.
    - ``sent``: when the client began to send it.
    - ``end``: its last token, or the moment at which it was known to have failed.
    - ``token_times``: arrival of each event of the stream that carried tokens; ``token_counts``: how many tokens each
      of them carried, where the server said so; empty means one each, or not known.
    - ``first_token``: the first of ``token_times``; a simulator may give it and keep no others.
    - ``input_tokens`` and ``output_tokens`` as counted by the server, if it did; ``planned_input`` and
      ``planned_output``: as the workload asked for.
    - ``failure``: the kind of failure, with ``error`` as one line of explanation; None for success. ``unsent`` is a
      turn whose session broke before it.
    - ``warmup``: sent to warm the target up, left out of every summary.
    - ``group``: the session or the shared prefix that it belongs to; ``phase``: index of the workload's phase.
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
        """Whether it succeeded, with at least one token."""
        return self.failure is None and self.first_token is not None

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the send (seconds)."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency, the job completion time, from the send (seconds)."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (end-to-end - TTFT) / (output tokens - 1), in seconds.

        None for answers of fewer than two tokens, which ``vllm bench serve`` leaves out as well.
        """
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.output_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive events that carried tokens (seconds)."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times))


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: a program under one load.

    ``label`` names the line that it belongs to in a figure. ``request_rate`` is in requests per second, None in a
    closed loop or for a trace as it was recorded; ``concurrency`` is the number of users, or the cap on requests in
    flight. ``metrics`` are :meth:`~tercet.lab.bench.summary.Summary.flat`. ``client`` has the measuring client's CPU
    seconds and its event loop's delays. ``prefix`` has the prompt tokens that the router's picks ``predicted`` in
    caches, that engines ``delivered``, and the predicted that were ``missing``; empty without predictions.
    ``partial``: the run was interrupted during this point.
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
    """A file of ``tercet bench``. ``source`` distinguishes real engines from simulated ones.

    ``timelines`` are recorded simulated runs by name, for the page (:mod:`tercet.router.page.records`).
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
    """Write ``result`` as JSON; times are rounded to a microsecond. Raises :class:`~tercet.protocol.BadRequest`."""
    data = msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(result))), indent=1)
    # Arrays of numbers on one line: people do not read a record's token times.
    text = re.sub(rb"\[[\s\d.,eE+-]+\]", lambda found: re.sub(rb"\s+", b"", found[0]), data)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".part")
        temporary.write_bytes(text + b"\n")
        temporary.replace(file)
    except OSError as error:
        raise BadRequest(f"--result-filename {file}: {error.strerror}", "result-filename") from error


def load_result(file: Path) -> BenchResult:
    """Read a file; raises :class:`~tercet.protocol.BadRequest` that explains an error in it."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}", "file") from error
    try:
        result = msgspec.json.decode(data, type=BenchResult)
    except UNREADABLE as error:
        raise BadRequest(f"{file}: it is not a result of tercet bench: {error}", "file") from error
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


def versions() -> dict[str, str]:
    """Tercet, Python and the libraries that take part in a measurement."""
    found = {"tercet": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str], secret: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with the values of ``secret`` headers left out."""
    found: list[str] = []
    for word in argv:
        flag = "--header=" if word.startswith("--header=") else ""
        key, equals, _ = word.removeprefix(flag).partition("=")
        found.append(f"{flag}{key}=..." if equals and key.lower() in secret else word)
    return tuple(found)


def machine() -> dict[str, Any]:
    """The measuring machine: CPU, cores, memory (GiB), system and how loaded it was (1-minute average)."""
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
    """The measuring machine and the date, for figures."""
    on = machine()
    return f"{on['cpu']}, {on['cores']} cores, {now()[:10]}"


def now() -> str:
    """The time of day, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_model() -> str | None:
    """Linux's name of the processor, which psutil does not have."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
