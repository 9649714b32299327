"""Cost of serving, in seconds: prefills, decode steps and transfers, learned by observing engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

SWEEPS = 8
WILD = 3.0
# Observations at the beginning change the fit much. After FIRST of them it is solved once per EVERY observations.
FIRST, EVERY = 32, 4
UNTOLD_OUTPUT = 256
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
        if self.count == 0 and predicted > 0:
            self._prior = [coefficient * value / predicted for coefficient in self._prior]
            self.theta = list(self._prior)
            predicted = value
        self.count += 1
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
        if self.count <= FIRST or self.count % EVERY == 0:
            self._solve()

    def _weight(self, error: float) -> float:
        limit = WILD * self._spread
        self._spread += 0.05 * (min(error, 2 * limit) - self._spread)
        self._spread = max(self._spread, 0.01)
        return 1.0 if error <= limit else limit / error

    def _solve(self) -> None:
        # On the router's event loop, coordinate descent from the last solution costs 26 us for six coefficients and
        # 13 us for three; SciPy's NNLS, with the Cholesky factor that it needs, costs 28 us for either.
        theta = self.theta
        for _ in range(SWEEPS):
            for index, row in enumerate(self._squares):
                prior = self._prior[index]
                pull = self._pull / (prior * prior)
                others = sum(map(mul, row, theta)) - row[index] * theta[index]
                theta[index] = max(0.0, (self._products[index] + pull * prior - others) / (row[index] + pull))


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
        """Learn that ``seconds`` were observed where the fleet's fit predicts ``predicted``."""
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
        """Record that a prefill begins on some engine at time ``now``."""
        if self._last is not None:
            gap = now - self._last
            self._gap += (gap - self._gap) * (0.1 if self._gap else 1.0)
        self._last = now


class CostModel:
    """The fleet's fits.

    Before the first observation they have the order of magnitude of one model on one accelerator.
    """

    def __init__(self) -> None:
        self._prefills = OnlineFit((0.01, 1e-4, 1e-8, 1e-4, 5e-4, 2e-7))
        self._steps = OnlineFit((0.01, 1e-4, 1e-7))
        self._outputs: dict[int, tuple[int, float]] = {}
        self.arrivals = ArrivalRate()
        self.transfers = 0

    def prefill(self, tokens: int, cached: int = 0, batch: float = 0, sent: int = 0) -> float:
        """Return the seconds to compute ``tokens`` after ``cached`` ones, and send ``sent`` to another engine."""
        return self._prefills.predict(features_of(tokens, cached, batch, sent))

    def step(self, batch: float, contexts: float) -> float:
        """Return the seconds of a step that decodes ``batch`` sequences with ``contexts`` tokens of KV in total."""
        return self._steps.predict((1.0, batch, contexts))

    def output_of(self, max_tokens: int | None) -> float:
        """Return the expected output tokens of a request with this limit: the mean of requests with a similar limit."""
        limit = math.inf if max_tokens is None else max_tokens
        _, mean = self._outputs.get(_size_of(max_tokens), (0, UNTOLD_OUTPUT))
        return max(1.0, min(mean, limit))

    def prefilled(self, seconds: float, features: Sequence[float]) -> None:
        """Learn that prefills with this sum of :func:`features_of` took ``seconds`` together."""
        self.transfers += features[-1] > 0
        self._prefills.observe(features, seconds)

    @property
    def prefills_seen(self) -> int:
        """Number of observed prefills."""
        return self._prefills.count

    def predicted(self, features: Sequence[float]) -> float:
        """Return the predicted seconds of prefills with this sum of :func:`features_of`."""
        return self._prefills.predict(features)

    def stepped(self, seconds: float, batch: float, contexts: float) -> None:
        """Learn that decode steps took ``seconds`` each, on average."""
        self._steps.observe((1.0, batch, contexts), seconds)

    def ended(self, max_tokens: int | None, tokens: int) -> None:
        """Learn the number of output tokens of a request."""
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
