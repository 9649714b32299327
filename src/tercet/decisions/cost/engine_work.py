"""Cost of serving, in seconds, learned by observing engines, and the work of each engine: machines without I/O.

A :class:`CostModel` has the fleet's fits of prefills, decode steps and transfers. :class:`EngineWork` is the work of an
engine for this router: prefills in line, running decodes, and promised work; its caller reports starts and ends.
Engines prefill first come, first served, so the duration of a prefill is the time between two successive ends, or from
an arrival at an empty line to its end. That holds under any load, while the time from call to answer is mostly waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Literal

from tercet.protocol import EngineLoad

SWEEPS = 8
WILD = 3.0
# Observations at the beginning change the fit much. After FIRST of them it is solved once per EVERY observations.
FIRST, EVERY = 32, 4
UNKNOWN_OUTPUT = 256
PACE_LIMIT = math.log(16)
ALIKE = 0.05
SHORT_MEMORY, PREFILLS_REMEMBERED = 10.0, 10


class OnlineFit:
    """Coefficients ``theta >= 0`` with ``theta . features`` close to the observed values, in relative terms.

    The fit minimises the sum over observations of ``weight * ((theta . x - y) / scale)^2`` by coordinate descent on the
    normal equations; each observation multiplies the weight of those before by ``forgetting``. A weak pull towards
    ``prior`` (all positive) decides coefficients without observations. The first observation sets the scale of the
    whole prior: engines differ in speed by orders of magnitude, but much less in the proportions of their coefficients.
    An observation with more than three times the usual error counts in inverse proportion (Huber's weights).
    """

    def __init__(self, prior: Sequence[float], forgetting: float = 0.99, pull: float = 1e-3) -> None:
        self.count = 0
        self.theta = list(prior)
        self._forgetting = forgetting
        self._pull = pull
        self._prior = list(prior)
        self._spread = 1.0
        size = len(prior)
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted value: never negative, and never less for larger features."""
        return sum(map(mul, self.theta, features))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Learn from an observation: ``features`` are not negative, ``value`` is positive."""
        predicted = self.predict(features)
        # The first observation sets the scale: until then the prior knows the form of the cost, not this model's size.
        if self.count == 0 and predicted > 0:
            self._prior = [coefficient * value / predicted for coefficient in self._prior]
            self.theta = list(self._prior)
            predicted = value
        self.count += 1
        # Relative errors: a prefill of 10 s must not count a million times as much as one of 10 ms.
        scale = max(value, predicted / 4)
        weight = self._weight(abs(predicted - value) / scale)
        row = [feature / scale for feature in features]
        for products, left in zip(self._squares, row, strict=True):
            for index, right in enumerate(row):
                products[index] = products[index] * self._forgetting + weight * left * right
        self._products = [
            old * self._forgetting + weight * feature * value / scale
            for old, feature in zip(self._products, row, strict=True)
        ]
        if self.count > FIRST and self.count % EVERY:
            return
        # On the router's event loop, coordinate descent from the last solution costs 26 us for six coefficients and
        # 13 us for three; SciPy's NNLS, with the Cholesky factor that it needs, costs 28 us for either.
        theta = self.theta
        for _ in range(SWEEPS):
            for index, products in enumerate(self._squares):
                prior = self._prior[index]
                pull = self._pull / (prior * prior)
                others = sum(map(mul, products, theta)) - products[index] * theta[index]
                theta[index] = max(0.0, (self._products[index] + pull * prior - others) / (products[index] + pull))

    def _weight(self, error: float) -> float:
        # An outlier, such as a step in which the machine stood still, moves the fit as little as an error at the limit.
        limit = WILD * self._spread
        self._spread += 0.05 * (min(error, 2 * limit) - self._spread)
        self._spread = max(self._spread, 0.01)
        return 1.0 if error <= limit else limit / error


class EnginePace:
    """Factor by which one engine is slower than the fleet's fit; it changes slowly, and less with more observations.

    The factor counts only as far as it exceeds the variation of the engine's observations: an engine that is used when
    others are busy is mostly observed while it shares memory and cores with them, and would look slower than it is.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._varies = 0.0
        self._count = 0

    @property
    def factor(self) -> float:
        """The factor; 1 is the fleet's. Small differences count as 1, since the fit has an error of that size."""
        alike = max(ALIKE, self._varies)
        return math.exp(self._log * min(1.0, (self._log / alike) ** 2))

    def observe(self, seconds: float, predicted: float) -> None:
        self._count += 1
        ratio = max(-PACE_LIMIT, min(PACE_LIMIT, math.log(max(seconds, 1e-6) / max(predicted, 1e-6))))
        rate = max(0.05, 1 / (self._count + 10))
        self._log += (ratio - self._log) * rate
        self._varies += (abs(ratio - self._log) - self._varies) * rate


class ArrivalRate:
    """Rate at which prefills begin on an engine; it sets the length of the window for measuring load."""

    def __init__(self) -> None:
        self.engines = 0
        self._gap = 0.0
        self._last: float | None = None

    @property
    def memory(self) -> float:
        """Seconds in which an engine has about ten prefills, at least ten seconds."""
        return max(SHORT_MEMORY, PREFILLS_REMEMBERED * self._gap * self.engines)

    def note(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            self._gap += (gap - self._gap) * (0.1 if self._gap else 1.0)
        self._last = now


class CostModel:
    """The fleet's fits: of prefills, of decode steps, and of sends without a step.

    Before the first observation they have the order of magnitude of one model on one accelerator.
    """

    def __init__(self) -> None:
        self.prefills = OnlineFit((0.01, 1e-4, 1e-8, 1e-4, 5e-4, 2e-7))
        self._steps = OnlineFit((0.01, 1e-4, 1e-7))
        self._sends = OnlineFit((0.005, 1e-5))
        self._outputs: dict[int, tuple[int, float]] = {}
        self.arrivals = ArrivalRate()
        self.transfers = 0

    def prefill(self, tokens: int, cached: int = 0, batch: float = 0, sent: int = 0) -> float:
        """Return the seconds to compute ``tokens`` after ``cached`` ones, and send ``sent`` to another engine."""
        return self.prefills.predict(features_of(tokens, cached, batch, sent))

    def step(self, batch: float, contexts: float) -> float:
        """Return the seconds of a step that decodes ``batch`` sequences with ``contexts`` tokens of KV in total."""
        return self._steps.predict((1.0, batch, contexts))

    def tpot(self, batch: float, contexts: float, interference: float, pace: EnginePace) -> float:
        """Return the seconds per token of a running decode; prefills take the share ``interference`` of its time."""
        return self.step(batch, contexts) * pace.factor / (1 - min(MOST_INTERFERENCE, interference))

    def taken(self, prefill: float, batch: int, contexts: float) -> float:
        """Return the share of a prefill's seconds that decodes lose: its steps give them a token, too, at least one."""
        return max(0.0, 1 - self.step(batch or 1, contexts) / prefill) if prefill else 0.0

    def send(self, tokens: int) -> float:
        """Return the seconds of a send of ``tokens`` that are cached, from the call to the last acknowledgement."""
        return self._sends.predict((1.0, tokens))

    def sent(self, seconds: float, tokens: int) -> None:
        """Learn from a send of cached KV, which needed no step."""
        self._sends.observe((1.0, tokens), seconds)

    def output_of(self, max_tokens: int | None) -> float:
        """Return the expected output tokens of a request with this limit: the mean of requests with a similar limit."""
        limit = math.inf if max_tokens is None else max_tokens
        _, mean = self._outputs.get(_size_of(max_tokens), (0, UNKNOWN_OUTPUT))
        return max(1.0, min(mean, limit))

    def prefilled(self, seconds: float, features: Sequence[float]) -> None:
        """Learn that prefills with this sum of :func:`features_of` took ``seconds`` together."""
        self.transfers += features[-1] > 0
        self.prefills.observe(features, seconds)

    def predicted(self, features: Sequence[float]) -> float:
        return self.prefills.predict(features)

    def stepped(self, seconds: float, batch: float, contexts: float) -> None:
        self._steps.observe((1.0, batch, contexts), seconds)

    def ended(self, max_tokens: int | None, tokens: int) -> None:
        size = _size_of(max_tokens)
        count, mean = self._outputs.get(size, (0, 0.0))
        self._outputs[size] = count + 1, mean + (tokens - mean) * max(0.05, 1 / (count + 1))


def _size_of(max_tokens: int | None) -> int:
    """Return the size class of a limit; limits within a factor of two count as equal."""
    return 0 if max_tokens is None else max_tokens.bit_length()


def features_of(tokens: int, cached: int, batch: float, sent: int) -> tuple[float, ...]:
    """Return the terms in which a prefill's time is linear.

    These are a constant, the tokens, their attention, the batch, and two terms of the send.
    """
    return 1.0, tokens, tokens * (cached + tokens / 2), batch, float(sent > 0), sent


FEW = 2
"""Number of tokens that are computed as part of a decode step, and so do not wait in line."""
MOSTLY_PREFILL = 0.7
MOST_INTERFERENCE = 0.8
TOGETHER = 0.2
"""Share of a prefill's time: prefills that end within it of each other were in the same step."""
LEAST_TOKENS = 256
"""Minimum tokens of a prefill to learn from: shorter ones end within a report or two, which is too short."""
LONGEST_PREFILL = 120.0
SETTLED = 8
"""Number of prefills after which the fleet's fit distinguishes the paces of engines."""
STEPS_EVERY = 2.0
"""Minimum interval, in seconds, between two learned steps of one engine: a step time is a mean, and changes slowly."""
MEMORY = 10.0
UNKNOWN_CONTEXT = 1024


@dataclass(eq=False)
class Job:
    """One sequence on one engine."""

    missing: int  # tokens to compute, after ``cached`` ones
    cached: int = 0
    sent: int = 0  # tokens to push
    output: float = 0.0  # expected tokens to produce here, after the ``given`` ones of another engine; 0: prefill only
    given: int = 0
    context: int = 0  # tokens that its decode reads at first
    max_tokens: int | None = None
    seconds: float = 0.0  # predicted time of its prefill
    stage: Literal["promised", "prefill", "decode"] = "promised"  # promised: a route leads here, no verb was called
    began: float = 0.0
    ready: float = 0.0  # when its decode is expected to begin
    expected_end: float = 0.0
    marks: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)  # sums of the engine when its decode began


class EngineWork:
    """The jobs of one engine. Times are the clock's, in seconds.

    ``decoding`` of its jobs decode now, and read ``contexts`` KV tokens in a step.
    """

    def __init__(self, model: CostModel, clock: Callable[[], float]) -> None:
        self.prefill_pace, self.decode_pace = EnginePace(), EnginePace()
        self.decoding = self.contexts = 0
        self._model, self._clock = model, clock
        self._jobs: dict[str, Job] = {}
        self._line: dict[str, Job] = {}  # prefills that run or wait, in order
        self._coming: dict[str, Job] = {}  # jobs that will decode here
        self._line_seconds = self._promised_seconds = 0.0
        self._expected_ends = 0.0
        self._served_until = 0.0
        self._at = clock()
        self._recent = self._busy = self._batches = self._contexts_read = 0.0
        self._prefills = 0
        self._seen_seconds, self._seen = 0.0, list[float]()

    # ---- remaining work --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def coming(self) -> int:
        """Number of decodes that will run here, but do not run yet."""
        return len(self._coming)

    @property
    def backlog(self) -> float:
        """A rough measure of the work, in seconds, that is cheap to read."""
        return self._line_seconds + self._promised_seconds + 0.01 * self.decoding

    def waiting(self, now: float) -> float:
        """Return the seconds of prefill ahead of a new arrival."""
        return max(0.0, self._line_seconds - self._progress(now)) + self._promised_seconds

    def busy(self, now: float) -> float:
        """Return the seconds, up to now, in which prefills ran or waited here."""
        return self._busy + (now - self._at if self._line else 0.0)

    def under_way(self, now: float) -> float:
        """Return the seconds until the running prefill ends."""
        return max(0.0, self._running - self._progress(now))

    def interference(self, now: float) -> float:
        """Return the share of recent time that prefills took from decodes here."""
        faded = math.exp((self._at - now) / self._model.arrivals.memory)
        return self._recent * faded + (1 - faded) * self._model.taken(self._running, self.decoding, self.contexts)

    def stall(self, now: float, seconds: float) -> float:
        """Return the total delay of decodes if a prefill that arrives now occupies the engine for ``seconds``.

        Later decodes are delayed by the part that is left when they are ready.
        """
        end = self.waiting(now) + seconds
        later = (min(seconds, max(0.0, now + end - job.ready)) for job in self._coming.values())
        return seconds * self.decoding + sum(later)

    def seconds_left(self, now: float) -> float:
        """Return the average remaining time of a running decode, in seconds."""
        return max(0.0, self._expected_ends / self.decoding - now) if self.decoding else 0.0

    # ---- events ----------------------------------------------------------------------------------------------

    def promise(self, seq_id: str, job: Job) -> None:
        self._pass_time()
        self._enter(seq_id, job)
        self._promised_seconds += job.seconds

    def begin(self, seq_id: str, job: Job) -> Job:
        """Record that a verb was called: the promised job gets its place in line, or ``job`` if none was promised."""
        now = self._pass_time()
        found = self._jobs.get(seq_id)
        if found is None or found.stage != "promised":
            self.leave(seq_id)
            self._enter(seq_id, job)
        else:
            self._promised_seconds -= found.seconds
            job = found
        job.began = now
        job.stage = "prefill"
        job.ready = max(job.ready, now + self.waiting(now) + job.seconds)
        self._model.arrivals.note(now)
        if job.missing > FEW:
            if not self._line:
                self._served_until = now
            self._line[seq_id] = job
            self._line_seconds += job.seconds
        return job

    def prefilled(self, seq_id: str, job: Job, computed: int, cached: int, sent: int) -> None:
        """Record that a job's prefill ended and its sent tokens are in place; learn from it."""
        now = self._pass_time()
        if job.stage == "prefill":
            took = now - max(job.began, self._served_until)
            if self._line.pop(seq_id, None) is job:
                self._line_seconds -= job.seconds
                self._served_until = now
                self._prefills += 1
            if computed > FEW or sent:
                # Prefills that end (nearly) together ran in one step, and are one observation.
                features = features_of(computed, cached, self.decoding, sent)
                if took > TOGETHER * self._model.predicted(features):
                    self._learn_prefills()
                self._seen_seconds += took
                self._seen = [a + b for a, b in zip(self._seen or (0.0,) * len(features), features, strict=True)]
                if not self._line:
                    self._learn_prefills()
            job.stage = "decode"
            if job.output:
                del self._coming[seq_id]
                self.decoding += 1
                self.contexts += job.context
                tpot = self._model.tpot(self.decoding, self.contexts, self.interference(now), self.decode_pace)
                job.began, job.expected_end = now, now + job.output * tpot
                job.marks = (self._busy, self._batches, self._contexts_read, self._prefills)
                self._expected_ends += job.expected_end

    def decoded(self, job: Job, tokens: int) -> None:
        """Record that a job produced its last token, ``tokens`` of them here; learn from it."""
        now = self._pass_time()
        self._model.ended(job.max_tokens, job.given + tokens)
        busy, batches, contexts, prefills = job.marks
        passed, shared = now - job.began, self._busy - busy
        steps = tokens - 1 - (self._prefills - prefills)
        # A short decode, or one that mostly shared its steps with prefills, would blame the decode for their time.
        if steps < FEW or passed <= 0 or shared > MOSTLY_PREFILL * passed:
            return
        seconds = (passed - shared) / steps
        batch, read = (self._batches - batches) / passed, (self._contexts_read - contexts) / passed
        self.decode_pace.observe(seconds, self._model.step(batch, read))
        self._model.stepped(seconds, batch, read)

    def leave(self, seq_id: str) -> None:
        """Record that a job ended here for any reason; a job that has already left is ignored."""
        job = self._jobs.pop(seq_id, None)
        if job is None:
            return
        now = self._pass_time()
        if job.stage == "promised":
            self._promised_seconds -= job.seconds
        elif self._line.pop(seq_id, None) is not None:
            self._line_seconds -= job.seconds
            self._served_until = now
        if self._coming.pop(seq_id, None) is None and job.output:
            self.decoding -= 1
            self.contexts -= job.context
            self._expected_ends -= job.expected_end
        # The sums are kept up to date by each event, since a decision reads them for every engine.
        if not self._jobs:  # sums of floats drift
            self._line_seconds = self._promised_seconds = self._expected_ends = 0.0

    def _enter(self, seq_id: str, job: Job) -> None:
        self._jobs[seq_id] = job
        if job.output:
            self._coming[seq_id] = job

    def _learn_prefills(self) -> None:
        if self._seen_seconds > 0:
            self.prefill_pace.observe(self._seen_seconds, self._model.predicted(self._seen))
            self._model.prefilled(self._seen_seconds, self._seen)
        self._seen_seconds, self._seen = 0.0, []

    @property
    def _running(self) -> float:
        """The predicted seconds of the first prefill in line, 0 without one."""
        head = next(iter(self._line.values()), None)
        return 0.0 if head is None else head.seconds

    def _progress(self, now: float) -> float:
        """Return the seconds that the first in line has run, limited to a little less than its predicted time."""
        return min(now - self._served_until, 0.95 * self._running)

    def _pass_time(self) -> float:
        """Account for the time since the last event, in which the jobs did not change; return the time."""
        now = self._clock()
        passed = now - self._at
        self._recent = self.interference(now)
        self._at = now
        self._busy += passed if self._line else 0.0
        self._batches += passed * self.decoding
        self._contexts_read += passed * self.contexts
        return now


@dataclass
class _Alone:
    """The only running prefill, as far as known."""

    at: float  # the time of its pick
    tokens: int
    features: tuple[float, ...]
    seen: bool = False


class ReportedWork:
    """The work of one engine by its reports alone, for processes that do not see requests begin or end there.

    Its methods are those of :class:`EngineWork`. Reports arrive at intervals, and have the number of prompt tokens
    without a first token yet. So the time of a prefill is learned only if it ran alone: from its pick to the middle of
    the interval in which its tokens disappeared. ``kv_tokens`` returns the capacity of the engine's cache.
    """

    def __init__(self, model: CostModel, clock: Callable[[], float], kv_tokens: Callable[[], int]) -> None:
        self.prefill_pace, self.decode_pace = EnginePace(), EnginePace()
        self.decoding = self.contexts = self.coming = 0
        self.learned = 0  # prefills from which the model has learned
        self._model, self._clock, self._kv_tokens = model, clock, kv_tokens
        self._backlog = 0
        self._interference = 0.0
        self._at = clock()
        self._stepped_at = -math.inf
        self._alone: _Alone | None = None

    # ---- events ----------------------------------------------------------------------------------------------

    def picked(self, tokens: int, cached: int) -> None:
        """Record a prompt of ``tokens`` that was routed here; ``cached`` is its estimated cached part."""
        missing = max(1, tokens - cached)
        is_first = self._backlog == 0 and self._alone is None
        features = features_of(missing, cached, self.decoding, 0)
        self._alone = _Alone(self._clock(), tokens, features) if is_first and missing >= LEAST_TOKENS else None
        self._backlog += tokens

    def reported(self, load: EngineLoad) -> None:
        now = self._clock()
        passed, before, backlog = now - self._at, self._backlog, load.tokens or 0
        self._at = now
        faded = math.exp(-passed / MEMORY)
        prefill = self._model.prefill(backlog, 0, self.decoding) if backlog else 0.0
        self._interference *= faded
        self._interference += (1 - faded) * self._model.taken(prefill, self.decoding, self.contexts)
        self.decoding = load.running
        self.contexts = int(load.kv_usage * self._kv_tokens()) or load.running * UNKNOWN_CONTEXT
        if (alone := self._alone) is not None:
            if backlog > alone.tokens or now - alone.at > LONGEST_PREFILL:
                self._alone = None  # the engine has a prompt of another process, too
            elif backlog:
                alone.seen = True
            elif alone.seen:
                self._alone = None
                seconds = now - passed / 2 - alone.at
                if seconds > 0:
                    if self._model.prefills.count >= SETTLED:  # before that, the first observed engines would look slow
                        self.prefill_pace.observe(seconds, self._model.predicted(alone.features))
                    self._model.prefilled(seconds, alone.features)
                    self.learned += 1
            elif now - alone.at > 2 * passed:
                self._alone = None  # it ended between two reports, or another engine got it
        decodes_alone = not before and not backlog and load.running
        if decodes_alone and load.step_time and now - self._stepped_at >= STEPS_EVERY:
            self._stepped_at = now
            self.decode_pace.observe(load.step_time, self._model.step(load.running, self.contexts))
            self._model.stepped(load.step_time, load.running, self.contexts)
        self._backlog = backlog

    # ---- remaining work --------------------------------------------------------------------------------------

    def waiting(self, now: float) -> float:
        return self._model.prefill(self._backlog, 0, self.decoding) * self.prefill_pace.factor if self._backlog else 0.0

    def under_way(self, now: float) -> float:
        """Return the seconds until all waiting prefills end: reports do not name the running one."""
        return self.waiting(now)

    def interference(self, now: float) -> float:
        return self._interference

    def stall(self, now: float, seconds: float) -> float:
        return seconds * self.decoding

    def seconds_left(self, now: float) -> float:
        """Return the average remaining time of a running decode: half of its time, in seconds."""
        if not self.decoding:
            return 0.0
        tpot = self._model.tpot(self.decoding, self.contexts, self._interference, self.decode_pace)
        return self._model.output_of(None) / 2 * tpot
