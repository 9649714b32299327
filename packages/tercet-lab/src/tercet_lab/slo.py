"""The limits of a good request: an SLO in seconds, and ``--goodput``, which has it in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tercet.protocol import BadRequest

Limit = Annotated[float, msgspec.Meta(gt=0)]
MS = 1000.0


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a good request, in seconds; None means no limit.

    ``ttft`` and ``e2el`` limit the latencies from the scheduled arrival. An answer of one token meets any ``tpot``.
    """

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2el: Limit | None = None


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of ``--goodput``: those of an :class:`Slo`, in milliseconds."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2el: Limit | None = None

    @staticmethod
    def of(slo: Slo) -> Goodput:
        """Return the limits of ``slo``."""
        return Goodput(**{name: None if each is None else round(each * MS, 9) for name, each in _limits(slo)})

    @property
    def slo(self) -> Slo:
        """The same limits in seconds."""
        return Slo(**{name: None if each is None else each / MS for name, each in _limits(self)})


def _limits(of: Slo | Goodput) -> list[tuple[str, float | None]]:
    return [("ttft", of.ttft), ("tpot", of.tpot), ("e2el", of.e2el)]


def limits_of(texts: Sequence[str]) -> dict[str, str]:
    """Return ``NAME:MS[,...]`` items as a mapping; raise :class:`~tercet.protocol.BadRequest`."""
    found: dict[str, str] = {}
    for item in (item for text in texts for item in text.replace(" ", ",").split(",") if item):
        name, colon, value = item.partition(":")
        if not colon:
            raise BadRequest(f"--goodput: {item!r} is not NAME:MILLISECONDS, as in ttft:500", "goodput")
        found[name] = value
    return found
