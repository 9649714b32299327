"""One simulated experiment, described by typed parts, and its run.

Flags of ``tercet sim``, and scripts by ``import tercet.lab``, make the same :class:`Experiment`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tercet.decisions.scheduling import load_scheduling
from tercet.programs import BUILT_IN, load_program
from tercet.protocol import BadRequest
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings import Source, declared, decode_settings, encode_settings
from tercet.settings.fleet_settings import Objectives
from tercet_lab import DEFAULT_PROFILE
from tercet_lab.bench.results import Summary, achieved, summarize
from tercet_lab.bench.simulated.moving_fleet import MOVE_COLUMNS
from tercet_lab.bench.simulated.recording import ENGINE_COLUMNS, Record
from tercet_lab.bench.simulated.scenario import (
    Fault,
    FleetSpec,
    PlannedWorkload,
    SyntheticWorkload,
    checked_fleet,
    parse_fleet,
    slo_of_class,
)
from tercet_lab.bench.simulated.simulation import SimulatedPoint, SimulationReport, made_good, point_of, shown
from tercet_lab.bench.simulated.steady import Steady, steady_of
from tercet_lab.bench.simulated.virtual_run import Outcome, run_once
from tercet_lab.planner_settings import NO_PLANNER, MovingSettings, PlannerSettings
from tercet_lab.sim import EngineOptions, load_profile, options_from
from tercet_lab.slo import Goodput, Slo
from tercet_lab.tables import Kind, Requests, Table

Note = Callable[[str], object]
Work = SyntheticWorkload | PlannedWorkload


@dataclass(frozen=True, init=False)
class Fleet:
    """Simulated engines: ``Fleet("2P2D")``, ``Fleet("prefill=1,decode=2@host")`` or ``Fleet(prefill=2, decode=2)``.

    ``store`` is the room of a store in tokens, such as ``"8M"``, or ``"8M+100M"`` in memory and on disk.
    ``profile`` is the name of a shipped profile (``tercet bench profile`` lists them) or a JSON file. ``options`` are
    those of :class:`~tercet_lab.sim.EngineOptions`, for every engine, such as ``total_blocks=2000``. Raise
    :class:`~tercet.protocol.BadRequest` for an invalid fleet.
    """

    spec: FleetSpec
    profile: str
    options: Mapping[str, Any]
    text: str | None  # as `--fleet` has it; None if no line says it

    def __init__(
        self, engines: str = "", *, prefill: int = 0, decode: int = 0, both: int = 0, store: int | str = "",
        profile: str = DEFAULT_PROFILE, **options: Any,
    ) -> None:  # fmt: skip
        counts = {"prefill": prefill, "decode": decode, "both": both}
        given = ",".join(f"{role}={count}" for role, count in counts.items() if count)
        if bool(engines) == bool(given):
            raise BadRequest('fleet: give either a text such as "2P2D", or numbers of engines such as both=4', "fleet")
        self._set((engines or given) + (f",store={store}" if store else ""), profile, options)

    def _set(self, text: str, profile: str, options: Mapping[str, Any]) -> None:
        options_from(EngineOptions(), options)
        parts = {"spec": parse_fleet(text), "profile": profile, "options": dict(options), "text": text}
        self.__dict__.update(parts)

    @staticmethod
    def parse(text: str, profile: str, options: Mapping[str, Any]) -> Fleet:
        """Return the fleet of ``--fleet``, ``--profile`` and ``--option``."""
        found = object.__new__(Fleet)
        found._set(text, profile, options)
        return found

    @staticmethod
    def read(path: str | Path, *, profile: str = DEFAULT_PROFILE, **options: Any) -> Fleet:
        """Return the fleet of a YAML file, as ``--fleet FILE`` does."""
        return Fleet.parse(str(path), profile, options)

    def write(self, path: str | Path) -> Fleet:
        """Write the engines and faults as a YAML file, and return the fleet that has them from there."""
        import yaml

        Path(path).write_text(yaml.safe_dump(msgspec.to_builtins(self.spec), sort_keys=False), encoding="utf-8")
        return Fleet.parse(str(path), self.profile, self.options)

    def with_(self, *, profile: str | None = None, options: Mapping[str, Any] | None = None) -> Fleet:
        """Return the fleet with another profile, or other options of its engines."""
        found = object.__new__(Fleet)
        found.__dict__.update(self.__dict__)
        if profile is not None:
            found.__dict__["profile"] = profile
        if options is not None:
            options_from(EngineOptions(), options)
            found.__dict__["options"] = dict(options)
        return found

    def fault(
        self, engine: str, at: float, down: float | None = None, kind: Literal["die", "freeze", "drain"] = "die"
    ) -> Fleet:
        """Return the fleet with a fault: ``engine`` fails at second ``at``, for ``down`` seconds (None: for good)."""
        faults = (*self.spec.faults, Fault(engine=engine, at=at, down=down, kind=kind))
        found = object.__new__(Fleet)
        spec = checked_fleet(msgspec.structs.replace(self.spec, faults=faults))
        found.__dict__.update(self.__dict__, spec=spec, text=None)
        return found

    def __str__(self) -> str:
        return self.text or ",".join(f"{group.role}={group.count}" for group in self.spec.engines)


class Planner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A planner of the number and the roles of engines.

    ``by``: ``simulate``, ``oracle``, ``file.py:function``, or a function from
    :class:`~tercet.decisions.planning.Observed` to :class:`~tercet.decisions.planning.WantedPlan`. Times are in
    seconds; ``fewest`` and ``most`` engines are those of the fleet by default.
    """

    by: str | Callable[..., Any] = "simulate"
    interval: float = 15.0
    fewest: int | None = None
    most: int | None = None
    margin: float = 0.1
    start_time: int = 30

    @property
    def settings(self) -> PlannerSettings:
        """The settings of ``tercet planner``."""
        return PlannerSettings(
            interval_s=self.interval, fewest=self.fewest, most=self.most, margin=self.margin, start_s=self.start_time
        )


def moves(policy: str | Iterable[str] = (), **settings: Any) -> MovingSettings:
    """Return the router's settings of moves, sessions and roles: those of ``tercet sim``, with underscores.

    ``policy`` is that of ``--reschedule``, one or several; ``threshold=0.2`` is ``reschedule_threshold=0.2``. Raise
    :class:`~tercet.protocol.BadRequest` for an unknown setting or an invalid value.
    """
    known = {each.key for each in declared(MovingSettings)}
    given = dict[str, Any]()
    for name, value in settings.items():
        key = name.replace("_", "-")
        given[key if key in known or f"reschedule-{key}" not in known else f"reschedule-{key}"] = value
    if policies := [policy] if isinstance(policy, str) else list(policy):
        given["reschedule"] = policies
    return decode_settings(MovingSettings, Source(given, origin="moves: "))


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the results of a simulation depend on. Equal experiments have equal results.

    - ``program``: an async generator function, the name of a built-in one, or ``file.py:function``; ``args`` are its
      keyword parameters.
    - ``fleet``, ``work`` and ``seed``: the engines, the requests, and the source of all randomness.
    - ``slo``: limits in seconds that define attainment and goodput; None: the objectives of ``moves``, if it has any.
    - ``moves``: the router's settings of moves, sessions, objectives and roles; ``planner`` plans the fleet; None: that
      of ``moves``. A planner without objectives has those of ``slo``.
    - ``scheduling``: a scheduling file for picks; None: the built-in ones.
    - ``record``: what is recorded. It changes no other result. ``steady``: the warm-up that
      :func:`~tercet_lab.bench.simulated.steady.steady_of` finds is left out of all rates, means and shares of requests.
    - ``predict_error``: policies believe in another length of each answer: the true one times a lognormal factor with
      median 1 and this deviation of its logarithm, drawn by ``seed``. Programs read it in the header
      :data:`~tercet_lab.bench.simulated.scenario.PREDICTED`; ``auto`` uses it. None: there is no such header, and
      ``auto`` knows ``max_tokens``, which is the true length.
    """

    program: str | Callable[..., Any]
    args: Mapping[str, Any] = {}
    fleet: Fleet = msgspec.field(default_factory=lambda: Fleet("both=2"))
    work: Work
    seed: int = 0
    slo: Slo | None = None
    moves: MovingSettings = MovingSettings()
    planner: Planner | None = None
    scheduling: str | None = None
    record: Record = Record()
    steady: bool = False
    predict_error: float | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for an invalid error of predictions."""
        if self.predict_error is not None and not 0 <= self.predict_error < math.inf:
            raise BadRequest(f"predict_error: is {self.predict_error:g}, and must be 0 or more", "predict_error")

    @property
    def settings(self) -> MovingSettings:
        """The router's settings of moves, with the planner and its objectives."""
        if self.planner is None:
            return self.moves
        wanted, by = self.moves.objectives, self.planner.by
        if not wanted.any and self.slo is not None:
            wanted = Objectives(ttft=self.slo.ttft, tpot=self.slo.tpot)
        return msgspec.structs.replace(
            self.moves, objectives=wanted, planner=by if isinstance(by, str) else _function_name(by),
            planning=self.planner.settings,
        )  # fmt: skip

    @property
    def policy(self) -> str | Callable[..., Any]:
        """The planner's policy: its name, or a function."""
        return self.moves.planner if self.planner is None else self.planner.by

    @property
    def limits(self) -> Slo | None:
        """The limits of a good request; None without any."""
        wanted = self.settings.objectives
        return self.slo or (slo_of_class(wanted) if wanted.any or wanted.classes else None)

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program if isinstance(self.program, str) else _function_name(self.program)

    def at(self, rate: float | None) -> Experiment:
        """Return the experiment at another rate of requests per second; None: the times of a trace."""
        return msgspec.structs.replace(self, work=msgspec.structs.replace(self.work, rate=rate))

    def run(self, note: Note = lambda _: None, on_row: Callable[[Outcome], object] | None = None) -> Run:
        """Simulate, inside or outside of a running event loop, and return the results.

        ``note`` gets lines about the run, such as its speed. ``on_row`` is called after each row, and may take the rows
        away: the run then has those that are left.

        Raise :class:`~tercet.protocol.BadRequest` for invalid arguments, and the program's ``BadRequest`` if it refuses
        every request.
        """
        rate, fleet, settings = self.work.rate, self.fleet, self.settings
        program, spec = load_program(self.program, self.args), fleet.spec
        options = options_from(EngineOptions(), fleet.options)
        # Loaded for each run: its plugins remember requests.
        scheduling = None if self.scheduling is None else load_scheduling(Path(self.scheduling).expanduser())
        began, worked = time.perf_counter(), time.process_time()
        planning = None
        if settings.planner != NO_PLANNER:
            planning = provided(PARTS, "simulated-planning", "planner", "--planner")(self)
        if planning is not None:
            spec = planning.with_spare(spec)
        outcome = run_once(
            program, spec, fleet.profile, options, self.work, self.seed, scheduling, settings, self.record,
            None if planning is None else planning.companion, predict_error=self.predict_error,
            **({} if on_row is None else {"on_row": on_row}),
        )  # fmt: skip
        took, cpu = time.perf_counter() - began, time.process_time() - worked
        requests = outcome.requests
        simulated = float(max(requests["ended"], default=0.0))
        pace = f"{simulated / took:.1f} times real time, {simulated / cpu:.1f} by CPU time"
        note(f"rate {shown(rate)}: {simulated:.1f} s in {took:.1f} s ({cpu:.1f} s of CPU): {pace}")
        drawn = [requests[name] for name in ("input_tokens", "output_tokens")]
        if any(len(set(each.tolist())) > 1 for each in drawn):
            tokens = (f"{np.mean(each):.4g} ± {np.std(each):.3g}" for each in drawn)
            note(f"rate {shown(rate)}: tokens of the requests (mean ± deviation): {' in, '.join(tokens)} out")
        limits = self.limits
        requests.judge(limits)
        about, kept = {**self.arguments(), "rate": rate}, requests
        if self.steady:
            steady = steady_of(requests, about, limits)
            note(f"rate {shown(rate)}: {steady}")
            kept = steady.requests
        point = point_of(rate, outcome, limits, kept)
        if planning is not None:
            point = msgspec.structs.replace(point, planned=planning.result(simulated))
            for line in planning.said(point.metrics()):
                note(f"rate {shown(rate)}: {line}")
        for flip in point.flips:
            note(f"rate {shown(rate)}: {flip.at:.1f} s: {', '.join(flip.engines)} -> {flip.role}: {flip.reason}")
        if point.summary.attainment is not None:
            note(f"rate {shown(rate)}: {point.summary.attainment:.2%} of the requests met the SLO")
        for name, share in point.classes.items():
            note(f"rate {shown(rate)}: {share:.2%} of class {name} met its objectives")
        if outcome.retries:
            note(f"rate {shown(rate)}: {made_good(outcome)}")
        if outcome.first_error is not None:
            if isinstance(outcome.first_error, BadRequest) and not point.summary.completed and on_row is None:
                raise outcome.first_error
            note(f"rate {shown(rate)}: {point.summary.failed} requests failed; the first error: {outcome.first_error}")
        paid = outcome.paid_s if point.planned is None else point.planned.engine_seconds
        point = msgspec.structs.replace(point, engine_hours=paid / 3600)
        return Run(
            requests=requests, engines=outcome.engines, moves=outcome.move_rows, plans=_plans_of(point), slo=limits,
            engine_hours=paid / 3600, experiment=self, point=point, about=about,
        )  # fmt: skip

    def point(self, rate: float | None, note: Note = lambda _: None) -> SimulatedPoint:
        """Simulate at a rate, and return the results without rows of requests."""
        found = self.at(rate).run(note).point
        assert found is not None
        return found

    def report(
        self, rates: Sequence[float | None], label: str, note: Note = lambda _: None,
        keep: Callable[[Run], object] = lambda _: None,
    ) -> SimulationReport:  # fmt: skip
        """Simulate at each rate. ``label`` is the name of the experiment's line in figures; ``keep`` gets each run."""
        points = list[SimulatedPoint]()
        for rate in rates:
            run = self.at(rate).run(note)
            keep(run)
            points += [] if run.point is None else [run.point]
        return SimulationReport(
            label=label, program=self.name, arguments=self.arguments(), seed=self.seed,
            model=load_profile(self.fleet.profile).name, points=tuple(points),
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the rate, for the file of a report."""
        work = msgspec.to_builtins(self.work)
        del work["rate"]
        if work.get("output_lengths", "") is None:  # a part of the file only where it says something
            del work["output_lengths"]
        if work.get("rows", "") is None:
            del work["rows"]
        elif "rows" in work:  # by a hash of their contents, since a report does not copy a trace
            work["rows"] = hashlib.sha256(msgspec.json.encode(work["rows"])).hexdigest()
        slo = None if self.slo is None else msgspec.to_builtins(Goodput.of(self.slo))
        return {
            "program": self.name, "program_args": {name: _as_text(value) for name, value in self.args.items()},
            "fleet": str(self.fleet), "profile": self.fleet.profile, "workload": work,
            "options": {name: _as_text(value) for name, value in self.fleet.options.items()},
            "seed": self.seed, "slo": slo, "scheduling": self.scheduling,
            "moving": encode_settings(self.settings), **({"steady": True} if self.steady else {}),
            **({} if self.predict_error is None else {"predict_error": self.predict_error}),
        }  # fmt: skip

    # ---- the command line ------------------------------------------------------------------------------------

    def command(self) -> str:
        """Return the line of ``tercet sim`` that repeats this experiment.

        Raise :class:`~tercet.protocol.BadRequest` that names the part which no command line can express.
        """
        words = ["tercet", "sim", "--program", _named("program", self.program)]
        for name, value in self.args.items():
            text = _named(f"args: {name}", value) if callable(value) else _as_text(value)
            words += ["--program-arg", f"{name}={text}"]
        if self.fleet.text is None:
            raise BadRequest("fleet: a command line takes faults from a file; use fleet.write('fleet.yaml')", "fleet")
        words += ["--fleet", self.fleet.text, "--profile", self.fleet.profile]
        for name, value in self.fleet.options.items():
            words += ["--option", f"{name}={_as_text(value)}"]
        words += [*self.work.flags(), "--seed", str(self.seed)]
        if self.slo is not None:
            limits = msgspec.to_builtins(Goodput.of(self.slo))
            words += ["--goodput", ",".join(f"{name}:{limit:g}" for name, limit in limits.items() if limit is not None)]
        settings = self.settings
        if self.planner is not None and not isinstance(self.planner.by, str):
            settings = msgspec.structs.replace(settings, planner=_named("planner", self.planner.by))
        words += _setting_flags(settings)
        words += ["--steady"] if self.steady else []
        words += [] if self.predict_error is None else ["--predict-error", f"{self.predict_error:.12g}"]
        return shlex.join(words + (["--scheduling", self.scheduling] if self.scheduling else []))


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _as_text(value: Any) -> str:
    if callable(value):
        return _function_name(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(part: str, function: str | Callable[..., Any]) -> str:
    """Return the name that a command line has for a function: ``file.py:function``, or a built-in program's."""
    if isinstance(function, str):
        return function
    built_in = next((name for name, each in BUILT_IN.items() if each is function), None)
    if built_in is not None:
        return built_in
    name = _function_name(function)
    file = Path(getattr(inspect.getmodule(function), "__file__", None) or "")
    if getattr(function, "__qualname__", name) != name or not file.is_file():
        raise BadRequest(f"{part}: a command line cannot name {name}; define it at the top of a .py file", part)
    return f"{file}:{name}"


def _setting_flags(settings: MovingSettings) -> list[str]:
    """Return the flags of the settings that are not the defaults."""
    words = list[str]()
    for each in declared(MovingSettings):
        value = attrgetter(".".join(each.path))(settings)
        if value == each.default:
            continue
        flag = each.any_flag
        if not flag:
            raise BadRequest(f"{each.key}: has no flag; leave it at its default, {each.shown_default}", each.key)
        if each.is_mapping:
            words += [word for key, item in value.items() for word in (flag, f"{key}={item}")]
        elif each.is_list:
            words += [word for item in value for word in (flag, _item(item))]
        elif isinstance(value, bool):
            words.append(flag.partition("/")[0 if value else 2] or flag)
        else:
            words += [flag, str(value)]
    return words


def _item(item: Any) -> str:
    """Return an item of a repeated flag; a struct, such as a class of objectives, is NAME,KEY=VALUE,..."""
    if not isinstance(item, msgspec.Struct):
        return str(item)
    fields = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    return ",".join(f"{name}={value}" for name, value in fields.items())


PLAN_COLUMNS: Mapping[str, Kind] = {
    "at": "time", "plan": "text", "flipped": "count", "started": "count", "stopped": "count", "reason": "text",
    "expected": "time", "came": "time",
}  # fmt: skip


def _plans_of(point: SimulatedPoint) -> Table:
    found = Table(PLAN_COLUMNS)
    for each in () if point.planned is None else point.planned.plans:
        shares = (math.nan if share is None else share for share in (each.expected, each.came))
        found.append(each.at, each.plan, each.flipped, each.started, each.stopped, each.reason, *shares)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one run, simulated or measured, as tables, with what is asked most.

    - ``requests``: one row for each request (:class:`~tercet_lab.tables.Requests`).
    - ``engines``: the load of each engine over time, if ``record`` asked for it. ``moves``: one row for each move.
      ``plans``: one row for each plan of a planner, with the share of requests within the objectives that it
      ``expected``, and that ``came`` until the next plan. They are empty for a measured run.
    - ``slo``: the limits in seconds that ``attainment`` and ``goodput`` use; None without limits.
    - ``engine_hours``: the time for which engines were paid; NaN for a measured run.
    - ``experiment``: what was simulated, or None; ``point``: the values of ``tercet sim``, or None; ``about``: what was
      simulated or measured in text and numbers, as a saved file has it.
    """

    requests: Requests
    engines: Table = field(default_factory=lambda: Table(ENGINE_COLUMNS))
    moves: Table = field(default_factory=lambda: Table(MOVE_COLUMNS))
    plans: Table = field(default_factory=lambda: Table(PLAN_COLUMNS))
    slo: Slo | None = None
    engine_hours: float = math.nan
    experiment: Experiment | None = None
    point: SimulatedPoint | None = None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def summary(self) -> Summary:
        """Rates, and the distributions of TTFT, TPOT and the others, in seconds: ``run.summary.ttft.p99``."""
        return self.steady.summary if self.about.get("steady") else summarize(self.requests, self.slo)

    @cached_property
    def steady(self) -> Steady:
        """The requests without the warm-up: ``run.steady.summary``, ``run.steady.left_out``."""
        return steady_of(self.requests, self.about, self.slo)

    @property
    def attainment(self) -> float | None:
        """Share of the requests that met the SLO; None without one."""
        return self.summary.attainment

    @property
    def goodput(self) -> float | None:
        """Requests per second that met the SLO, in the steady part of the run; None without an SLO."""
        return achieved(self.summary.flat(), "goodput")

    def save(self, path: str | Path) -> None:
        """Write all tables into a ``.json`` file for :func:`tercet.lab.load`."""
        # Imported here: that module reads files into runs.
        from tercet_lab.run_files import save

        save(self, path)

    def under(self, slo: Slo | None) -> Run:
        """Return the same run, judged by other limits."""
        requests = Requests().extend(self.requests)
        requests.limits = self.requests.limits
        requests.judge(slo)
        return replace(self, requests=requests, slo=slo)
