"""The results of a run: its summary, and one JSON file with the measured system, the settings and the rows."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from tercet import __version__
from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_lab.slo import MS, Slo
from tercet_lab.tables import Floats, RequestRow, Requests

FORMAT = 1
PACKAGES = ("aiohttp", "msgspec", "numpy", "uvloop", "tokenizers", "transformers")


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of one program under one load.

    ``label`` is the name of its line in a figure. ``request_rate`` is in requests per second, or None for a closed loop
    or a trace with its recorded times; ``concurrency`` is the number of users, or the cap on requests in flight.
    ``metrics`` are those of :meth:`~tercet_lab.bench.results.Summary.flat`. ``client`` has the measuring client's CPU
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
    records: tuple[RequestRow, ...] = ()


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
        raise BadRequest(f"{file}: not a result file of tercet bench: {error}", "file") from error
    if result.format != FORMAT:
        raise BadRequest(f"{file}: has format {result.format}, and this version reads format {FORMAT}", "file")
    return result


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


INTERRUPTED = "interrupted"
# With this number of requests, one is expected above the percentile; with fewer, the percentile is only the maximum.
REQUESTS_NEEDED = {"p90": 10, "p99": 100}


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of a latency over ``count`` observations, in seconds. ``std`` is of the population."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: ArrayLike) -> Distribution | None:
        """Return the distribution of all values that are not NaN, or None without such values."""
        found: Floats = np.asarray(values, dtype=np.float64)
        found = found[~np.isnan(found)]
        if not found.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
        return Distribution(
            found.size, float(found.mean()), float(found.std()), p50, p90, p99, float(found.max())
        )  # fmt: skip

    def flat(self, name: str) -> dict[str, float]:
        """Return ``{"mean_ttft_ms": ..., "median_ttft_ms": ..., "p99_ttft_ms": ...}`` for ``ttft``, in milliseconds."""
        values = {"mean": self.mean, "std": self.std, "median": self.p50}
        values |= {"p90": self.p90, "p99": self.p99, "max": self.max}
        return {f"{key}_{name}_ms": value * MS for key, value in values.items()}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one run: throughput per second, and latencies in seconds (None if no request has one).

    ``duration`` is the time from the first scheduled arrival to the end of the last request. ``request_goodput`` is the
    number of requests per second that met the SLO; None without an SLO. These two rates of ``vllm bench serve``,
    ``request_throughput`` and ``request_goodput``, include the drain at the end. ``steady_throughput`` and
    ``steady_goodput`` count in :attr:`Requests.steady_window` only, and are None if it has too few requests.
    ``attainment`` is the share of all requests that met the SLO. ``failed`` counts failures of the target; requests in
    flight when the run was interrupted are in ``interrupted`` instead. ``itl`` is the gap between events of a stream:
    an event with several tokens makes one gap, as in ``vllm bench serve``.
    """

    completed: int
    failed: int
    interrupted: int
    errors: Mapping[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    steady_throughput: float | None = None
    steady_goodput: float | None = None
    attainment: float | None = None
    max_concurrent_requests: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    ttft_scheduled: Distribution | None
    e2el_scheduled: Distribution | None
    send_delay: Distribution | None

    def flat(self) -> dict[str, float | int | None]:
        """Return all values under the flat names of ``vllm bench serve``, latencies in milliseconds.

        Names that vLLM does not have: ``interrupted``, ``steady_throughput``, ``steady_goodput``, ``attainment``,
        ``*_ttft_scheduled_ms`` and ``*_e2el_scheduled_ms`` (from the scheduled arrival), and ``*_send_delay_ms`` (from
        the scheduled arrival to the send).
        """
        found: dict[str, float | int | None] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Distribution):
                found |= value.flat(name)
            elif name not in _DISTRIBUTIONS and name != "errors":
                found[name] = value
        return found


def achieved(metrics: Mapping[str, float | int | None], name: str) -> float | None:
    """Return the rate ``throughput`` or ``goodput`` in the steady window, or of the whole run without a window.

    ``metrics`` are those of :meth:`Summary.flat`. None if they do not have the rate.
    """
    if metrics.get(f"request_{name}") is None:
        return None
    steady = metrics.get(f"steady_{name}")
    return metrics.get(f"request_{name}") if steady is None else steady


def enough(requests: float, statistic: str) -> bool:
    """True if this number of requests is enough for the statistic, such as ``p99``."""
    return requests >= REQUESTS_NEEDED.get(statistic, 1)


_DISTRIBUTIONS = ("ttft", "tpot", "itl", "e2el", "ttft_scheduled", "e2el_scheduled", "send_delay")


def summarize(run: Requests | Iterable[RequestRow], slo: Slo | None = None) -> Summary:
    """Return the summary of a run; ``slo`` (None: no limits) defines goodput."""
    samples = run if isinstance(run, Requests) else Requests.of_rows(run)
    done, sent, scheduled, ended = (samples[name] for name in ("ok", "sent", "scheduled", "ended"))
    duration = float(ended.max() - scheduled.min()) if done.size else 0.0
    completed = int(done.sum())
    tokens_in, tokens_out = (int(samples[name][done].sum()) for name in ("input_tokens", "output_tokens"))
    failures = samples.failures
    interrupted = failures.get(INTERRUPTED, 0)
    return Summary(
        completed=completed,
        failed=int(done.size) - completed - interrupted,
        interrupted=interrupted,
        errors=dict(sorted(failures.items())),
        duration=duration,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=_rate(completed, duration),
        output_throughput=_rate(tokens_out, duration),
        total_token_throughput=_rate(tokens_in + tokens_out, duration),
        request_goodput=None if slo is None else _rate(int(samples.meets(slo).sum()), duration),
        steady_throughput=samples.steady_rate(done),
        steady_goodput=None if slo is None else samples.steady_rate(samples.meets(slo)),
        attainment=float(samples.meets(slo).mean()) if slo is not None and done.size else None,
        max_concurrent_requests=most_at_once(sent, ended),
        send_delay=Distribution.of(sent - scheduled),
        **{name: Distribution.of(getattr(samples, name)) for name in _DISTRIBUTIONS if name != "send_delay"},
    )


def most_at_once(begins: Floats, ends: Floats) -> int:
    """Return the largest number of half-open intervals ``[begin, end)`` that overlap at one moment."""
    if not begins.size:
        return 0
    times = np.concatenate([ends, begins])
    steps = np.concatenate([np.full(ends.size, -1), np.full(begins.size, 1)])
    # A stable sort puts ends before beginnings of the same moment.
    return max(0, int(np.cumsum(steps[np.argsort(times, kind="stable")]).max()))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


FIGURES = 3


def three_digits(value: float | None) -> str:
    """Return a number with three significant figures and without an exponent; an empty text for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, _places(value))
    return f"{rounded:.{max(0, _places(rounded))}f}"


def _places(value: float) -> int:
    """Return the number of decimal places for three significant figures; it is negative for large numbers."""
    return FIGURES - 1 - math.floor(math.log10(abs(value)))
