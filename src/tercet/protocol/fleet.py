"""What programs may ask of a fleet, and what they may read of each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tercet.protocol.engine import Engine
from tercet.protocol.revision import Revision
from tercet.protocol.roles import Role
from tercet.protocol.types import AdapterReport, Request

WithoutRole = Literal["serve", "refuse"]
"""What happens to a pick while no engine of its role answers: other engines serve it, or it is refused."""


class EngineView(Protocol):
    """What programs and scheduling plugins may read of one engine.

    ``role`` is ``prefill``, ``decode`` or ``both``; ``labels`` are set by its operator. It is ``reachable`` if it
    answered the last poll. ``in_flight`` counts the sequences that this router runs on it now, ``in_flight_tokens``
    their prompt tokens. ``adapters`` are the LoRA adapters that it reports, by name. Engines exchange KV only if their
    ``revision`` allows it.
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
    """Rule that decides whether a second engine prefills; deciders of a scheduling file are such rules."""

    def disaggregates(self, request: Request, cached: int, prefill: Any) -> bool:
        """Decide. ``cached``: estimated prompt tokens in the decode engine's cache; ``prefill``: candidates."""
        ...


class Fleet(Protocol):
    """The engines that a program picks from.

    Each program gets a view for its request: an engine that failed the request is not picked for it again while there
    is another.
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
        """Pick an engine that may serve in ``role`` (``both`` means any); it counts as busy while entered.

        ``by`` is ``round_robin``, ``least_loaded``, the name of a scheduling profile, or ``scheduled`` for the profile
        of the role. Profiles that look at prompts or headers need the ``request``.

        Engines that are being drained are left out, those without the request's LoRA adapter, and those that exchange
        no KV with ``other_than``; those that do not answer are left out while others do, and so is ``other_than``. If
        no engine of the role answers, others serve in its place, unless the fleet is configured to refuse that. Raises
        :class:`~tercet.protocol.EngineUnreachable` if there is no engine or a strict filter leaves none,
        :class:`~tercet.protocol.RoleUnavailable`, :class:`~tercet.protocol.UnknownAdapter`, and
        :class:`~tercet.protocol.BadRequest` for an unknown ``by``.
        """
        ...

    def engine(self, name: str) -> AbstractContextManager[Engine]:
        """The engine of that name, counted while entered; raises :class:`~tercet.protocol.UnknownEngine`."""
        ...

    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> AbstractContextManager[Route]:
        """The engine, or the pair of engines, that is predicted to serve the request at the least cost.

        ``ttft`` and ``tpot`` are objectives in seconds: routes that meet them are preferred to cheaper ones.
        ``explore`` is the share of requests that may take a pair which is not the cheapest, to learn from it, while the
        fleet is idle. Engines are left out as in :meth:`pick`; roles are ignored. Raises
        :class:`~tercet.protocol.EngineUnreachable` if there is no engine, and :class:`~tercet.protocol.BadRequest` for
        an objective or a share out of range.
        """
        ...

    def offers(self, role: Role) -> bool:
        """Whether there is an engine for the role that answers and has not failed this request."""
        ...

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        """Whether another engine should prefill for ``decode``, which was picked for this request.

        ``by`` is a rule, or names a decider of the scheduling file; None means the decider of the file's handler. False
        if there is no other engine to prefill. Raises :class:`~tercet.protocol.BadRequest` for an unknown decider.
        """
        ...
