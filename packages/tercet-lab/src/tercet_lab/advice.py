"""Which fleet and program a recorded load needs: the planner's search, on a whole trace instead of its last minutes.

Programs of one family run on fleets of 1, 2, ... engines; more engines never serve less, so the smallest one that is
enough is found by bisection. For engines that split, the estimate of the planner orders the splits of each size. Every
fleet that is answered was simulated; the estimate decides only what is simulated first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tercet.decisions.planning import EngineDemand, ObservedRequest, best_split, demand_of, most_decodes
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives
from tercet_lab import DEFAULT_PROFILE
from tercet_lab.bench.simulated.experiment import Experiment, Fleet, Run, Work
from tercet_lab.sim import EngineOptions, Profile, load_profile, options_from
from tercet_lab.sim.step_times import StepModel, pairs_of
from tercet_lab.slo import Slo

SHARED, SPLIT = "data_parallel", "disaggregated"
ARGS: Mapping[str, Mapping[str, str]] = {SHARED: {"pick": "least_loaded"}, SPLIT: {}}
FEWEST_OF_SPLIT = 2
# Splits of one size that are simulated.
MOST_SPLITS = 7


class ProfileCapacity:
    """The capacity of one engine by its profile; implements :class:`~tercet.decisions.planning.EngineCapacity`."""

    def __init__(self, profile: Profile, options: EngineOptions | None = None) -> None:
        self._options = options or EngineOptions()
        self._steps = StepModel(
            profile.steps, self._options.prefill_scale, self._options.decode_scale, self._options.host_time
        )
        self._kv_tokens = (self._options.total_blocks or profile.total_blocks) * profile.block_size

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of the steps that compute a prompt of ``tokens`` tokens alone."""
        begin, seconds, chunk = 0, 0.0, self._options.max_num_batched_tokens
        while begin < tokens:
            end = min(tokens, begin + chunk)
            seconds += self._steps.step(end - begin, pairs_of(begin, end), 0, 0)
            begin = end
        return seconds

    def decodes(self, context: float, tpot: float) -> int:
        """Return the most sequences with ``context`` tokens of KV whose step takes at most ``tpot`` s; at least 1."""
        most = min(self._options.max_num_seqs, int(self._kv_tokens / max(1.0, context)))
        return most_decodes(lambda number: self._steps.step(0, 0.0, number, int(number * context)), tpot, most)


@dataclass(frozen=True)
class Trial:
    """One simulated fleet: ``goodput`` counts requests per second within the objectives; P99 are in seconds."""

    experiment: Experiment
    engines: int
    attainment: float
    goodput: float
    ttft_p99: float | None
    tpot_p99: float | None

    @property
    def program(self) -> str:
        return self.experiment.name

    @property
    def fleet(self) -> str:
        return str(self.experiment.fleet)

    @property
    def goodput_per_engine(self) -> float:
        """Requests per second within the objectives, for each engine."""
        return self.goodput / self.engines

    @property
    def up(self) -> str:
        """The command that starts such a fleet."""
        counts = {group.role: group.count for group in self.experiment.fleet.spec.engines}
        roles = [f"--{role} {counts.get(role, 0)}" for role in ("prefill", "decode", "both")]
        args = [f"--program-arg {name}={value}" for name, value in self.experiment.args.items()]
        return " ".join(["tercet up", f"--program {self.program}", *args, *roles])


@dataclass(frozen=True)
class Advice:
    """The answer to a load: the ``best`` of all ``trials``; ``is_enough`` if it meets the wanted attainment."""

    slo: Slo
    attainment: float
    best: Trial
    trials: Sequence[Trial]

    @property
    def is_enough(self) -> bool:
        return self.best.attainment >= self.attainment


@dataclass
class _Search:
    work: Work
    slo: Slo
    profile: str
    options: Mapping[str, str]
    most: int
    attainment: float
    seed: int
    note: Callable[[str], object]
    trials: dict[tuple[str, str], Trial] = field(default_factory=dict[tuple[str, str], Trial])

    def run(self, program: str, fleet: str) -> Run:
        experiment = Experiment(
            program=program, args=ARGS[program], fleet=Fleet.parse(fleet, self.profile, self.options), work=self.work,
            seed=self.seed, slo=self.slo,
        )  # fmt: skip
        run = experiment.run()
        summary, engines = run.summary, sum(group.count for group in experiment.fleet.spec.engines)
        ttft, tpot = (None if each is None else each.p99 for each in (summary.ttft, summary.tpot))
        share = run.attainment or 0.0
        trial = Trial(experiment, engines, share, share * len(run.requests) / _seconds(run), ttft, tpot)
        self.trials[program, fleet] = trial
        self.note(f"{program} on {fleet}: {trial.attainment:.1%} within the objectives")
        return run

    def shared(self, engines: int) -> bool:
        """True if this number of engines, each with both roles, is enough."""
        fleet = f"both={engines}"
        if (SHARED, fleet) not in self.trials:
            self.run(SHARED, fleet)
        return self.trials[SHARED, fleet].attainment >= self.attainment

    def split(self, engines: int, demand: EngineDemand) -> bool:
        """True if a split of this number of engines is enough; the first such split ends the search of this size.

        The nearest to the one that the estimate likes best come first. Better neighbours are not followed: where KV is
        scarce, a split between two good ones may be bad.
        """
        middle = best_split(engines, demand).prefill
        for prefill in sorted(range(1, engines), key=lambda each: abs(each - middle))[:MOST_SPLITS]:
            fleet = f"prefill={prefill},decode={engines - prefill}"
            if (SPLIT, fleet) not in self.trials:
                self.run(SPLIT, fleet)
            if self.trials[SPLIT, fleet].attainment >= self.attainment:
                return True
        return False


def _seconds(run: Run) -> float:
    """Return the time in which the requests of a run arrived."""
    scheduled = run.requests["scheduled"]
    return float(max(scheduled) - min(scheduled)) or 1.0


def smallest(fewest: int, most: int, is_enough: Callable[[int], bool], first: int | None = None) -> int | None:
    """Return the smallest number in ``[fewest, most]`` that is enough; None if ``most`` is not.

    A number above one that is enough is enough, too. ``first`` is an estimate, which is tried first.
    """
    low, high = fewest, most + 1  # the answer is in [low, high]; high == most + 1 means that none is enough
    probe = min(most, max(fewest, first if first is not None else (fewest + most) // 2))
    while low < high:
        if is_enough(probe):
            high = probe
        else:
            low = probe + 1
        # Close to an estimate the next number decides; away from it, halves do.
        near = probe - 1 if high == probe else probe + 1
        probe = near if first is not None and abs(near - first) <= 1 and low <= near < high else (low + high) // 2
    return low if low <= most else None


def advise(
    work: Work,
    slo: Slo,
    *,
    profile: str = DEFAULT_PROFILE,
    most: int = 16,
    attainment: float = 0.9,
    seed: int = 0,
    note: Callable[[str], object] = lambda _: None,
    **options: str,
) -> Advice:
    """Return the fleet and the program that serve ``work`` within ``slo`` with the fewest engines.

    Enough is a share ``attainment`` of the requests within ``slo``. Of fleets of equal size, the one of the greatest
    goodput is best; if no fleet of at most ``most`` engines is enough, the one that serves most requests within ``slo``
    is. ``options`` are those of simulated engines; ``note`` gets a line for each simulation.

    Raise :class:`~tercet.protocol.BadRequest` without a limit in ``slo``, or for an invalid number.
    """
    if slo.ttft is None and slo.tpot is None and slo.e2el is None:
        raise BadRequest("slo: has no limit; give at least one, such as ttft", "slo")
    if not 0 < attainment <= 1:
        raise BadRequest(f"attainment: must be above 0 and at most 1, is {attainment:g}", "attainment")
    if most < 1:
        raise BadRequest(f"most: must be at least 1, is {most}", "most")
    search = _Search(work, slo, profile, options, most, attainment, seed, note)
    run = search.run(SHARED, f"both={most}")
    sample = [
        ObservedRequest(0.0, int(prompt), int(answer), ended=True)
        for prompt, answer in zip(run.requests["input_tokens"], run.requests["output_tokens"], strict=True)
    ]
    capacity = ProfileCapacity(load_profile(profile), options_from(EngineOptions(), options))
    demand = demand_of(sample, len(sample) / _seconds(run), capacity, Objectives(ttft=slo.ttft, tpot=slo.tpot))
    first = math.ceil(demand.prefill + demand.decode)
    found = smallest(1, most, search.shared, first)
    if most >= FEWEST_OF_SPLIT:
        # A split that needs more engines than a shared fleet cannot be the best.
        bound = most if found is None else max(FEWEST_OF_SPLIT, found)
        smallest(FEWEST_OF_SPLIT, bound, lambda engines: search.split(engines, demand), first)
    trials = sorted(search.trials.values(), key=lambda each: (each.engines, each.fleet))
    enough = [each for each in trials if each.attainment >= attainment]
    best = (
        min(enough, key=lambda each: (each.engines, -each.goodput))
        if enough
        else max(trials, key=lambda each: (each.goodput, -each.engines))
    )
    return Advice(slo, attainment, best, trials)


def rows_of(advice: Advice) -> list[list[str]]:
    """Return a row for each simulated fleet, and mark the best one."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    return [
        ["*" if each is advice.best else "", each.program, each.fleet, str(each.engines), f"{each.attainment:.1%}",
         ms(each.ttft_p99), ms(each.tpot_p99), f"{each.goodput_per_engine:.3g}"]
        for each in advice.trials
    ]  # fmt: skip


HEADINGS = ["", "program", "fleet", "engines", "within", "TTFT P99, ms", "TPOT P99, ms", "good/s per engine"]
