"""Experiments that differ in some of their parts, run for several seeds, and what their differences say.

All cells of a grid have the same seeds, so the same arrivals and lengths. They are compared seed by seed, which cancels
the common effect of a seed.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec

import tercet
import tercet_lab
from tercet.aio.files import write_whole
from tercet.programs import load_program
from tercet.protocol import BadRequest, EngineError
from tercet.settings import Source, declared, decode_settings, encode_settings
from tercet.settings.declaration import near
from tercet_lab.bench.simulated.experiment import Experiment, Fleet, Note
from tercet_lab.bench.simulated.recording import Record
from tercet_lab.bench.simulated.run_metrics import Metric, metric_of
from tercet_lab.bench.simulated.scenario import PlannedWorkload, SyntheticWorkload
from tercet_lab.bench.simulated.simulation import SimulatedPoint
from tercet_lab.bench.workloads.conversations import refuse
from tercet_lab.planner_settings import MovingSettings
from tercet_lab.sim import EngineOptions
from tercet_lab.slo import Slo
from tercet_lab.tables import Kind, Requests, Table, require_table_file

MOVING = {each.key for each in declared(MovingSettings)}
PARTS = ("program", "fleet", "profile", "work", "scheduling", "slo", "moves", "planner", "predict_error")
LOADS = {"request_rate": "rate", "num_prompts": "requests", "num_warmups": "warm_up", "arrival": "arrivals"}
"""Names of the command line for fields of a workload."""
WORK_FIELDS = ("rate", *dict.fromkeys((*SyntheticWorkload.__struct_fields__, *PlannedWorkload.__struct_fields__)))
CONFIDENCE = 0.95
Standing = Literal["best", "near", "beaten"]


# ---- experiments of a grid -------------------------------------------------------------------------------------


def with_setting(base: Experiment, name: str, value: Any) -> Experiment:
    """Return the experiment with another value of one setting; a text is converted as on the command line.

    The setting is a part of the experiment, ``profile``, a field of its workload, an engine option, a setting of moves,
    or a parameter of the program; dashes and underscores are equal. Raise :class:`~tercet.protocol.BadRequest`.
    """
    plain, key = plain_name(name), name.replace("_", "-")
    fleet, changes = base.fleet, dict[str, Any]()
    if plain == "fleet":
        changes["fleet"] = Fleet.parse(value, fleet.profile, fleet.options) if isinstance(value, str) else value
    elif plain == "profile":
        changes["fleet"] = fleet.with_(profile=value)
    elif plain == "predict_error":
        try:
            changes[plain] = float(value)
        except ValueError:
            raise BadRequest(f"--over: {name}={value} is not a number", "--over") from None
    elif plain in PARTS:
        changes[plain] = value or None if plain == "scheduling" else value
    elif plain in EngineOptions.__struct_fields__:
        changes["fleet"] = fleet.with_(options={**fleet.options, plain: value})
    elif key in MOVING:
        of = {**encode_settings(base.moves), key: value}
        if value == "":
            del of[key]  # an empty value means that the setting is not given
        changes["moves"] = decode_settings(MovingSettings, Source(of, names={key: f"--over {name}"}))
    elif plain in base.work.__struct_fields__:
        changes["work"] = _with_load(base.work, plain, value, name)
    else:
        changes["args"] = {**base.args, name: value}
    return msgspec.structs.replace(base, **changes)


def _with_load(work: Any, field: str, value: Any, name: str) -> Any:
    of: dict[str, Any] = {each: getattr(work, each) for each in work.__struct_fields__}
    of[field] = (value,) if field == "workload" and isinstance(value, str) else value
    if field == "requests" and name.replace("-", "_") != field:
        of[field] = int(value) + work.warm_up  # --num-prompts counts measured requests
    if field == "burstiness" and work.arrivals == "poisson":
        of["arrivals"] = "gamma"  # a Poisson process is the one of shape 1
    try:
        kind: type[Any] = SyntheticWorkload if isinstance(work, SyntheticWorkload) else PlannedWorkload
        return msgspec.convert(of, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"--over: {name}={value}: {error}", "--over") from error


def _require_settings(base: Experiment, over: Mapping[str, Sequence[Any]]) -> None:
    programs = over.get("program", (base.program,))
    arguments = {name for program in programs for name in inspect.signature(load_program(program)).parameters}
    known = [*PARTS, *base.work.__struct_fields__, *EngineOptions.__struct_fields__, *sorted(MOVING)]
    known += [*LOADS, *sorted(arguments - {"request", "fleet"})]
    same = {each.replace("-", "_") for each in known}
    for name, values in over.items():
        if name.replace("-", "_") not in same:
            raise BadRequest(f"--over: {name} is not a setting; {near(name, known)}", "--over")
        refuse(not len(values), "--over", f"{name} has no values; give at least one")


def cells_of(base: Experiment, over: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Experiment]]:
    """Return the settings and the experiment of each combination of the axes' values, the last axis fastest.

    Raise :class:`~tercet.protocol.BadRequest` for an axis that is not a setting of the experiment, or is empty.
    """
    _require_settings(base, over)
    cells = list[tuple[dict[str, Any], Experiment]]()
    for values in itertools.product(*over.values()):
        settings, found = dict(zip(over, values, strict=True)), base
        # The workload and the fleet come first: other settings change their fields.
        for name in sorted(settings, key=lambda each: each not in ("program", "work", "fleet", "profile", "moves")):
            found = with_setting(found, name, settings[name])
        cells.append((settings, found))
    return cells


def plain_name(name: str) -> str:
    """Return the name of a setting in an experiment: dashes are underscores, and fields of the workload have theirs."""
    plain = name.replace("-", "_")
    return LOADS.get(plain, plain)


def in_words(value: Any) -> str:
    """Return a setting's value as text, for tables and labels."""
    if isinstance(value, str):
        return value
    return str(getattr(value, "__name__", None) or (f"{value:g}" if isinstance(value, float) else value))


# ---- running ---------------------------------------------------------------------------------------------------

_TO_RUN: list[Experiment] = []
"""The experiments of the present grid: processes that are forked find them here, also functions of a notebook."""


def run_all(
    experiments: Sequence[Experiment], jobs: int = 1, cached: Path | None = None, note: Note = lambda _: None,
    begin: Callable[[int], object] = lambda _: None, keep: Callable[[int, Requests], object] | None = None,
) -> list[SimulatedPoint]:  # fmt: skip
    """Return the results of experiments, in order, with ``jobs`` processes at once.

    ``keep`` gets the index and the requests of each experiment; all are simulated then, and none is read.

    ``begin`` gets the index of each experiment before ``note`` gets the lines about it. With a folder ``cached``,
    results are read from there and kept there. Raise the first error of an experiment, and
    :class:`~tercet.protocol.EngineError` if a process dies.
    """
    refuse(jobs < 1, "jobs", f"is {jobs}, and must be at least 1")
    found: dict[int, SimulatedPoint] = {}
    keys = [None if cached is None else content_hash(each) for each in experiments]
    for index, key in enumerate(keys):
        if cached is not None and key is not None and keep is None and (known := _read(cached / key)) is not None:
            found[index] = known
    todo = [index for index in range(len(experiments)) if index not in found]
    for index, (point, requests) in zip(todo, _run(experiments, todo, jobs, note, begin, keep), strict=True):
        found[index], key = point, keys[index]
        if keep is not None and requests is not None:
            keep(index, requests)
        if cached is not None and key is not None:
            cached.mkdir(parents=True, exist_ok=True)
            write_whole(cached / key, msgspec.msgpack.encode(point))
    return [found[index] for index in range(len(experiments))]


Ran = tuple[SimulatedPoint, Requests | None]


def _run(
    experiments: Sequence[Experiment], todo: Sequence[int], jobs: int, note: Note, begin: Callable[[int], object],
    keep: object,
) -> Iterator[Ran]:  # fmt: skip
    if jobs == 1 or len(todo) < 2:
        for index in todo:
            begin(index)
            yield _ran(experiments[index], note)
        return
    _TO_RUN[:] = experiments
    # Forked, as functions of a notebook cannot be sent to another interpreter.
    pool = ProcessPoolExecutor(min(jobs, len(todo)), multiprocessing.get_context("fork"))
    try:
        for index, (ran, said) in zip(todo, pool.map(partial(_run_one, keep is not None), todo), strict=True):
            begin(index)
            for line in said:
                note(line)
            yield ran
    except BrokenProcessPool as error:
        raise EngineError("a process of the sweep died, perhaps for lack of memory; give fewer jobs") from error
    finally:
        pool.shutdown(cancel_futures=True)
        _TO_RUN.clear()


def _run_one(keeps: bool, index: int) -> tuple[Ran, list[str]]:
    said = list[str]()
    point, requests = _ran(_TO_RUN[index], said.append)
    return (point, requests if keeps else None), said  # rows are sent between processes only if they are kept


def _ran(experiment: Experiment, note: Note) -> tuple[SimulatedPoint, Requests]:
    run = msgspec.structs.replace(experiment, record=Record()).run(note)
    assert run.point is not None
    return run.point, run.requests


def _read(file: Path) -> SimulatedPoint | None:
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=SimulatedPoint)
    except (OSError, msgspec.DecodeError):  # absent, or torn
        return None


def content_hash(experiment: Experiment) -> str | None:
    """Return a hash of the experiment and of the code of Tercet; None for functions that are in no file.

    Of files that the experiment names (programs, profiles, traces, schedulings, fleets), and of those that define its
    functions, the contents count. Modules that such a file imports do not.
    """
    parts: list[Any] = [_code_hash(), experiment.seed, encode_settings(experiment.moves), experiment.scheduling]
    functions = [experiment.program, *experiment.args.values()]
    if experiment.planner is not None:
        functions.append(experiment.planner.by)
        parts.append(encode_settings(experiment.planner.settings))
    for each in functions:
        if callable(each):
            try:
                parts += [getattr(each, "__qualname__", ""), Path(inspect.getfile(each)).read_bytes()]  # type: ignore[arg-type]
            except (OSError, TypeError):
                return None
        else:
            parts.append(str(each))
    fleet, slo = experiment.fleet, experiment.limits
    options = {key: str(value) for key, value in fleet.options.items()}
    parts += [list(experiment.args), fleet.spec, fleet.profile, options]
    parts += [type(experiment.work).__name__, experiment.work, slo, experiment.steady, experiment.predict_error]
    text = msgspec.msgpack.encode(parts)
    named = [experiment.scheduling, fleet.profile, *(group.profile for group in fleet.spec.engines)]
    named += [str(each).rpartition(":")[0] for each in functions if isinstance(each, str)]
    named += [item.partition("=")[2] for each in getattr(experiment.work, "workload", ()) for item in each.split(",")]
    for name in named:
        file = Path(name or "").expanduser()
        text += file.read_bytes() if name and file.is_file() else b"-"
    return hashlib.sha256(text).hexdigest()


@cache
def _code_hash() -> str:
    found = hashlib.sha256()
    for package in (tercet, tercet_lab):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                found.update(file.read_bytes())
    return found.hexdigest()


# ---- what differs ----------------------------------------------------------------------------------------------


def swept_metric(name: str, requests: float = math.inf, slo: bool = True) -> Metric:
    """Return a metric of runs in a sweep; raise :class:`~tercet.protocol.BadRequest` if they do not have it."""
    found = metric_of(name)
    refuse(name.startswith("itl."), "metric", f"{name}: a sweep keeps no times of tokens; compare tpot")
    found.require(requests, slo)
    return found


class Estimate(msgspec.Struct, frozen=True):
    """The mean of a metric over seeds; ``half`` is half the width of its interval.

    ``half`` is None for a single seed, and if all seeds gave the same value, which says nothing about chance.
    """

    mean: float
    half: float | None

    @staticmethod
    def of(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
        """Return the mean with Student's interval. The mean is infinite if the value of any seed is."""
        mean = statistics.fmean(values)
        if len(set(values)) < 2 or not math.isfinite(mean):
            return Estimate(mean, None)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return Estimate(mean, error * float(_student().stdtrit(len(values) - 1, 0.5 + confidence / 2)))

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        return Estimate(self.mean * factor, None if self.half is None else self.half * factor)


def _student() -> Any:
    # Imported here: commands that do not need it start faster.
    return import_module("scipy.special")


def standings_of(
    trials: Sequence[tuple[Sequence[float], Sequence[float]]], loads: Sequence[object] = ()
) -> tuple[list[Standing], int]:
    """Return the standing of each trial, and the number of comparisons that decided them. Smaller values are better.

    A trial is given by the values of its two metrics, one value per seed. Only trials of an equal load compete:
    ``loads`` has the load of each trial, and is empty if all are equal. A difference counts if Holm's step-down
    procedure over all comparisons rejects its t-test, so that all trials of equal settings stand unbeaten in 95% of
    sweeps, however many there are (S. Holm, "A simple sequentially rejective multiple test procedure", 1979).
    """
    groups: dict[object, list[int]] = {}
    for index in range(len(trials)):
        groups.setdefault(loads[index] if loads else None, []).append(index)
    frontier, beaten, chances = set[int](), set[int](), dict[tuple[int, int, int], float]()
    for group in groups.values():
        means = [(statistics.fmean(trials[index][0]), statistics.fmean(trials[index][1])) for index in group]
        frontier |= {group[each] for each in pareto(means)}
        measured = [index for index in group if all(map(math.isfinite, itertools.chain(*trials[index])))]
        if measured:
            beaten |= set(group) - set(measured)  # requests failed, and another trial has no failure
        for one, other in itertools.combinations(measured, 2):
            for metric in (0, 1):
                pairs = zip(trials[one][metric], trials[other][metric], strict=True)
                chances[one, other, metric] = chance_of([theirs - ours for ours, theirs in pairs])
    kept = corrected(list(chances.values()))
    real = {each for each, chance in zip(chances, kept, strict=True) if chance < 1 - CONFIDENCE}
    for one, other in {(one, other) for one, other, _ in real}:
        for winner, loser in ((one, other), (other, one)):
            gains = [statistics.fmean(trials[loser][at]) - statistics.fmean(trials[winner][at]) for at in (0, 1)]
            wins = any(gains[at] > 0 and (one, other, at) in real for at in (0, 1))
            # A loss counts without the correction: it only keeps a mark back.
            loses = any(gains[at] < 0 and chances[one, other, at] < 1 - CONFIDENCE for at in (0, 1))
            if wins and not loses:
                beaten.add(loser)
    found: list[Standing] = ["beaten" if index in beaten else "best" for index in range(len(trials))]
    for index in range(len(trials)):
        if (index in frontier) == (index in beaten):
            found[index] = "near"
    return found, len(chances)


def chance_of(differences: Sequence[float]) -> float:
    """Return the probability of such a mean difference, seed by seed, if there is none: Student's paired test."""
    mean = statistics.fmean(differences)
    if len(set(differences)) < 2:  # one seed, or no chance at work
        return 1.0 if mean == 0 else 0.0
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return 2 * float(_student().stdtr(len(differences) - 1, -abs(mean) / error))


def corrected(chances: Sequence[float]) -> list[float]:
    """Return probabilities corrected for their number, by Holm's procedure."""
    found, worst = [1.0] * len(chances), 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda each: chances[each])):
        worst = max(worst, min(1.0, chances[index] * (len(chances) - rank)))
        found[index] = worst
    return found


def pareto(values: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of the pairs that no other pair beats, by one smaller value and no larger one."""
    efficient: set[int] = set()
    best = float("inf")
    known = [index for index, pair in enumerate(values) if all(each < math.inf for each in pair)]  # and no NaN
    for index in sorted(known, key=lambda index: values[index]):
        x, y = values[index]
        if y < best or any(values[other] == (x, y) for other in efficient):
            efficient.add(index)
            best = min(best, y)
    return efficient


@dataclass(frozen=True)
class Grid:
    """The results of a sweep: for each cell its ``settings`` by axis, and a run for each seed.

    ``points[i][j]`` is the run of cell ``i`` with the seed ``seeds[j]``. Latencies are in seconds. ``arguments`` are
    what all cells have in common, as text and numbers.
    """

    settings: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    points: Sequence[Sequence[SimulatedPoint]]
    slo: Slo | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def axes(self) -> list[str]:
        """Names of the axes."""
        return list(self.settings[0])

    def values(self, cell: int, metric: str) -> list[float]:
        """Return a metric of a cell, one value per seed."""
        return [metric_of(metric).value(point) for point in self.points[cell]]

    def estimate(self, cell: int, metric: str, interval: float = CONFIDENCE) -> Estimate:
        """Return the mean of a metric over a cell's seeds, with Student's interval."""
        return Estimate.of(self.values(cell, metric), interval)

    def load_of(self, cell: int) -> tuple[str, ...]:
        """Return the values of the axes that decide a cell's load; cells of different loads do not compete."""
        loads = ("work", *WORK_FIELDS)
        return tuple(in_words(value) for name, value in self.settings[cell].items() if plain_name(name) in loads)

    def standings(self, x: str, y: str) -> tuple[list[Standing], int]:
        """Return each cell's standing in two metrics, and the number of comparisons (:func:`standings_of`)."""
        sides = [(metric_of(name).sign, name) for name in (x, y)]
        cells = range(len(self.settings))
        signed = [[[sign * value for value in self.values(cell, name)] for sign, name in sides] for cell in cells]
        return standings_of([(ours, theirs) for ours, theirs in signed], [self.load_of(cell) for cell in cells])

    def _check(self, *metrics: str) -> None:
        for metric in metrics:
            least = min(point.summary.completed + point.summary.failed for points in self.points for point in points)
            swept_metric(metric, least, self.slo is not None)

    def _table(self, metrics: Mapping[str, Kind]) -> Table:
        return Table({**dict.fromkeys(self.axes, "text"), **metrics})

    def _labels(self, cell: int) -> list[str]:
        return [in_words(value) for value in self.settings[cell].values()]

    def table(self, *metrics: str, interval: float = CONFIDENCE) -> Table:
        """Return a row for each cell: its settings, and of each metric the mean over seeds and Student's interval.

        The bounds ``<metric>_low`` and ``<metric>_high`` are unknown with one seed. The metrics are those of
        :data:`~tercet_lab.bench.simulated.run_metrics.METRICS`.
        """
        self._check(*metrics)
        kinds: dict[str, Kind] = {f"{each}{part}": "time" for each in metrics for part in ("", "_low", "_high")}
        found = self._table(kinds)
        for cell in range(len(self.settings)):
            row = list[float]()
            for each in metrics:
                estimate = self.estimate(cell, each, interval)
                half = math.nan if estimate.half is None else estimate.half
                row += [estimate.mean, estimate.mean - half, estimate.mean + half]
            found.append(*self._labels(cell), *row)
        return found

    def difference(self, axis: str, one: Any, other: Any, metric: str, interval: float = CONFIDENCE) -> Table:
        """Return how much larger a metric is with the value ``one`` of an axis than with ``other``, seed by seed.

        There is a row for each combination of the other axes: the means of both, ``difference`` with the bounds of
        Student's paired interval, and ``chance``, the probability of such a difference if there is none, corrected for
        the number of rows by Holm's procedure. Raise :class:`~tercet.protocol.BadRequest` for an unknown axis or value.
        """
        self._check(metric)
        refuse(axis not in self.axes, "axis", f"there is no {axis}; the axes are {', '.join(self.axes)}")
        if len(self.seeds) < 2:
            raise BadRequest("seeds: one seed has no differences between seeds; sweep with seeds=2 or more", "seeds")
        sides = list[dict[tuple[str, ...], int]]()
        for value in (one, other):
            cells = [cell for cell, each in enumerate(self.settings) if in_words(each[axis]) == in_words(value)]
            if not cells:
                known = ", ".join(dict.fromkeys(in_words(each[axis]) for each in self.settings))
                raise BadRequest(f"axis: {axis} has no value {in_words(value)}; its values are {known}", "axis")
            place = self.axes.index(axis)
            sides.append({tuple(self._labels(cell)[:place] + self._labels(cell)[place + 1 :]): cell for cell in cells})
        others = [name for name in self.axes if name != axis]
        columns = ("one", "other", "difference", "low", "high", "chance")
        found = Table({**dict.fromkeys(others, "text"), **dict.fromkeys(columns, "time")})
        rows = list[tuple[Any, ...]]()
        for labels, cell in sides[0].items():
            ours, theirs = self.values(cell, metric), self.values(sides[1][labels], metric)
            differences = [mine - its for mine, its in zip(ours, theirs, strict=True)]
            known = all(map(math.isfinite, differences))
            estimate = Estimate.of(differences, interval) if known else Estimate(math.nan, None)
            half = 0.0 if estimate.half is None else estimate.half
            chance = chance_of(differences) if known else 1.0
            means = (statistics.fmean(ours), statistics.fmean(theirs))
            rows.append((*labels, *means, estimate.mean, estimate.mean - half, estimate.mean + half, chance))
        for row, chance in zip(rows, corrected([row[-1] for row in rows]), strict=True):
            found.append(*row[:-1], chance)
        return found

    def save(self, path: str | Path) -> None:
        """Write the settings and results into a ``.json`` file, that of ``tercet sim --over``, for ``lab.load``.

        There, settings are texts.
        """
        # Imported here: that module makes grids into reports.
        from tercet_lab.bench.simulated.sweep import report_of

        file = Path(path).expanduser()
        if file.suffix != ".json":
            raise BadRequest(f"path: {path} must end with .json; grid.table() writes CSV and Parquet", "path")
        write_whole(file, report_of(self, "ttft.mean", "e2el.mean").to_json())

    def frontier(self, x: str, y: str) -> Table:
        """Return the standing of each cell in two metrics: ``best`` if no cell of its load beats it, ``beaten``.

        ``near`` cells are on or off the frontier by chance (:func:`standings_of`). Cells of different loads, which the
        axes of the workload define, do not compete.
        """
        self._check(x, y)
        found = self._table({x: "time", y: "time", "standing": "text"})
        for cell, standing in enumerate(self.standings(x, y)[0]):
            found.append(*self._labels(cell), *(self.estimate(cell, each).mean for each in (x, y)), standing)
        return found


def _kind_of(values: Sequence[Any]) -> Kind:
    try:
        for value in values:
            float(in_words(value))
    except ValueError:
        return "text"
    return "time"


def grid_of(
    base: Experiment, over: Mapping[str, Sequence[Any]], seeds: int = 1, jobs: int = 1, cached: Path | None = None,
    note: Note = lambda _: None, records: Path | None = None,
) -> Grid:  # fmt: skip
    """Run each combination of the axes' values with seeds from the experiment's on.

    ``note`` gets a line with the settings of each cell, and those about its runs. ``records`` is a file for the
    requests of all runs, with a column for each axis.
    """
    # Imported here: that module reads files into grids.
    from tercet_lab.run_files import RECORD_COLUMNS, add_records

    if records is not None:
        require_table_file(records, "records")
    cells = cells_of(base, over)
    used = tuple(range(base.seed, base.seed + seeds))

    def begin(index: int) -> None:
        if index % seeds == 0:
            note(", ".join(f"{name}={in_words(value)}" for name, value in cells[index // seeds][0].items()))

    experiments = [msgspec.structs.replace(each, seed=seed) for _, each in cells for seed in used]
    # The names of the axes' columns differ from those of requests.
    columns = {name: name.replace("-", "_") for name in over}
    columns |= {name: f"over_{column}" for name, column in columns.items() if column in RECORD_COLUMNS}
    rows = Table({**{columns[name]: _kind_of(values) for name, values in over.items()}, **RECORD_COLUMNS})

    def keep(index: int, requests: Requests) -> None:
        settings, experiment = cells[index // seeds][0], experiments[index]
        cells_of_axes: dict[str, Any] = {columns[name]: in_words(value) for name, value in settings.items()}
        cells_of_axes |= {name: float(value) for name, value in cells_of_axes.items() if rows.columns[name] != "text"}
        add_records(rows, requests, experiment.name, experiment.work.rate, experiment.seed, settings=cells_of_axes)

    points = run_all(experiments, jobs, cached, note, begin, None if records is None else keep)
    if records is not None:
        rows.write(records)
    runs = [tuple(points[at : at + seeds]) for at in range(0, len(points), seeds)]
    rate = base.work.rate
    load = {"rate": "inf" if rate == math.inf else rate}  # JSON has no number for infinity
    load |= {"over": {name: [in_words(value) for value in values] for name, values in over.items()}}
    return Grid([settings for settings, _ in cells], used, runs, base.limits, {**base.arguments(), **load})
