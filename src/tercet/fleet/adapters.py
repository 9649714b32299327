"""The LoRA adapters of a fleet, computed from its engines' reports and operators' declarations. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tercet import logs
from tercet.protocol import AdapterReport, EngineStatus, Request, UnknownAdapter

if TYPE_CHECKING:  # members import picking, which uses the functions here
    from tercet.fleet.members import Member, Roster

Declared = Sequence[AdapterReport]


def agreed(said: Iterable[Mapping[str, AdapterReport]], declared: Declared = ()) -> dict[str, AdapterReport]:
    """Return the adapter that each name stands for in the fleet. An engine with other contents gets no such requests.

    If operators ``declared`` a name with a digest, that digest counts; else the digest that most engines report, and
    among equally frequent digests the smallest. So every router computes the same result.
    """
    # Without this agreement a name would mean other weights on each engine, and a prefix that one computed would be
    # taken for that of another.
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


class AgreedAdapters(dict[str, AdapterReport]):
    """The adapters of the members of ``roster``, by name: each name stands for one adapter."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._declared: Declared = ()

    @property
    def declared(self) -> Declared:
        """The adapters that every engine of this fleet should have; assign to change them."""
        return self._declared

    @declared.setter
    def declared(self, declared: Declared) -> None:
        self._declared = declared
        self.agree()

    def reported(self, member: Member, status: EngineStatus) -> None:
        """Record an engine's adapters, and how many of them one step may serve."""
        member.adapters = {report.name: report for report in status.adapters}
        member.max_adapters = status.max_adapters
        self.agree()
        for engine, report in differing({member.name: member.adapters}, self):
            why = f"its digest is {report.digest}, and the digest in this fleet is {self[report.name].digest}"
            logs.ADAPTER_DIFFERS.tell(engine=engine, adapter=report.name, reason=why)

    def agree(self) -> None:
        """Compute again which adapter each name stands for: reports, members or declarations have changed."""
        said = [member.adapters for member in self._roster.members if member.adapters]
        if said or self._declared or self:
            now = agreed(said, self._declared)
            self.clear()
            self.update(now)

    def pinned(self, request: Request) -> Request:
        """Return the request with the digest of the adapter that its adapter name stands for now.

        Raises :class:`~tercet.protocol.UnknownAdapter` for a name that the fleet does not know.
        """
        if request.adapter is None or request.adapter_digest:
            return request
        # Once, when the request comes: its retries and moves go to engines with the same contents, also after the name
        # has got others.
        found = self.get(request.adapter)
        if found is None:
            raise UnknownAdapter(f"model: this fleet has no adapter {request.adapter!r}", "model")
        return msgspec.structs.replace(request, adapter_digest=found.digest)

    def require(self, name: str, request: Request) -> None:
        if request.adapter is not None and not has(self._roster.member(name).adapters, wanted_by(request, self)):
            raise UnknownAdapter(f"destination: {name} does not have the adapter {request.adapter!r}", "destination")
