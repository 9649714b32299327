"""The LoRA adapters that a fleet serves: its engines' adapters, and the adapters that operators declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tercet.fleet.adapters import Declared, agreed, differing, has, wanted_by
from tercet.fleet.members import Member
from tercet.fleet.roster import Roster
from tercet.protocol import AdapterReport, EngineStatus, Request, UnknownAdapter
from tercet.settings import log_events


class AgreedAdapters(Mapping[str, AdapterReport]):
    """The adapters of the members of ``roster``, by name: each name stands for one adapter."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._declared: Declared = ()
        self._agreed: dict[str, AdapterReport] = {}

    def __getitem__(self, name: str) -> AdapterReport:
        return self._agreed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agreed)

    def __len__(self) -> int:
        return len(self._agreed)

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
            log_events.ADAPTER_DIFFERS.tell(engine=engine, adapter=report.name, reason=why)

    def agree(self) -> None:
        """Compute again which adapter each name stands for: reports, members or declarations have changed."""
        said = [member.adapters for member in self._roster.members if member.adapters]
        if said or self._declared or self._agreed:
            self._agreed = agreed(said, self._declared)

    def pinned(self, request: Request) -> Request:
        """Return the request with the digest of the adapter that its adapter name stands for now.

        Raises :class:`~tercet.protocol.UnknownAdapter` for a name that the fleet does not know.
        """
        if request.adapter is None or request.adapter_digest:
            return request
        found = self.get(request.adapter)
        if found is None:
            raise UnknownAdapter(f"model: this fleet has no adapter {request.adapter!r}", "model")
        return msgspec.structs.replace(request, adapter_digest=found.digest)

    def require(self, name: str, request: Request) -> None:
        """Raise :class:`~tercet.protocol.UnknownAdapter` if an engine lacks the adapter of the request."""
        if request.adapter is not None and not has(self._roster.member(name).adapters, wanted_by(request, self)):
            raise UnknownAdapter(f"destination: {name} does not have the adapter {request.adapter!r}", "destination")
