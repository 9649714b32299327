"""Exemplars: for each bucket of a histogram, the last request of a sampled trace, for scrapers that use OpenMetrics.

The Python client of Prometheus does not support exemplars of several processes. Therefore each worker of a router keeps
its own, and the worker that is scraped asks the others for theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from tercet.protocol.spans import SpanContext
from tercet.wire import SECONDS

WORKERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which the workers of one router count together."""
MOST_EXEMPLARS = 4096
"""Largest number of exemplars of a process; beyond it the oldest is dropped."""
_BOUNDS = tuple(floatToGoString(bound) for bound in (*SECONDS, math.inf))
Bucket = tuple[str, frozenset[tuple[str, str]]]


class KeptExemplar(NamedTuple):
    """One measurement: its histogram and the labels of its bucket, its value (s), Unix time (s), trace and span."""

    histogram: str
    labels: dict[str, str]
    value: float
    at: float
    trace_id: str
    span_id: str

    @property
    def bucket(self) -> Bucket:
        """The bucket of the measurement: the name of its series, and its labels."""
        return f"{self.histogram}_bucket", frozenset(self.labels.items())


class Exemplars:
    """The exemplars of this process, for histograms with the buckets :data:`~tercet.wire.SECONDS`."""

    def __init__(self) -> None:
        self._kept: dict[Bucket, KeptExemplar] = {}

    def note(
        self, histogram: str, labels: Mapping[str, str], value: float, at: float, place: SpanContext, span: str = ""
    ) -> None:  # fmt: skip
        """Keep a measurement of a ``span``, or of ``place``, if its trace is sampled; ``at`` is a Unix time (s)."""
        if not place.sampled:
            return
        in_bucket = {**labels, "le": _BOUNDS[bisect_left(SECONDS, value)]}
        found = KeptExemplar(histogram, in_bucket, value, at, place.trace_id, span or place.span_id)
        self._kept.pop(found.bucket, None)  # so that the newest is the last
        self._kept[found.bucket] = found
        if len(self._kept) > MOST_EXEMPLARS:
            del self._kept[next(iter(self._kept))]

    def kept(self) -> list[KeptExemplar]:
        """Return all exemplars, oldest first."""
        return list(self._kept.values())


def by_bucket(kept: Iterable[KeptExemplar]) -> dict[Bucket, Exemplar]:
    """Return the newest exemplar of each bucket, of all processes."""
    return {
        each.bucket: Exemplar({"trace_id": each.trace_id, "span_id": each.span_id}, each.value, each.at)
        for each in sorted(kept, key=lambda each: each.at)
    }


def with_exemplar(sample: Sample, found: Mapping[Bucket, Exemplar]) -> Sample:
    """Return the sample with the exemplar of its bucket, if there is one."""
    exemplar = found.get((sample.name, frozenset(sample.labels.items()))) if found else None
    return sample if exemplar is None else sample._replace(exemplar=exemplar)
