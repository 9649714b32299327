"""The LoRA adapters of a fleet, computed from its engines' reports. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tercet.protocol import AdapterReport, Request

Declared = Sequence[AdapterReport]


def agreed(said: Iterable[Mapping[str, AdapterReport]], declared: Declared = ()) -> dict[str, AdapterReport]:
    """Return the adapter that each name stands for in the fleet. An engine with other contents gets no such requests.

    If operators ``declared`` a name with a digest, that digest counts; else the digest that most engines report, and
    among equally frequent digests the smallest. So every router computes the same result.
    """
    found = {each.name: each for each in declared if each.digest}
    reports = [report for of_one in said for report in of_one.values() if report.name not in found]
    times = Counter((report.name, report.digest) for report in reports)
    for report in sorted(reports, key=lambda report: (-times[report.name, report.digest], report.digest, report.path)):
        found.setdefault(report.name, report)
    return dict(sorted(found.items()))


def wanted_by(request: Request, means: Mapping[str, AdapterReport]) -> AdapterReport | None:
    """Return the adapter of a request, or None; its digest is that of the time when the request was accepted.

    For a request without a digest, ``means`` maps the name to the adapter.
    """
    if request.adapter is None:
        return None
    if request.adapter_digest:
        return AdapterReport(request.adapter, "", request.adapter_digest)
    return means.get(request.adapter)


def has(adapters: Mapping[str, AdapterReport], wanted: AdapterReport | None) -> bool:
    """True if an engine with these adapters has the ``wanted`` one (same name and digest); False if none is wanted."""
    if wanted is None:
        return False
    own = adapters.get(wanted.name)
    return own is not None and own.digest == wanted.digest


def differing(
    said: Mapping[str, Mapping[str, AdapterReport]], means: Mapping[str, AdapterReport]
) -> Iterator[tuple[str, AdapterReport]]:
    """Yield each engine that reports other contents for a name than the fleet has, with its report."""
    for engine, adapters in said.items():
        for report in adapters.values():
            if report.name in means and not has(adapters, means[report.name]):
                yield engine, report
