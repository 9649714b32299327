"""Non-negative least squares over a stream of observations: old ones fade, wild ones count little."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

SWEEPS = 8
WILD = 3.0
# The first observations change much; later ones are solved for several at a time.
FIRST, EVERY = 32, 4


class OnlineFit:
    """Coefficients ``theta >= 0`` with ``theta . features`` close to what was observed, in relative terms.

    Minimises the sum over observations of ``weight * ((theta . x - y) / scale)^2`` by coordinate descent on the normal
    equations; each observation multiplies the weight of those before by ``forgetting``. A weak pull towards ``prior``
    (all positive) decides what no observation tells. The first observation sets the scale of the whole prior: engines
    differ in speed by orders of magnitude, and much less in the shares of what their time goes into. An observation
    further off than three times the usual error counts in inverse proportion (Huber's weights).
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
        """Never negative, and never less for larger features."""
        return sum(map(mul, self.theta, features))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Learn that ``features`` came with ``value``; features are not negative, values are positive."""
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
        # Coordinate descent from the last solution costs 26 us for six coefficients and 13 us for three, on
        # the front door's event loop; SciPy's NNLS, with the Cholesky factor it needs, 28 us for either.
        theta = self.theta
        for _ in range(SWEEPS):
            for index, row in enumerate(self._squares):
                prior = self._prior[index]
                pull = self._pull / (prior * prior)
                others = sum(map(mul, row, theta)) - row[index] * theta[index]
                theta[index] = max(0.0, (self._products[index] + pull * prior - others) / (row[index] + pull))
