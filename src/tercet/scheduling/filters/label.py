"""Engines by their operators' labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from tercet.scheduling.plugin import Decision, Engines, Filter


class ByLabel(Filter, frozen=True):
    """Keeps engines whose ``label`` has one of ``valid_values``, and with ``allows_no_label`` those without it."""

    label: Annotated[str, Meta(min_length=1)]
    valid_values: frozenset[str] = frozenset()
    allows_no_label: bool = False

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        """Whether each has the label as wanted."""
        label, valid, without = self.label, self.valid_values, self.allows_no_label
        return [value in valid if (value := e.labels.get(label)) is not None else without for e in engines]


class ByLabelSelector(Filter, frozen=True):
    """Keeps engines that have every label of ``match_labels`` with exactly that value."""

    match_labels: Annotated[Mapping[str, str], Meta(min_length=1)]

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        """Whether each has all of them."""
        wanted = self.match_labels.items()
        return [wanted <= engine.labels.items() for engine in engines]
