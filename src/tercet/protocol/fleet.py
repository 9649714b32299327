"""Calls that a program may make to a fleet, and the properties of an engine that it may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tercet.protocol.addresses import Revision
from tercet.protocol.engine import Engine
from tercet.protocol.names import Role
from tercet.protocol.types import AdapterReport, Request

WithoutRole = Literal["serve", "refuse"]
"""Policy for picks while no engine of the role answers: other engines serve the request, or it is refused."""


class EngineView(Protocol):
    """Read-only view of one engine, for programs and scheduling plugins.

    ``role`` is ``prefill``, ``decode`` or ``both``; ``labels`` are set by the operator. An engine is ``reachable`` if
    it answered the last poll. ``in_flight`` counts the sequences that this router runs on it now, ``in_flight_tokens``
    their prompt tokens. ``adapters`` are the LoRA adapters that it reports, by name. Two engines exchange KV only if
    their ``revision`` allows it.
    """

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def reachable(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def in_flight_tokens(self) -> int: ...

    @property
    def adapters(self) -> Mapping[str, AdapterReport]: ...

    @property
    def revision(self) -> Revision: ...


@dataclass(frozen=True)
class Route:
    """Engines that serve a request: ``decode`` alone, or after ``prefill`` has computed ``prompt[:split]`` for it."""

    decode: Engine
    prefill: Engine | None = None
    split: int = 0


class PrefillRule(Protocol):
    """A rule that decides whether a second engine prefills. Deciders of a scheduling file are such rules."""

    def disaggregates(self, request: Request, cached: int, prefill: Any) -> bool:
        """Return True if a second engine should prefill.

        ``cached`` is the number of prompt tokens in the decode engine's cache, ``prefill`` the candidates.
        """
        ...


class Fleet(Protocol):
    """The engines among which a program picks.

    Each program gets a view for its request: an engine that failed the request is not picked for it again while another
    engine is available.
    """

    @property
    def members(self) -> Sequence[EngineView]:
        """All engines, including those that are being drained."""
        ...

    def pick(
        self,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> AbstractContextManager[Engine]:
        """Pick an engine that may serve in ``role`` (``both`` means any); the engine counts as busy while entered.

        ``by`` is ``round_robin``, ``least_loaded``, the name of a scheduling profile, or ``scheduled`` for the profile
        of the role. Profiles that look at prompts or headers need the ``request``.

        Four kinds of engines are left out: those that drain, those without the request's LoRA adapter, those that
        cannot exchange KV with ``other_than``, and, while others answer, ``other_than`` itself and engines that do not
        answer. If no engine of the role answers, others serve in its place, unless the fleet is configured to refuse
        that.

        Raises :class:`~tercet.protocol.EngineUnreachable` if the fleet has no engine or a strict filter leaves none,
        :class:`~tercet.protocol.RoleUnavailable`, :class:`~tercet.protocol.UnknownAdapter`, and
        :class:`~tercet.protocol.BadRequest` for an unknown ``by``.
        """
        ...

    def engine(self, name: str) -> AbstractContextManager[Engine]:
        """Return the engine ``name``, counted as busy while entered; raises :class:`~tercet.protocol.UnknownEngine`."""
        ...

    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> AbstractContextManager[Route]:
        """Return the engine, or the pair of engines, with the least predicted cost for the request.

        ``ttft`` and ``tpot`` are objectives in seconds: routes that meet them are preferred to cheaper ones.
        ``explore`` is the share of requests that may take a pair other than the cheapest one while the fleet is idle,
        to learn from it. Engines are left out as in :meth:`pick`; roles are ignored. Raises
        :class:`~tercet.protocol.EngineUnreachable` if the fleet has no engine, and :class:`~tercet.protocol.BadRequest`
        for an objective or a share out of range.
        """
        ...

    def offers(self, role: Role) -> bool:
        """Return True if an engine for the role answers and has not failed this request."""
        ...

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        """Return True if another engine should prefill for ``decode``, which was picked for this request.

        ``by`` is a rule, or names a decider of the scheduling file; None means the decider of the file's handler. The
        result is False if no other engine can prefill. Raises :class:`~tercet.protocol.BadRequest` for an unknown
        decider.
        """
        ...
