"""Which LoRA adapters a fleet has, made of what its engines say they have. Decides without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tercet.protocol import AdapterReport, Request

Declared = Sequence[AdapterReport]


def agreed(said: Iterable[Mapping[str, AdapterReport]], declared: Declared = ()) -> dict[str, AdapterReport]:
    """What the fleet means by each name, of what its engines say; who means something else is not asked for it.

    A name that operators have ``declared`` with a digest means that; any other what most engines mean by it,
    and of as many the one with the smallest digest: each front door finds the same.
    """
    found = {each.name: each for each in declared if each.digest}
    reports = [report for of_one in said for report in of_one.values() if report.name not in found]
    times = Counter((report.name, report.digest) for report in reports)
    for report in sorted(reports, key=lambda report: (-times[report.name, report.digest], report.digest, report.path)):
        found.setdefault(report.name, report)
    return dict(sorted(found.items()))


def wanted_by(request: Request, means: Mapping[str, AdapterReport]) -> AdapterReport | None:
    """The adapter that a request is for: of the contents that it was taken for, whatever its name ``means`` now."""
    if request.adapter is None:
        return None
    if request.adapter_digest:
        return AdapterReport(request.adapter, "", request.adapter_digest)
    return means.get(request.adapter)


def has(adapters: Mapping[str, AdapterReport], wanted: AdapterReport | None) -> bool:
    """Whether an engine with these adapters has the one that is meant; nobody has what nobody means."""
    if wanted is None:
        return False
    own = adapters.get(wanted.name)
    return own is not None and own.digest == wanted.digest


def differing(
    said: Mapping[str, Mapping[str, AdapterReport]], means: Mapping[str, AdapterReport]
) -> Iterator[tuple[str, AdapterReport]]:
    """Engines that mean something else by a name, each with what it means."""
    for engine, adapters in said.items():
        for report in adapters.values():
            if report.name in means and not has(adapters, means[report.name]):
                yield engine, report
