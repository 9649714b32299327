"""Cost of serving on a fleet: one model, the work of each engine, and the routes chosen by them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from random import Random

from tercet.decisions.cost.cost_model import CostModel
from tercet.decisions.cost.engine_work import EngineWork, Job
from tercet.decisions.cost.routes import (
    MayPair,
    RouteCandidate,
    RouteDecision,
    RouteOption,
    RouteRequest,
    Targets,
    any_pair,
    options_of,
)
from tercet.protocol import Output, OutputStream, Request, Usage

CLOSEST = 6
ENOUGH_TRANSFERS = 3
HARMLESS = 1.25


class Costs:
    """Costs shared by all views of a fleet. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], random: Random) -> None:
        self.model = CostModel()
        self.clock = clock
        self._random = random
        self._works: dict[str, EngineWork] = {}
        self._watches = True

    def watch_once_asked(self) -> None:
        """Observe only from the first request for a route on: without routes the results are not used."""
        self._watches = False

    def watch(self) -> None:
        """Observe from now on."""
        self._watches = True

    def work(self, name: str) -> EngineWork:
        """Return the work of an engine."""
        found = self._works.get(name)
        if found is None:
            found = self._works[name] = EngineWork(self.model, self.clock)
            self.model.arrivals.engines = len(self._works)
        return found

    def forget(self, name: str) -> None:
        """Forget an engine that left; its running work no longer counts."""
        self._works.pop(name, None)
        self.model.arrivals.engines = len(self._works)

    # ---- picking a route -------------------------------------------------------------------------------------

    def decide(
        self, request: Request, names: Sequence[str], matched: Mapping[str, int], targets: Targets, explore: float,
        may_pair: MayPair = any_pair,
    ) -> RouteDecision:  # fmt: skip
        """Choose a route over these engines (at least one); ``matched`` has their estimated cached tokens."""
        self._watches = True
        now = self.clock()
        wanted = RouteRequest(request.num_tokens, self.model.output_of(max_tokens_of(request)), targets)
        candidates = [
            RouteCandidate(name, self.work(name), self.model, now, matched.get(name, 0))
            for name in self._closest(names, matched)
        ]
        options = options_of(candidates, wanted, may_pair)
        chosen = self._unknown(options, explore) or options[0]
        others = [option for option in options[:5] if option is not chosen]
        return RouteDecision(
            chosen.kind(wanted.tokens), chosen, others, explored=chosen is not options[0], output=wanted.output
        )

    def _closest(self, names: Sequence[str], matched: Mapping[str, int]) -> Iterable[str]:
        """Return the engines that get a full estimate: those with the least work, or with most of the prompt."""
        if len(names) <= CLOSEST:
            return names
        idlest = heapq.nsmallest(CLOSEST, names, key=lambda name: self.work(name).backlog)
        holders = heapq.nlargest(CLOSEST // 2, matched, key=matched.__getitem__)
        return dict.fromkeys((*idlest, *holders))

    def _unknown(self, options: Sequence[RouteOption], explore: float) -> RouteOption | None:
        """Return a pair to learn from, or None; its engines must be idle, and its estimated cost not much higher."""
        if self.model.transfers >= ENOUGH_TRANSFERS and self._random.random() >= explore:
            return None
        best = options[0]
        pair = next((option for option in options if option.prefill), None)
        if pair is None or pair.missed > best.missed or pair.cost > HARMLESS * best.cost:
            return None
        return pair if self.work(pair.prefill).idle and self.work(pair.decode).idle else None

    @contextmanager
    def promised(self, request: Request, decision: RouteDecision, matched: Mapping[str, int]) -> Generator[None]:
        """Count the chosen route's work while entered, beginning before its verbs are called."""
        chosen, works = decision.chosen, [self.work(decision.chosen.decode)]
        here = self._job(request, chosen.split, request.num_tokens, matched.get(chosen.decode, 0))
        here.output, here.context = decision.output, request.num_tokens
        here.ready = self.clock() + chosen.ttft
        try:
            works[0].promise(request.seq_id, here)
            if chosen.prefill:
                there = self._job(request, 0, chosen.split, matched.get(chosen.prefill, 0))
                there.sent = chosen.split
                works.append(self.work(chosen.prefill))
                works[1].promise(request.seq_id, there)
            yield
        finally:
            for work in works:
                work.leave(request.seq_id)

    def _job(self, request: Request, begin: int, end: int, matched: int) -> Job:
        cached = max(begin, min(matched, end - 1))
        missing = max(0, end - cached)
        seconds = self.model.prefill(missing, cached) if missing else 0.0
        return Job(missing, cached, seconds=seconds, max_tokens=max_tokens_of(request))

    # ---- watching --------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self, name: str, request: Request, begin: int, end: int) -> Generator[Callable[[Usage], None]]:
        """Count a prefill of ``prompt[:end)`` that sends ``[begin, end)``; call the yielded function at its end."""
        if not self._watches:
            yield lambda _: None
            return
        work = self.work(name)
        job = self._job(request, 0, end, 0)
        job.sent = end - begin
        job = work.begin(request.seq_id, job)
        try:
            yield lambda usage: work.prefilled(request.seq_id, job, usage.computed, usage.cached, end - begin)
        finally:
            work.leave(request.seq_id)

    def generating(self, name: str, request: Request, begin: int, given: int) -> GenerationCost | None:
        """Return an observer for an engine that will generate after ``prompt[:begin)`` and ``given`` tokens of output.

        None if costs are not observed.
        """
        if not self._watches:
            return None
        job = self._job(request, begin, request.num_tokens + given, 0)
        job.output = max(1.0, self.model.output_of(job.max_tokens) - given)
        job.context, job.given = request.num_tokens + given, given
        return GenerationCost(self.work(name), request.seq_id, job)


class GenerationCost:
    """The cost of a sequence that one engine generates: an observer of its outputs."""

    def __init__(self, work: EngineWork, seq_id: str, job: Job) -> None:
        self._work = work
        self._seq_id = seq_id
        self._job = job
        self._tokens = 0

    def on_start(self, stream: OutputStream) -> None:
        """Record that the engine has the sequence now."""
        self._job = self._work.begin(self._seq_id, self._job)

    def on_output(self, output: Output) -> None:
        """Learn from the sequence's next output."""
        if not self._tokens:
            job, usage = self._job, output.usage
            computed = usage.computed if usage is not None else job.missing
            cached = usage.cached + usage.received if usage is not None else job.cached
            self._work.prefilled(self._seq_id, job, computed, cached, 0)
        self._tokens += len(output.token_ids)
        if output.finish_reason is not None and not output.broken_off:
            self._work.decoded(self._job, self._tokens)

    def on_end(self, error: BaseException | None) -> None:
        """Record that the engine no longer has the sequence."""
        self._work.leave(self._seq_id)


def max_tokens_of(request: Request) -> int | None:
    """Return the request's limit of output tokens, or None."""
    wanted = request.sampling_params.get("max_tokens")
    return wanted if isinstance(wanted, int) and wanted > 0 else None
