"""An engine that is known by its reports: what it has to do, and what its prefills and steps cost."""

from __future__ import annotations

import pytest

from tercet.decisions.cost.costs import RouteCandidate, RouteRequest, Targets, pair_pays
from tercet.decisions.cost.engine_work import MEMORY, CostModel, ReportedWork
from tercet.protocol import EngineLoad

PACE = 0.1


class Bench:
    """One model and its engines; ``now`` is their clock."""

    def __init__(self) -> None:
        self.now = 10.0
        self.model = CostModel()

    def engine(self) -> ReportedWork:
        return ReportedWork(self.model, lambda: self.now, lambda: 100_000)

    def report(self, work: ReportedWork, tokens: int = 0, running: int = 0, step_time: float | None = None) -> None:
        load = EngineLoad(waiting=0, running=running, kv_usage=0.01 * running, tokens=tokens, step_time=step_time)
        work.reported(load)

    def prefill(self, work: ReportedWork, tokens: int, seconds: float, cached: int = 0) -> None:
        """One prompt alone, with reports every 100 ms."""
        work.picked(tokens, cached)
        ends = self.now + seconds
        while self.now < ends:
            self.now += PACE
            self.report(work, tokens=tokens if self.now < ends else 0)
        self.now += PACE
        self.report(work)


def test_what_prefills_cost_is_learned_from_those_that_run_alone() -> None:
    bench = Bench()
    work = bench.engine()
    for tokens in (1000, 4000, 2000, 8000, 3000, 6000) * 3:
        bench.prefill(work, tokens, tokens / 1000)
    assert work.learned == 18
    for tokens in (2000, 6000):
        assert bench.model.prefill(tokens) == pytest.approx(tokens / 1000, rel=0.2)


def test_what_is_cached_is_not_what_took_so_long() -> None:
    bench = Bench()
    work = bench.engine()
    for tokens in (2000, 8000, 4000) * 4:
        bench.prefill(work, tokens, tokens / 2000, cached=tokens // 2)
    assert bench.model.prefill(4000) == pytest.approx(4.0, rel=0.3)


def test_nothing_is_learned_from_prefills_that_are_mixed_lost_or_short() -> None:
    bench = Bench()
    work = bench.engine()
    work.picked(2000, 0)
    work.picked(2000, 0)
    bench.now += PACE
    bench.report(work, tokens=4000)
    bench.now += 4
    bench.report(work)
    bench.prefill(work, 100, 0.5)
    work.picked(2000, 0)  # somebody else's comes in between
    bench.now += PACE
    bench.report(work, tokens=3000)
    bench.now += 3
    bench.report(work)
    work.picked(2000, 0)  # it never comes
    for _ in range(5):
        bench.now += PACE
        bench.report(work)
    bench.now += PACE
    bench.report(work, tokens=2000)
    bench.now += 3
    bench.report(work)
    assert work.learned == 0


def test_steps_are_learned_while_no_prompt_waits() -> None:
    bench = Bench()
    work = bench.engine()
    for count in range(300):
        bench.now += PACE
        running = 1 + count % 7
        bench.report(work, running=running, step_time=0.02 + 0.001 * running)
    assert bench.model.step(4, 4000) == pytest.approx(0.024, rel=0.1)


def test_what_there_is_to_do() -> None:
    bench = Bench()
    work = bench.engine()
    assert work.waiting(bench.now) == work.seconds_left(bench.now) == 0.0
    work.picked(5000, 0)
    before = work.waiting(bench.now)
    assert before > 0
    bench.now += PACE
    bench.report(work, tokens=9000, running=4)
    assert work.waiting(bench.now) > before
    assert (work.decoding, work.contexts) == (4, 4000)
    bench.now += 3 * MEMORY
    bench.report(work, tokens=9000, running=4)
    assert work.interference(bench.now) > 0.9
    bench.now += 3 * MEMORY
    bench.report(work, running=4)
    assert work.interference(bench.now) < 0.1
    assert work.seconds_left(bench.now) > 0


def test_a_pair_pays_where_decodes_would_stall_and_not_where_nothing_runs() -> None:
    bench = Bench()
    teacher, idle, busy = bench.engine(), bench.engine(), bench.engine()
    for tokens in (1000, 4000, 2000, 8000) * 4:
        bench.prefill(teacher, tokens, tokens / 4000)
    for _ in range(40):
        bench.now += 1.0
        bench.report(teacher, running=8, step_time=0.02)
        bench.report(busy, running=40)
        bench.report(idle)

    def candidate(work: ReportedWork, matched: int = 0) -> RouteCandidate:
        return RouteCandidate("e", work, bench.model, bench.now, matched)

    long = RouteRequest(8000, 100, Targets())
    assert pair_pays(candidate(idle), candidate(busy), long)
    assert not pair_pays(candidate(idle), candidate(busy, matched=8000), long)
    assert not pair_pays(candidate(busy), candidate(idle), long)
