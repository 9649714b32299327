"""Exemplars: in each bucket of a histogram the last request of a sampled trace, for scrapers that ask for OpenMetrics.

The Python client of Prometheus keeps none for several processes. So a router keeps them itself, one worker as several,
and the worker that is scraped asks the others for theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from tercet.protocol.spans import SpanContext
from tercet.wire.metric_buckets import SECONDS

WORKERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which the workers of one router count together."""
MOST_EXEMPLARS = 4096
"""Buckets that a process has one for; more are left out, the oldest first."""
_BOUNDS = tuple(floatToGoString(bound) for bound in (*SECONDS, math.inf))
Bucket = tuple[str, frozenset[tuple[str, str]]]


class KeptExemplar(NamedTuple):
    """One measurement: the histogram and the labels of its bucket, when it was made, and the span that it is of."""

    histogram: str
    labels: dict[str, str]
    value: float
    at: float
    trace_id: str
    span_id: str

    @property
    def bucket(self) -> Bucket:
        """Where it belongs."""
        return f"{self.histogram}_bucket", frozenset(self.labels.items())


class Exemplars:
    """Those of this process, of histograms with the buckets :data:`~tercet.wire.metric_buckets.SECONDS`."""

    def __init__(self) -> None:
        self._kept: dict[Bucket, KeptExemplar] = {}

    def note(
        self, histogram: str, labels: Mapping[str, str], value: float, at: float, place: SpanContext, span: str = ""
    ) -> None:  # fmt: skip
        """A measurement ``at`` a time, of a ``span`` or of the place itself; of a trace that is sampled, or nothing."""
        if not place.sampled:
            return
        in_bucket = {**labels, "le": _BOUNDS[bisect_left(SECONDS, value)]}
        found = KeptExemplar(histogram, in_bucket, value, at, place.trace_id, span or place.span_id)
        self._kept.pop(found.bucket, None)  # so that the newest is the last
        self._kept[found.bucket] = found
        if len(self._kept) > MOST_EXEMPLARS:
            del self._kept[next(iter(self._kept))]

    def kept(self) -> list[KeptExemplar]:
        """All of them, the oldest first."""
        return list(self._kept.values())


def by_bucket(kept: Iterable[KeptExemplar]) -> dict[Bucket, Exemplar]:
    """The newest of each bucket, of all processes."""
    return {
        each.bucket: Exemplar({"trace_id": each.trace_id, "span_id": each.span_id}, each.value, each.at)
        for each in sorted(kept, key=lambda each: each.at)
    }


def with_exemplar(sample: Sample, found: Mapping[Bucket, Exemplar]) -> Sample:
    """The sample, with the exemplar of its bucket if there is one."""
    exemplar = found.get((sample.name, frozenset(sample.labels.items()))) if found else None
    return sample if exemplar is None else sample._replace(exemplar=exemplar)
