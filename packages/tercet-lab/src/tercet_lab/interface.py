"""The functions of ``tercet.lab``: one call for one question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.capacity import Capacity, capacity_of
from tercet_lab.bench.simulated.experiment import Experiment, Fleet, Planner, Run, Work
from tercet_lab.bench.simulated.experiment import moves as moves_of
from tercet_lab.bench.simulated.moving_fleet import MovingSettings
from tercet_lab.bench.simulated.recording import Record
from tercet_lab.tables import Slo


def experiment(
    program: str | Callable[..., Any],
    fleet: Fleet | str,
    work: Work,
    *,
    args: Mapping[str, Any] | None = None,
    seed: int = 0,
    slo: Slo | None = None,
    moves: MovingSettings | str | None = None,
    planner: Planner | str | Callable[..., Any] | None = None,
    scheduling: str | None = None,
    record: Record | None = None,
) -> Experiment:
    """Return the experiment of these parts; a text stands for the fleet, the policy or the planner that it names."""
    return Experiment(
        program=program,
        args=args or {},
        fleet=Fleet(fleet) if isinstance(fleet, str) else fleet,
        work=work,
        seed=seed,
        slo=slo,
        moves=moves if isinstance(moves, MovingSettings) else moves_of(moves or ()),
        planner=planner if planner is None or isinstance(planner, Planner) else Planner(planner),
        scheduling=scheduling,
        record=record or Record(),
    )


def simulate(
    program: str | Callable[..., Any] | Experiment,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    note: Callable[[str], object] = lambda _: None,
    **parts: Any,
) -> Run:
    """Simulate one run, inside or outside of a running event loop (a notebook), and return its tables.

    ``program`` is a function, a built-in name, ``file.py:function``, or a whole :class:`Experiment`. ``parts`` are the
    other fields of :class:`Experiment`: ``args``, ``seed``, ``slo``, ``moves``, ``planner``, ``scheduling``,
    ``record``. ``note`` gets lines of text, such as the speed.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid part, and errors of the program itself as
    :class:`~tercet.protocol.ProgramFailed`.
    """
    return _experiment_of(program, fleet, work, parts).run(note)


def max_rate(
    program: str | Callable[..., Any] | Experiment,
    fleet: Fleet | str | None = None,
    work: Work | None = None,
    *,
    attainment: float = 0.9,
    seeds: int = 3,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.02,
    note: Callable[[str], object] = lambda _: None,
    **parts: Any,
) -> Capacity:
    """Search the largest rate at which the share ``attainment`` of the requests meets the SLO, with an interval.

    The experiment is given as to :func:`simulate`; the rate of its ``work`` is where the search begins. Each of
    ``seeds`` seeds is searched by itself (:func:`~tercet_lab.bench.simulated.capacity.capacity_of` says how), within
    ``low`` and ``high`` if they are given, until two rates are within the share ``tolerance``.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid argument, or if no rate is the largest.
    """
    found = _experiment_of(program, fleet, work, parts)
    return capacity_of(found, attainment, seeds=seeds, low=low, high=high, tolerance=tolerance, note=note)


def _experiment_of(
    program: str | Callable[..., Any] | Experiment, fleet: Fleet | str | None, work: Work | None, parts: dict[str, Any]
) -> Experiment:
    if isinstance(program, Experiment):
        return msgspec.structs.replace(program, **parts)
    if fleet is None or work is None:
        missing = "fleet" if fleet is None else "work"
        raise BadRequest(f"{missing}: is missing; give a program, a fleet and a workload, or an Experiment", missing)
    return experiment(program, fleet, work, **parts)
