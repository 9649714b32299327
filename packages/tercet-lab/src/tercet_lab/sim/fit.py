"""The fit of the step model's terms to measured steps: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest
from tercet.protocol.entry_points import import_extra
from tercet_lab.sim.step_times import StepModel, StepTimes, pairs_of

Floats = NDArray[np.float64]


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that computed ``tokens`` prompt tokens after ``cached`` cached tokens, in ``seconds``."""

    tokens: int
    cached: int
    seconds: float


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that decoded ``batch`` sequences with ``context`` KV tokens each, in ``seconds``."""

    batch: int
    context: int
    seconds: float


def fit_steps(
    prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint], knots: Sequence[int]
) -> tuple[StepTimes, dict[str, float]]:
    """Return the terms that fit best, and the mean absolute relative error by kind of step.

    ``knots`` are token counts in rising order; the linear part is interpolated between them. Raise
    :class:`~tercet.protocol.BadRequest` if the points cannot determine the terms.
    """
    points, terms = len(prefills) + len(decodes), len(knots) + 3
    if points < terms or len(knots) < 2 or not decodes or not prefills:
        raise BadRequest(f"points: {points} of both kinds cannot determine {terms} terms; measure more", "points")
    rows = [_row(knots, p.tokens, pairs_of(p.cached, p.cached + p.tokens), 0, 0) for p in prefills]
    rows += [_row(knots, d.batch, 0, d.batch * (d.context + 1), d.batch) for d in decodes]
    seconds = np.array([point.seconds for point in (*prefills, *decodes)])
    if not (seconds > 0).all():
        raise BadRequest("points: every step must take more than 0 seconds", "points")
    found = non_negative_least_squares(np.array(rows) / seconds[:, None], np.ones(len(seconds)))
    linear, (pair, context, sequence) = np.cumsum(found[: len(knots)]), (float(value) for value in found[len(knots) :])
    table = tuple((int(knot), float(value)) for knot, value in zip(knots, linear, strict=True))
    times = StepTimes(knots=table, pair=pair, context=context, sequence=sequence)
    return times, errors_of(times, prefills, decodes)


def errors_of(times: StepTimes, prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint]) -> dict[str, float]:
    """Return the mean absolute relative error of the model on points, by kind of step."""
    model = StepModel(times)
    prefill = [model.step(p.tokens, pairs_of(p.cached, p.cached + p.tokens), 0, 0) / p.seconds for p in prefills]
    decode = [model.step(0, 0, d.batch, d.batch * (d.context + 1)) / d.seconds for d in decodes]
    kinds = {"prefill": prefill, "decode": decode}
    return {kind: round(float(np.mean(np.abs(np.array(ratios) - 1))), 4) for kind, ratios in kinds.items()}


def _row(knots: Sequence[int], tokens: int, pairs: float, contexts: float, sequences: float) -> list[float]:
    """Return the coefficients of one point.

    They belong to the value at the first knot, to the rise to each next knot, and to the three other terms.
    """
    rises = [1.0]
    for index, (low, high) in enumerate(pairwise(knots)):
        share = (tokens - low) / (high - low)
        # After the last knot, the last slope continues.
        rises.append(max(0.0, share if index == len(knots) - 2 else min(share, 1.0)))
    return [*rises, pairs, contexts, sequences]


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the ``x >= 0`` that minimizes ``|matrix @ x - target|``."""
    nnls = import_extra("scipy.optimize", "fitting a profile").nnls

    # Columns differ by ten orders of magnitude, so one tolerance does not suit them all: scale them.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    found, _residual = cast("tuple[Floats, float]", nnls(matrix / scale, target))
    return found / scale
