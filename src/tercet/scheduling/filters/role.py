"""Engines by role."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.scheduling.plugin import Decision, Engines, Filter


class PrefillFilter(Filter, frozen=True):
    """Keeps engines whose role is ``prefill``; with ``allows_both``, also those that do everything."""

    allows_both: bool = True

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        """Whether each may prefill."""
        roles = ("prefill", "both") if self.allows_both else ("prefill",)
        return [engine.role in roles for engine in engines]


class DecodeFilter(Filter, frozen=True):
    """Keeps engines whose role is ``decode`` or ``both``."""

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        """Whether each may decode."""
        return [engine.role in ("decode", "both") for engine in engines]
