"""Workloads for scripts: the arrivals and the lengths of requests, in typed parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from tercet_lab.bench.simulated.scenario import PlannedWorkload, SyntheticWorkload
from tercet_lab.bench.workloads.rows import rows_of


class Fixed(msgspec.Struct, frozen=True):
    """Lengths of always ``mean`` tokens."""

    mean: float


class Normal(msgspec.Struct, frozen=True):
    """Lengths of a normal distribution, at least 1 token, with exactly this mean; ``dev`` is its standard deviation."""

    mean: float
    dev: float = 0.0


class Lognormal(msgspec.Struct, frozen=True):
    """Lengths of a lognormal distribution, which has a long tail of up to 20 means, with exactly this mean."""

    mean: float
    dev: float = 0.0


Lengths = Fixed | Normal | Lognormal


def Poisson(
    rate: float, requests: int, *, input: Lengths | float = 512.0, output: Lengths | float = 128.0, warm_up: int = 0,
    burstiness: float = 1.0, prefixes: int = 0, prefix: int = 0,
) -> SyntheticWorkload:  # fmt: skip
    """Return a workload of ``requests`` measured requests that arrive at random, ``rate`` per second.

    ``burstiness`` is the shape of gamma distributed gaps: below 1 is bursty, 1 is Poisson; infinity is a constant rate.
    ``warm_up`` more requests come first and are not measured. Each prompt begins with one of ``prefixes`` prefixes of
    ``prefix`` tokens. Raise :class:`~tercet.protocol.BadRequest` for invalid values.
    """
    given = [Fixed(each) if isinstance(each, int | float) else each for each in (input, output)]
    devs = [0.0 if isinstance(each, Fixed) else float(each.dev) for each in given]
    kinds: list[Literal["normal", "lognormal"]] = [
        "lognormal" if isinstance(each, Lognormal) else "normal" for each in given
    ]
    even = burstiness == float("inf")
    return SyntheticWorkload(
        rate=float(rate), requests=requests + warm_up, warm_up=warm_up, input_mean=float(given[0].mean),
        input_dev=devs[0],
        output_mean=float(given[1].mean), output_dev=devs[1], lengths=kinds[0],
        output_lengths=kinds[1] if kinds[0] != kinds[1] and devs[1] else None,
        arrivals="constant" if even else "poisson" if burstiness == 1.0 else "gamma",
        burstiness=1.0 if even else burstiness, prefixes=prefixes, prefix=prefix,
    )  # fmt: skip


def Workload(
    *texts: str, rate: float | None = None, requests: int | None = None, warm_up: int = 0, burstiness: float = 1.0,
    arrivals: Literal["poisson", "constant", "gamma", "trace"] | None = None,
) -> PlannedWorkload:  # fmt: skip
    """Return a workload of ``tercet bench``, such as ``"sonnet,input_len=3000+sessions,turns=4"``; one text per phase.

    ``rate`` counts requests per second. ``requests`` are measured; ``warm_up`` more come first. None is all of a trace.
    """
    kind = arrivals or ("poisson" if burstiness == 1.0 else "gamma")
    measured = None if requests is None else requests + warm_up
    return PlannedWorkload(
        workload=texts, rate=rate, requests=measured, arrivals=kind, burstiness=burstiness, warm_up=warm_up
    )


def Trace(
    path: str | Path, kind: Literal["mooncake", "azure", "burstgpt"] = "mooncake", *, rate: float | None = None,
    requests: int | None = None, warm_up: int = 0, **keys: Any,
) -> PlannedWorkload:  # fmt: skip
    """Return the requests of a recorded trace, at its own times, or stretched to a mean ``rate`` per second.

    ``keys`` are those of the kind, such as ``max_input_len=4000``. None of ``requests`` is all.
    """
    return Workload(
        _text(kind, {"path": path, **keys}), rate=rate, requests=requests, warm_up=warm_up, arrivals="trace"
    )


def Rows(rows: Any, rate: float | None = None, *, block: int = 512, warm_up: int = 0) -> PlannedWorkload:
    """Return the requests of ``rows``: mappings, a data frame, or a table of requests of a run.

    A row has ``at`` (s), or else ``scheduled``; ``input_tokens``; ``wanted_tokens``, or else ``output_tokens``; and
    optionally ``session``, ``klass`` of the objectives, and ``prefix``, the ids of the blocks of ``block`` tokens with
    which its prompt begins; equal ids are equal tokens. Other keys are ignored. Later rows of a session continue what
    was said, at their times, but not before the answer. With ``rate``, times are stretched to that many requests per
    second. Raise :class:`~tercet.protocol.BadRequest` that names the row and the key.
    """
    return PlannedWorkload(rows=rows_of(rows, block), rate=rate, arrivals="trace", warm_up=warm_up)


def Sessions(rate: float, requests: int, *, warm_up: int = 0, burstiness: float = 1.0, **keys: Any) -> PlannedWorkload:
    """Return conversations of several turns: ``turns``, ``think_time`` (s), ``system_len``, ``input_len`` and others.

    ``rate`` and ``requests`` count all turns. ``keys`` are those of the kind ``sessions`` of ``tercet bench``.
    """
    return Workload(_text("sessions", keys), rate=rate, requests=requests, warm_up=warm_up, burstiness=burstiness)


def _text(kind: str, keys: dict[str, Any]) -> str:
    return ",".join([kind, *(f"{name}={value}" for name, value in keys.items())])
