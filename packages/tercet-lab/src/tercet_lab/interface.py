"""The functions of ``tercet.lab``: one call for one question."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from tercet.protocol import BadRequest
from tercet.settings.declaration import near
from tercet_lab.bench.simulated.capacity import Capacity, capacity_of
from tercet_lab.bench.simulated.experiment import Experiment, Fleet, Planner, Run, Work
from tercet_lab.bench.simulated.experiment import moves as moves_of
from tercet_lab.bench.simulated.grid import Grid, grid_of
from tercet_lab.bench.simulated.recording import Record
from tercet_lab.bench.simulated.virtual_run import Outcome
from tercet_lab.planner_settings import MovingSettings
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests

Program = str | Callable[..., Any]


class Parts(TypedDict, total=False):
    """The parts of an :class:`Experiment`; a text stands for the policy of moves, or the planner, that it names."""

    program: Program
    args: Mapping[str, Any] | None
    seed: int
    slo: Slo | None
    moves: MovingSettings | str | None
    planner: Planner | Program | None
    scheduling: str | None
    record: Record | None
    steady: bool
    predict_error: float | None


def experiment(
    what: Program | Experiment | None, fleet: Fleet | str | None, work: Work | None, parts: Mapping[str, Any]
) -> Experiment:
    """Return the experiment of these parts: a new one, or ``what`` with changes. None keeps the default."""
    given: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
    given |= {name: value for name, value in (("fleet", fleet), ("work", work)) if value is not None}
    if what is not None and not isinstance(what, Experiment):
        given["program"] = what
    known = Experiment.__struct_fields__
    for name in given:
        if name not in known:
            raise BadRequest(f"{name}: is not a part of an experiment; {near(name, known)}", name)
    typed: dict[str, tuple[type, Callable[[Any], Any]]] = {
        "fleet": (Fleet, Fleet), "moves": (MovingSettings, moves_of), "planner": (Planner, Planner),
    }  # fmt: skip
    for name, (kind, make) in typed.items():
        if name in given and not isinstance(given[name], kind):
            given[name] = make(given[name])
    if isinstance(what, Experiment):
        return msgspec.structs.replace(what, **given)
    for name in ("program", "fleet", "work"):
        if name not in given:
            raise BadRequest(f"{name}: is missing; give a program, a fleet and a workload, or an Experiment", name)
    return Experiment(**given)


def simulate(
    what: Program | Experiment | None = None,
    /,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    note: Callable[[str], object] = lambda _: None,
    **parts: Unpack[Parts],
) -> Run:
    """Simulate one run, inside or outside of a running event loop (a notebook), and return its tables.

    ``what`` is a program, that is a function, a built-in name or ``file.py:function``; or an :class:`Experiment`, of
    which the other arguments replace parts. ``note`` gets lines of text, such as the speed.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid part, and errors of the program itself as
    :class:`~tercet.protocol.ProgramFailed`.
    """
    return experiment(what, fleet, work, parts).run(note)


def stream(
    what: Program | Experiment | None = None,
    /,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    every: int = 50_000,
    note: Callable[[str], object] = lambda _: None,
    **parts: Unpack[Parts],
) -> Generator[Requests]:
    """Simulate one run, and yield its requests in tables of ``every`` rows as they end, the last one shorter.

    Memory is bounded however many requests there are: rows that were yielded are not kept. The simulation waits while
    two tables wait for the caller, and ends if the caller stops. Arguments and errors are those of :func:`simulate`.
    """
    given = experiment(what, fleet, work, parts)
    if given.steady:
        raise BadRequest("steady: a stream keeps no requests to find a warm-up in; give warm_up to the work", "steady")
    if every < 1:
        raise BadRequest(f"every: is {every}, and must be at least 1 row", "every")
    return _batches(given, every, note)


class _Stopped(Exception):
    """The caller takes no more batches."""


def _batches(given: Experiment, every: int, note: Callable[[str], object]) -> Generator[Requests]:
    waiting: queue.Queue[Requests | Exception | None] = queue.Queue(maxsize=2)
    stopped = threading.Event()

    def put(item: Requests | Exception | None) -> None:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
        raise _Stopped

    def take(outcome: Outcome) -> None:
        if len(outcome.requests) >= every:
            rows, outcome.requests = outcome.requests, Requests(outcome.requests.limits)
            rows.judge(given.limits)
            put(rows)

    def simulated() -> None:
        try:
            try:
                left = given.run(note, take).requests
                if len(left):
                    put(left)
                put(None)
            except Exception as error:
                put(error)
        except _Stopped:
            pass

    thread = threading.Thread(target=simulated, name="lab.stream", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not None:  # the thread puts None or its error last, whatever happens
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()


def sweep(
    what: Program | Experiment | None = None,
    /,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    over: Mapping[str, Sequence[Any]],
    seeds: int = 1,
    jobs: int = 1,
    cache: str | Path | None = None,
    records: str | Path | None = None,
    note: Callable[[str], object] = lambda _: None,
    **parts: Unpack[Parts],
) -> Grid:
    """Simulate every combination of the values of ``over``, each with ``seeds`` seeds from ``seed`` on.

    ``over`` maps settings to values: a part of the experiment (``program``, ``fleet``, ``work``, ``scheduling``,
    ``planner``, ``moves``, ``slo``), ``profile``, a field of the workload (``rate``, ``burstiness``, ``input_mean``,
    ...), an engine option, a setting of moves (``reschedule_threshold``), or a parameter of the program. All cells have
    the same seeds, so the same arrivals. ``jobs`` processes run at once. ``cache`` is a folder in which results are
    kept by the contents of the experiment, of the files that it names, and of Tercet's code. ``records`` is a ``.csv``
    or ``.parquet`` file for the requests of all runs, with a column for each axis; it reads nothing from the cache.
    Other arguments are those of :func:`simulate`.

    Raise :class:`~tercet.protocol.BadRequest` for an unknown setting, before anything runs.
    """
    folder, file = (None if path is None else Path(path).expanduser() for path in (cache, records))
    return grid_of(experiment(what, fleet, work, parts), over, seeds, jobs, folder, note, file)


def max_rate(
    what: Program | Experiment | None = None,
    /,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    attainment: float = 0.9,
    seeds: int = 3,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.02,
    note: Callable[[str], object] = lambda _: None,
    **parts: Unpack[Parts],
) -> Capacity:
    """Search the largest rate at which the share ``attainment`` of the requests meets the SLO, with an interval.

    The experiment is given as to :func:`simulate`; the rate of its ``work`` is where the search begins. Each of
    ``seeds`` seeds is searched by itself (:func:`~tercet_lab.bench.simulated.capacity.capacity_of` says how), within
    ``low`` and ``high`` if they are given, until two rates are within the share ``tolerance``.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid argument, or if no rate is the largest.
    """
    found = experiment(what, fleet, work, parts)
    return capacity_of(found, attainment, seeds=seeds, low=low, high=high, tolerance=tolerance, note=note)
