"""Cost of serving on a fleet: which routes a request may take, what each would cost, and which one is chosen.

:class:`Costs` keeps one cost model for the fleet and the work of each engine; both learn from the verbs' calls.

The cheapest route is one engine alone, or a pair and the split of the prompt between them. For a request of ``n``
tokens with ``L`` expected tokens of answer, on engine ``e`` alone:

    ttft = waiting(e) + prefill(e)
    tpot = step(e, batch + 1) / (1 - interference(e))
    cost = ttft + L tpot                              until its own last token
         + (prefill(e) - step(e)) batch(e)            by which the decodes that run there end later
         + prefill(e) arrivals(e)                     and the prefills that will come behind it
         + (step(batch + 1) - step(batch)) tokens     and, by the larger batch, the decodes again

A pair ``p, d`` with a split at ``s`` pays for ``prompt[:s]`` on ``p``, for the transfer, and for the rest and the
decode on ``d``. A pull pays for the send of what another engine has cached (:mod:`.pulls`), without that engine's
queue, and for the rest and the decode. With objectives, the routes that miss them least come first; the cost decides
between equals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

import msgspec

from tercet.decisions.cost.engine_work import CostModel, EngineWork, Job, ReportedWork
from tercet.decisions.cost.pulls import Pull, Pulls
from tercet.protocol import BadRequest, Output, OutputStream, Request, Usage

SPLITS = (0.9, 0.75, 0.5)
PAIRED, SPLIT = 3, 2
SHARPER = 3
STEPS_TO_RESERVE, STEPS_TO_JOIN = 0.5, 0.5
"""Delays in steps: engines accept calls between steps, so a call waits half a step on average if decodes run."""
RouteKind = Literal["alone", "pair", "split", "pull"]
MayPair = Callable[[str, str], bool]
"""Function that returns True if two engines, by name, may exchange KV."""
CLOSEST = 6
ENOUGH_TRANSFERS = 3
HARMLESS = 1.25


class Targets(msgspec.Struct, frozen=True):
    """Service level objectives, in seconds; None means no objective.

    Raises :class:`~tercet.protocol.BadRequest` for an objective that is not positive.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in (("ttft", self.ttft), ("tpot", self.tpot)):
            if seconds is not None and not seconds > 0:
                raise BadRequest(f"{name}: must be more than 0 seconds, is {seconds}", name)


class RouteOption(msgspec.Struct, omit_defaults=True):
    """One way to serve a request, with its predictions, in seconds."""

    decode: str
    ttft: float
    tpot: float
    cost: float  # the time until the last token, plus the total delay of other running and future requests
    prefill: str = ""  # computes ``prompt[:split]`` for the other engine; empty: that one serves alone
    split: int = 0
    missed: float = 0.0  # the total share by which the objectives are missed
    pull: Pull | None = None  # before the rest is computed

    def kind(self, num_tokens: int) -> RouteKind:
        if self.pull is not None:
            return "pull"
        if not self.prefill:
            return "alone"
        return "pair" if self.split == num_tokens else "split"


class RouteDecision(msgspec.Struct, omit_defaults=True):
    """Decision of ``auto``. The actual result is the trace's ``ttft`` and ``tpot``."""

    kind: RouteKind
    chosen: RouteOption
    others: list[RouteOption] = []  # the cheapest ones
    explored: bool = False  # the option was not the cheapest, and was chosen to learn its cost
    output: float = 0.0  # the expected number of output tokens


@dataclass(frozen=True)
class RouteRequest:
    """The request: ``tokens`` of prompt, and the expected number of output tokens."""

    tokens: int
    output: float
    targets: Targets


class RouteCandidate:
    """One engine at the time of a decision; ``matched`` is the estimated number of cached prompt tokens."""

    def __init__(self, name: str, work: EngineWork | ReportedWork, model: CostModel, now: float, matched: int) -> None:
        self.name = name
        self.matched = matched
        self.waiting = work.waiting(now)
        self.under_way = work.under_way(now)
        self.interference = work.interference(now)
        self.batch = work.decoding + work.coming
        self.contexts = work.contexts
        self.seconds_left = work.seconds_left(now)
        self.work, self.model, self.now = work, model, now

    def prefill(self, begin: int, end: int, sent: int = 0) -> float:
        """Return the seconds to compute the missing part of ``prompt[begin:end)``, and send ``sent`` tokens of it."""
        cached = max(begin, min(self.matched, end - 1))
        return self.model.prefill(end - cached, cached, self.batch, sent) * self.work.prefill_pace.factor

    def delay(self, seconds: float) -> float:
        """Return the total delay of other requests, in seconds, if a prefill takes ``seconds`` here.

        The steps that run the prefill give each decode a token, too.
        """
        behind = self.interference * (self.waiting + seconds)
        step = self.model.step(self.batch, self.contexts) * self.work.decode_pace.factor if self.batch else 0.0
        return self.work.stall(self.now, max(0.0, seconds - step)) + behind

    def decode(self, context: int, output: float) -> tuple[float, float]:
        """Return the seconds per token of one more decode, and the delay that it causes for the others."""
        pace = self.work.decode_pace
        tpot = self.model.tpot(self.batch + 1, self.contexts + context, self.interference, pace)
        if not self.batch:
            return tpot, 0.0
        slower = tpot - self.model.tpot(self.batch, self.contexts, self.interference, pace)
        together = min(self.seconds_left / tpot, output) if self.seconds_left else output
        return tpot, slower * self.batch * together


def pair_pays(prefill: RouteCandidate, decode: RouteCandidate, wanted: RouteRequest, gain: float = 0.0) -> bool:
    """Return True if ``prefill`` should compute the whole prompt: it costs less, by the share ``gain`` at least."""
    if wanted.tokens <= decode.matched:
        return False
    return _pair(prefill, decode, wanted.tokens, wanted).cost < (1 - gain) * _alone(decode, wanted).cost


def options_of(
    candidates: Sequence[RouteCandidate], wanted: RouteRequest, may_pair: MayPair = lambda _, __: True,
    pull_for: Callable[[RouteCandidate], Pull | None] = lambda _: None,
) -> list[RouteOption]:  # fmt: skip
    """Return the routes over these engines that are worth an estimate, the best first.

    These are every engine alone; pairs of the few that decode at the least cost, each with the few that may pair with
    it and prefill at the least cost; for the best of these pairs, other splits; and for the few with the least work,
    what ``pull_for`` returns.
    """
    # Engines will differ more in the future than in the recent past: prefills go to engines with few decodes, and
    # decodes to engines with few prefills, so chance differences between engines grow. Predictions that assume the past
    # would miss that, and keep all engines alike.
    total = sum(candidate.interference for candidate in candidates)
    sharper = sum(candidate.interference**SHARPER for candidate in candidates)
    for candidate in candidates:
        candidate.interference = total * candidate.interference**SHARPER / sharper if sharper else 0.0
    alone = [_alone(candidate, wanted) for candidate in candidates]
    by_name = {candidate.name: candidate for candidate in candidates}
    # What a prefill of all of it costs, and what a decode costs less the prefill that it saves by what it has cached.
    whole = {each.name: each.prefill(0, wanted.tokens) for each in candidates}
    paces = {each.name: each.decode(wanted.tokens, wanted.output) for each in candidates}
    saved = {each.name: each.matched * whole[each.name] / wanted.tokens for each in candidates}
    prefills = sorted(candidates, key=lambda each: each.waiting + whole[each.name] + each.delay(whole[each.name]))
    decodes = heapq.nsmallest(
        PAIRED, candidates,
        key=lambda each: wanted.output * paces[each.name][0] + paces[each.name][1] - saved[each.name],
    )  # fmt: skip
    pairs = [
        _pair(prefill, decode, wanted.tokens, wanted)
        for decode in decodes
        for prefill in islice((each for each in prefills if may_pair(each.name, decode.name)), PAIRED)
        if prefill is not decode and wanted.tokens > decode.matched
    ]
    positions = dict.fromkeys(max(1, round(wanted.tokens * share)) for share in SPLITS)
    splits = [
        _pair(by_name[pair.prefill], by_name[pair.decode], split, wanted)
        for pair in heapq.nsmallest(SPLIT, pairs, key=_rank)
        for split in positions
        if by_name[pair.decode].matched < split < wanted.tokens  # after the decode engine's cached part
    ]
    least = heapq.nsmallest(PAIRED, candidates, key=lambda candidate: candidate.waiting)
    pulls = [_pull(pull, decode, wanted) for decode in least if (pull := pull_for(decode)) is not None]
    return sorted((*alone, *pairs, *splits, *pulls), key=_rank)


def _rank(option: RouteOption) -> tuple[float, float]:
    return option.missed, option.cost


def _alone(candidate: RouteCandidate, wanted: RouteRequest) -> RouteOption:
    seconds = candidate.prefill(0, wanted.tokens)
    tpot, slowed = candidate.decode(wanted.tokens, wanted.output)
    ttft = candidate.waiting + seconds
    return _option(wanted, candidate.name, ttft, tpot, candidate.delay(seconds) + slowed)


def _pair(prefill: RouteCandidate, decode: RouteCandidate, split: int, wanted: RouteRequest) -> RouteOption:
    seconds = prefill.prefill(0, split, split - min(decode.matched, split))
    return _received(wanted, decode, split, prefill.waiting + seconds, prefill.delay(seconds), prefill.name)


def _pull(pull: Pull, decode: RouteCandidate, wanted: RouteRequest) -> RouteOption:
    found = _received(wanted, decode, pull.end, pull.seconds)
    found.pull = pull
    return found


def _received(
    wanted: RouteRequest, decode: RouteCandidate, end: int, takes: float, others: float = 0.0, prefill: str = ""
) -> RouteOption:
    """Return the route by which ``decode`` receives the KV of the first ``end`` tokens.

    It is there after ``takes`` seconds of other engines, whose sequences that delays by ``others`` seconds together.
    """
    tpot, slowed = decode.decode(wanted.tokens, wanted.output)
    step = tpot if decode.batch else 0.0
    ready = max(decode.under_way, STEPS_TO_RESERVE * step) + takes
    # Work that still waits on the decode engine when the KV has arrived delays the rest of the prompt, or the decode.
    still = max(0.0, decode.waiting - ready, STEPS_TO_JOIN * step)
    others += slowed
    if end == wanted.tokens:
        return _option(wanted, decode.name, ready, tpot, others + still, prefill, end)
    rest = decode.prefill(end, wanted.tokens)
    return _option(wanted, decode.name, ready + still + rest, tpot, others + decode.delay(rest), prefill, end)


def _option(
    wanted: RouteRequest, decode: str, ttft: float, tpot: float, others: float, prefill: str = "", split: int = 0
) -> RouteOption:
    own = ttft + (wanted.output - 1) * tpot
    # By how much of a target each latency exceeds it, added: a route that misses none comes before any cheaper one.
    targets = wanted.targets
    missed = 0.0 if targets.ttft is None else max(0.0, ttft / targets.ttft - 1)
    missed += 0.0 if targets.tpot is None else max(0.0, tpot / targets.tpot - 1)
    return RouteOption(decode, ttft, tpot, own + others, prefill, split, missed)


class Costs:
    """Costs shared by all views of a fleet. ``clock`` is monotonic, in seconds.

    Requests in the background are not watched: no client waits for one, and its times say nothing about engines.
    """

    def __init__(self, clock: Callable[[], float], random: Random) -> None:
        self.model = CostModel()
        self.clock = clock
        # What a request says about the length of its answer. Simulations replace it: they may know more than its limit.
        self.known_length: Callable[[Request], int | None] = max_tokens_of
        self.pulls = Pulls(self.model, random)
        self._random = random
        self._works: dict[str, EngineWork] = {}
        self._watches = True

    def watch_once_asked(self) -> None:
        """Observe only from the first request for a route on: without routes the results are not used."""
        self._watches = False

    def watch(self) -> None:
        self._watches = True

    def work(self, name: str) -> EngineWork:
        found = self._works.get(name)
        if found is None:
            found = self._works[name] = EngineWork(self.model, self.clock)
            self.model.arrivals.engines = len(self._works)
        return found

    def waiting(self, name: str) -> float:
        """Return the predicted seconds of prefill in line on an engine; the first call starts the watch of work."""
        self._watches = True
        return self.work(name).waiting(self.clock())

    def forget(self, name: str) -> None:
        self._works.pop(name, None)
        self.model.arrivals.engines = len(self._works)

    # ---- picking a route -------------------------------------------------------------------------------------

    def decide(
        self, request: Request, names: Sequence[str], matched: Mapping[str, int], targets: Targets, explore: float,
        may_pair: MayPair = lambda _, __: True, loads: Mapping[str, float] | None = None,
        stored: Mapping[str, int] | None = None,
    ) -> RouteDecision:  # fmt: skip
        """Choose a route over these engines (at least one); ``matched`` has their estimated cached tokens.

        ``loads`` are the sequences on each, by which engines are drawn that send what they have cached; ``stored`` are
        the tokens that stores have.
        """
        self._watches = True
        now = self.clock()
        wanted = RouteRequest(request.num_tokens, self.model.output_of(self.known_length(request)), targets)
        if len(names) > CLOSEST:  # a full estimate of those with the least work, or with most of the prompt
            works, holders = self._works, heapq.nlargest(CLOSEST // 2, matched, key=matched.__getitem__)
            idlest = heapq.nsmallest(CLOSEST, names, key=lambda name: (works.get(name) or self.work(name)).backlog)
            names = list(dict.fromkeys((*idlest, *holders)))
        candidates = [RouteCandidate(name, self.work(name), self.model, now, matched.get(name, 0)) for name in names]
        kept: Mapping[str, int] = stored or {}

        def pull_for(decode: RouteCandidate) -> Pull | None:
            holders = {**{name: found for name, found in matched.items() if name != decode.name}, **kept}
            return self._pull(decode, wanted.tokens, holders, loads or {}, may_pair, kept)

        options = options_of(candidates, wanted, may_pair, pull_for)
        chosen = self._unknown(options, explore) or options[0]
        others = [option for option in options[:5] if option is not chosen]
        return RouteDecision(
            chosen.kind(wanted.tokens), chosen, others, explored=chosen is not options[0], output=wanted.output
        )

    def pull(
        self, request: Request, name: str, matched: Mapping[str, int], loads: Mapping[str, float], may_pair: MayPair,
        stores: Collection[str] = (),
    ) -> Pull | None:  # fmt: skip
        """Return the pull that the engine ``name`` should make for a request before it computes the rest, or None.

        ``matched`` has the tokens of others, too; ``stores`` are the names of stores among them.
        """
        self._watches = True
        decode = RouteCandidate(name, self.work(name), self.model, self.clock(), matched.get(name, 0))
        return self._pull(decode, request.num_tokens, matched, loads, may_pair, stores)

    def _pull(
        self, decode: RouteCandidate, tokens: int, matched: Mapping[str, int], loads: Mapping[str, float],
        may_pair: MayPair, stores: Collection[str],
    ) -> Pull | None:  # fmt: skip
        holders = {name: found for name, found in matched.items() if found > decode.matched}
        if not holders:
            return None
        whole = decode.prefill(0, tokens)
        holders = {name: found for name, found in holders.items() if may_pair(name, decode.name)}
        return self.pulls.choose(
            tokens, decode.matched, holders, loads, lambda end: whole - decode.prefill(end, tokens), stores
        )  # fmt: skip

    def _unknown(self, options: Sequence[RouteOption], explore: float) -> RouteOption | None:
        """Return a pair to learn from, or None; its engines must be idle, and its estimated cost not much higher."""
        # The cost of a transfer is learned only by making some: the first few as soon as they do no harm, later ones
        # rarely, to notice that it has changed.
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
        if request.background:
            yield
            return
        chosen, works = decision.chosen, [self.work(decision.chosen.decode)]
        # Two jobs for a pair: one engine prefills up to the split and sends, the other computes the rest and decodes.
        here = self._job(request, chosen.split, request.num_tokens, matched.get(chosen.decode, 0))
        here.output, here.context = decision.output, request.num_tokens
        here.ready = self.clock() + chosen.ttft
        # Counted from the decision on: the next one, a moment later, must not send its request to the same idle engine.
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
        return Job(missing, cached, seconds=seconds, max_tokens=self.known_length(request))

    # ---- watching --------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self, name: str, request: Request, begin: int, end: int) -> Generator[Callable[[Usage], None]]:
        """Count a prefill of ``prompt[:end)`` that sends ``[begin, end)``; call the yielded function at its end."""
        if not self._watches or request.background:
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

    @contextmanager
    def pulling(self, name: str, begin: int) -> Generator[Callable[[int], None]]:
        """Count a send of cached KV from ``begin`` on; call the yielded function with the position that it reached."""
        began = self.clock()

        def reached(end: int) -> None:
            if end > begin:
                self.model.sent(max(self.clock() - began, 1e-6), end - begin)

        with self.pulls.counted(name):
            yield reached

    def generating(self, name: str, request: Request, begin: int, given: int) -> GenerationCost | None:
        """Return an observer for an engine that will generate after ``prompt[:begin)`` and ``given`` output tokens."""
        if not self._watches or request.background:
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
        self._job = self._work.begin(self._seq_id, self._job)

    def on_output(self, output: Output) -> None:
        if not self._tokens:
            job, usage = self._job, output.usage
            computed = usage.computed if usage is not None else job.missing
            cached = usage.cached + usage.received if usage is not None else job.cached
            self._work.prefilled(self._seq_id, job, computed, cached, 0)
        self._tokens += len(output.token_ids)
        # A sequence that was broken off says nothing about the length of answers.
        if output.finish_reason is not None and not output.broken_off:
            self._work.decoded(self._job, self._tokens)

    def on_end(self, error: BaseException | None) -> None:
        self._work.leave(self._seq_id)


def max_tokens_of(request: Request) -> int | None:
    """Return the request's limit of output tokens, or None."""
    wanted = request.sampling_params.get("max_tokens")
    return wanted if isinstance(wanted, int) and wanted > 0 else None
