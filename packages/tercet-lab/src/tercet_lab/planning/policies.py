"""The policies that ``--planner`` names: simulate, oracle (which knows the trace), or a user's function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tercet.decisions.planning import Observed, ObservedRequest, Policy, WantedPlan
from tercet.decisions.scheduling.registry import load_module, user_file
from tercet.fleet.policy_views import BLOCK, block_names
from tercet.protocol import BadRequest, Request
from tercet_lab.planning.crystal import ProfileCapacity
from tercet_lab.planning.forecast import Forecast
from tercet_lab.planning.planner import Evaluate, Planner
from tercet_lab.planning.planner_settings import PlannerSettings
from tercet_lab.sim.engine_options import max_tokens_of

LOOKED_AHEAD_S = 45.0
"""Seconds of the trace that the oracle looks at, after the time in which an engine starts."""


class Foresight:
    """A forecaster that knows the trace; implements :class:`~tercet_lab.planning.forecast.Forecasting`."""

    def __init__(self, trace: Sequence[ObservedRequest]) -> None:
        self._trace = trace

    def look(self, now: float, since: float, arrivals: Sequence[ObservedRequest], ahead_s: float) -> Forecast:
        """Return the requests of the trace in the next ``ahead_s`` + :data:`LOOKED_AHEAD_S` seconds."""
        del since, arrivals
        length = ahead_s + LOOKED_AHEAD_S
        coming = tuple(each for each in self._trace if now <= each.at < now + length)
        if not coming:
            return Forecast(0.0, (), "the trace is over")
        return Forecast(len(coming) / length, coming, f"the trace, {len(coming) / length:.1f}/s")


def trace_of(arrivals: Iterable[tuple[float, Request]]) -> list[ObservedRequest]:
    """Return the requests of a trace without their text."""
    return [
        ObservedRequest(when, each.num_tokens, max_tokens_of(each), True, block_names(each.prompt), BLOCK)
        for when, each in arrivals
    ]


def load_policy(
    name: str,
    settings: PlannerSettings,
    evaluate: Evaluate,
    engine: ProfileCapacity,
    trace: Iterable[tuple[float, Request]] | None = None,
) -> Policy | Planner:
    """Return the policy called ``name``; only the oracle reads ``trace``, which is None if the traffic is not known.

    Raises :class:`~tercet.protocol.BadRequest` for an unknown name, or a file without the named function.
    """
    if name == "simulate":
        return Planner(evaluate, engine, settings.start_s, settings.margin)
    if name == "oracle" and trace is not None:
        return Planner(evaluate, engine, settings.start_s, 0.0, Foresight(trace_of(trace)))
    path, colon, function_name = name.rpartition(":")
    if not colon:
        raise BadRequest(
            f"planner: there is no {name!r}; choose simulate, oracle (in simulations), or file.py:function", "planner"
        )
    function = getattr(load_module(user_file(path, "planner"), "planner"), function_name, None)
    if not callable(function):
        raise BadRequest(f"planner: {path} has no function {function_name}", "planner")
    return _checked(name, function)


def _checked(name: str, function: object) -> Policy:
    """Wrap a user's policy: raise :class:`~tercet.protocol.BadRequest` if it does not return a ``WantedPlan``."""

    def policy(observed: Observed) -> WantedPlan:
        found = function(observed) if callable(function) else None
        if not isinstance(found, WantedPlan):
            raise BadRequest(f"planner: {name} must return WantedPlan, and returned {type(found).__name__}", "planner")
        return replace(found, reason=found.reason or name)

    return policy
