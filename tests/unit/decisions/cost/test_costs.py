"""The cost model: what it learns, also of engines that are known by their reports alone, and that it stays sane
whatever it is told.
"""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.decisions.cost.costs import Costs, RouteCandidate, RouteRequest, Targets, options_of, pair_pays
from tercet.decisions.cost.engine_work import (
    MEMORY,
    ArrivalRate,
    CostModel,
    EnginePace,
    EngineWork,
    Job,
    OnlineFit,
    ReportedWork,
    features_of,
)
from tercet.protocol import EngineLoad, OutputStream, Request, Usage
from tests.clock import Clock

TOKENS = st.integers(1, 8192)
SECONDS = st.floats(1e-5, 100)
PREFILLS = st.lists(st.tuples(SECONDS, TOKENS, st.integers(0, 8192), st.integers(0, 64), st.integers(0, 8192)))
STEPS = st.lists(st.tuples(SECONDS, st.floats(1, 256), st.floats(1, 1e6)))


def taught(prefills: list[tuple[float, int, int, int, int]], steps: list[tuple[float, float, float]]) -> CostModel:
    model = CostModel()
    for seconds, *what in prefills:
        model.prefilled(seconds, features_of(*what))
    for seconds, batch, contexts in steps:
        model.stepped(seconds, batch, contexts)
    return model


# ---- fits ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(PREFILLS, TOKENS, TOKENS)
def test_more_tokens_never_cost_less_whatever_was_seen(
    seen: list[tuple[float, int, int, int, int]], one: int, other: int
) -> None:
    model = taught(seen, [])
    less, more = sorted((one, other))
    assert 0 <= model.prefill(less) <= model.prefill(more)
    assert model.prefill(less, cached=less) <= model.prefill(less, cached=more)
    assert model.prefill(less) <= model.prefill(less, sent=more)


@settings(deadline=None)
@given(STEPS, st.floats(1, 256), st.floats(1, 256))
def test_larger_batches_never_cost_less_whatever_was_seen(
    seen: list[tuple[float, float, float]], one: float, other: float
) -> None:
    model = taught([], seen)
    less, more = sorted((one, other))
    assert 0 <= model.step(less, 100) <= model.step(more, 100)
    assert model.step(less, 100) <= model.step(less, 200)


@settings(deadline=None)
@given(st.tuples(*[st.floats(0.1, 10)] * 3), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_a_fit_finds_the_truth(shares: tuple[float, ...], speed: float, seed: int) -> None:
    chance, prior = random.Random(seed), (0.01, 1e-4, 1e-8)
    truth = [share * speed * own for share, own in zip(shares, prior, strict=True)]
    fit = OnlineFit(prior)
    draw = lambda: (1.0, float(chance.randrange(1, 4000)), float(chance.randrange(1, 16_000_000)))  # noqa: E731
    for _ in range(300):
        features = draw()
        fit.observe(features, sum(a * b for a, b in zip(truth, features, strict=True)) * chance.uniform(0.97, 1.03))
    features = draw()
    assert fit.predict(features) == pytest.approx(sum(a * b for a, b in zip(truth, features, strict=True)), rel=0.1)


def test_wild_observations_move_a_fit_little() -> None:
    fit = OnlineFit((0.01, 1e-4))
    for number in range(200):
        tokens = 100.0 + 37 * (number % 50)
        fit.observe((1.0, tokens), (0.02 + 3e-4 * tokens) * (20 if number % 20 == 19 else 1))
    assert fit.predict((1.0, 1000.0)) == pytest.approx(0.32, rel=0.25)


def test_a_fit_follows_a_change() -> None:
    fit = OnlineFit((0.01, 1e-4), forgetting=0.98)
    for number in range(600):
        tokens = 100.0 + 37 * (number % 50)
        fit.observe((1.0, tokens), (1 if number < 300 else 3) * (0.02 + 3e-4 * tokens))
    assert fit.predict((1.0, 1000.0)) == pytest.approx(0.96, rel=0.1)


def test_the_first_observation_sets_the_scale() -> None:
    model = taught([(0.73, 512, 0, 0, 0)], [])
    assert model.prefill(512) == pytest.approx(0.73, rel=0.05)
    assert 0.8 < model.prefill(1024) < 2.5


def test_answers_are_expected_as_long_as_those_with_a_limit_like_theirs() -> None:
    model = CostModel()
    assert model.output_of(16) == 16
    assert model.output_of(None) == model.output_of(100_000) == 256
    for _ in range(20):
        model.ended(4000, 120)
    assert model.output_of(3000) == pytest.approx(120)
    assert model.output_of(16) == 16


def test_a_pace_that_does_not_stand_out_from_its_noise_is_the_fleets() -> None:
    noisy, steady = EnginePace(), EnginePace()
    for number in range(200):
        noisy.observe(0.08 if number % 2 else 0.14, 0.1)
        steady.observe(0.13, 0.1)
    assert noisy.factor < 1.02
    assert steady.factor == pytest.approx(1.3, rel=0.01)


def test_a_pace_finds_a_slow_engine() -> None:
    pace = EnginePace()
    for _ in range(200):
        pace.observe(0.3, 0.1)
    assert pace.factor == pytest.approx(3, rel=0.05)
    pace.observe(0.0, 0.1)
    assert pace.factor > 1


def test_decodes_to_come_are_held_up_by_what_is_left_when_they_are_ready() -> None:
    work = EngineWork(CostModel(), Clock(0.0))
    work.promise("r", Job(0, output=10, ready=3.0))
    assert work.stall(0.0, 2.0) == 0
    assert work.stall(0.0, 4.0) == pytest.approx(1.0)
    assert work.stall(5.0, 4.0) == pytest.approx(4.0)


def test_how_busy_an_engine_is_counts_over_about_ten_prefills() -> None:
    arrivals = ArrivalRate()
    arrivals.engines = 2
    for number in range(100):
        arrivals.note(number / 10)
    assert arrivals.memory == 10
    for number in range(100):
        arrivals.note(10 + number * 5)
    assert arrivals.memory == pytest.approx(100, rel=0.05)


# ---- the work of an engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "taken"), [(0.005, 0.0), (0.01, 0.0), (0.02, 0.5), (1.0, 0.99)])
def test_a_prefill_takes_from_decodes_what_is_longer_than_their_step(seconds: float, taken: float) -> None:
    """Its steps give each decode a token, too: next to short prompts decodes lose less than the time of prefills."""
    clock, model = Clock(0.0), taught([], [(0.01, 1, 0)])
    work = EngineWork(model, clock)
    while clock.now < 100:
        job = work.begin("a", Job(1000, output=1.0, seconds=seconds))
        clock.now += seconds
        work.prefilled("a", job, 1000, 0, 0)
        work.leave("a")
    assert work.interference(clock.now) == pytest.approx(taken, abs=0.03)


def test_prefills_in_line_are_told_apart() -> None:
    """Three come at once and end one after the other: each took a second, though the last one was away for three."""
    clock, model = Clock(0.0), CostModel()
    work = EngineWork(model, clock)
    for _ in range(30):
        jobs = {name: work.begin(name, Job(1000, output=1.0, seconds=model.prefill(1000))) for name in "abc"}
        for name, job in jobs.items():
            clock.now += 1.0
            work.prefilled(name, job, 1000, 0, 0)
            work.leave(name)
    assert model.prefill(1000) == pytest.approx(1.0, rel=0.05)


def test_prefills_that_share_a_step_are_one_observation() -> None:
    clock, model = Clock(0.0), CostModel()
    work = EngineWork(model, clock)
    for _ in range(30):
        jobs = {name: work.begin(name, Job(1000, output=1.0, seconds=model.prefill(1000))) for name in "ab"}
        clock.now += 2.0
        for name, job in jobs.items():
            work.prefilled(name, job, 1000, 0, 0)
            work.leave(name)
    assert model.prefill(1000) == pytest.approx(1.0, rel=0.05)


def test_decodes_do_not_answer_for_the_prefills_between_their_steps() -> None:
    clock, model = Clock(0.0), CostModel()
    work = EngineWork(model, clock)
    for _ in range(30):
        job = work.begin("a", Job(1, output=101))
        work.prefilled("a", job, 1, 99, 0)
        other = work.begin("b", Job(1000, output=1.0, seconds=1.0))
        clock.now += 1.0
        work.prefilled("b", other, 1000, 0, 0)
        work.leave("b")
        clock.now += 0.99
        work.decoded(job, 101)
        work.leave("a")
    assert model.step(1, 0) == pytest.approx(0.01, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["promise", "begin", "first", "last", "leave", "wait"]), st.integers(0, 4))))
def test_whatever_happens_nothing_stays_when_all_have_left(events: list[tuple[str, int]]) -> None:
    clock = Clock(0.0)
    work = EngineWork(CostModel(), clock)
    jobs: dict[str, Job] = {}
    for what, number in events:
        name = f"s{number}"
        if what == "promise" and name not in jobs:
            jobs[name] = Job(100, output=10, context=100, seconds=0.1)
            work.promise(name, jobs[name])
        elif what == "begin":
            jobs[name] = work.begin(name, Job(100, output=10, context=100, seconds=0.1))
        elif what == "first" and name in jobs and jobs[name].stage == "prefill":
            work.prefilled(name, jobs[name], 100, 0, 0)
        elif what == "last" and name in jobs and jobs[name].stage == "decode":
            work.decoded(jobs[name], 10)
        elif what == "leave":
            work.leave(name)
            jobs.pop(name, None)
        else:
            clock.now += 0.3
        assert work.waiting(clock.now) >= 0
        assert 0 <= work.interference(clock.now) <= 1
        assert work.decoding + work.coming == len(jobs)
    for name in jobs:
        work.leave(name)
    assert work.idle
    assert (work.decoding, work.coming, work.contexts, work.backlog) == (0, 0, 0, 0)


# ---- routes --------------------------------------------------------------------------------------------------


def candidate(name: str, model: CostModel, matched: int = 0, decodes: int = 0, line: int = 0) -> RouteCandidate:
    clock = Clock(0.0)
    work = EngineWork(model, clock)
    for number in range(decodes):
        job = work.begin(f"d{number}", Job(1, output=200, context=500))
        work.prefilled(f"d{number}", job, 1, 0, 0)
    for number in range(line):
        work.begin(f"p{number}", Job(1000, output=100, seconds=model.prefill(1000)))
    return RouteCandidate(name, work, model, 0.0, matched)


def wanted(
    tokens: int = 1000, output: float = 50, ttft: float | None = None, tpot: float | None = None
) -> RouteRequest:
    return RouteRequest(tokens, output, Targets(ttft, tpot))


def model_of_a_cpu() -> CostModel:
    prefills = [(0.0014 * n + 0.02 + 1e-9 * n * n + 1e-6 * s, n, 0, 0, s) for n in range(50, 2000, 50) for s in (0, n)]
    steps = [(0.03 + 0.001 * batch, float(batch), 500.0 * batch) for batch in range(1, 17)] * 3
    return taught(prefills, steps)


def test_idle_engines_take_requests_alone() -> None:
    model = model_of_a_cpu()
    best = options_of([candidate("a", model), candidate("b", model)], wanted())[0]
    assert best.kind(1000) == "alone"


def test_where_the_prompt_is_cached_is_cheapest() -> None:
    model = model_of_a_cpu()
    best = options_of([candidate("a", model), candidate("b", model, matched=960)], wanted())[0]
    assert (best.kind(1000), best.decode) == ("alone", "b")


def test_decodes_are_spared_the_prefills_of_others() -> None:
    """With decodes on one engine and none on the other, nobody prefills among the decodes."""
    model = model_of_a_cpu()
    options = options_of([candidate("a", model), candidate("b", model, decodes=8)], wanted())
    alone = {option.decode: option for option in options if not option.prefill}
    assert alone["b"].cost > alone["a"].cost + 7 * model.prefill(1000) * 0.8
    assert options[0].decode == "a" or options[0].prefill == "a"


def test_a_line_of_prefills_counts() -> None:
    model = model_of_a_cpu()
    alone = {
        o.decode: o
        for o in options_of([candidate("a", model, line=2), candidate("b", model)], wanted())
        if not o.prefill
    }
    assert alone["a"].ttft == pytest.approx(3 * alone["b"].ttft, rel=0.1)


def test_objectives_go_before_cost() -> None:
    model = model_of_a_cpu()
    candidates = [candidate("busy", model, decodes=16), candidate("line", model, line=1)]
    cheapest = options_of(candidates, wanted(100, 400))[0]
    tight = options_of(candidates, wanted(100, 400, ttft=cheapest.ttft / 2))
    assert tight[0].missed <= min(option.missed for option in tight)
    assert tight[0].ttft < cheapest.ttft


@settings(deadline=None)
@given(PREFILLS, STEPS, st.integers(1, 8192), st.integers(0, 8192), st.integers(1, 4000), st.integers(0, 20))
def test_every_route_has_sane_numbers(
    prefills: list[tuple[float, int, int, int, int]],
    steps: list[tuple[float, float, float]],
    tokens: int,
    matched: int,
    output: int,
    decodes: int,
) -> None:
    model = taught(prefills, steps)
    candidates = [candidate("a", model, min(matched, tokens), decodes), candidate("b", model, line=decodes % 3)]
    for option in options_of(candidates, wanted(tokens, output)):
        assert option.ttft >= 0
        assert option.tpot >= 0
        assert 0 <= option.cost < float("inf")
        assert option.prefill == "" or min(matched, tokens) * (option.decode == "a") < option.split <= tokens


# ---- decisions -----------------------------------------------------------------------------------------------


def request_of(length: int = 2000) -> Request:
    return Request(seq_id="r", prompt=tuple(range(length)), sampling_params={"max_tokens": 100})


def test_a_choice_among_hundreds_is_quick() -> None:
    costs = Costs(time.monotonic, random.Random(0))
    names = [f"e{number}" for number in range(500)]
    costs.decide(request_of(), names, {"e3": 500}, Targets(), 0.0)
    began = time.process_time()
    for _ in range(20):
        costs.decide(request_of(), names, {"e3": 500}, Targets(), 0.0)
    assert (time.process_time() - began) / 20 < 0.005  # it takes under 1 ms; this machine may be busy


def test_pairs_are_tried_while_nobody_waits_and_only_then() -> None:
    costs = Costs(Clock(0.0), random.Random(0))
    kinds = [costs.decide(request_of(), ["a", "b"], {}, Targets(), 0.0).kind for _ in range(3)]
    assert kinds == ["pair"] * 3  # nothing is known of transfers yet
    generation = costs.generating("a", request_of(), 0, 0)
    assert generation is not None
    generation.on_start(OutputStream(OutputStream.until_over))
    assert costs.decide(request_of(), ["a", "b"], {}, Targets(), 1.0).chosen.decode == "b"
    generation.on_end(None)
    costs.model.transfers = 3
    assert costs.decide(request_of(), ["a", "b"], {}, Targets(), 0.0).kind == "alone"
    explored = costs.decide(request_of(), ["a", "b"], {}, Targets(), 1.0)
    assert (explored.kind, explored.explored) == ("pair", True)


def test_nothing_is_watched_until_a_route_is_asked_for_where_that_was_wanted() -> None:
    costs = Costs(Clock(0.0), random.Random(0))
    costs.watch_once_asked()
    assert costs.generating("a", request_of(), 0, 0) is None
    with costs.sending("a", request_of(), 0, 10) as done:
        done(Usage(computed=10))
    assert costs.model.transfers == 0
    costs.decide(request_of(), ["a", "b"], {}, Targets(), 0.0)
    assert costs.generating("a", request_of(), 0, 0) is not None


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
