"""What programs may ask of a fleet, and what may be read of an engine in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tercet.protocol.engine import Engine
from tercet.protocol.types import AdapterReport, Request

Role = Literal["prefill", "decode", "both"]
WithoutRole = Literal["serve", "refuse"]
"""What becomes of a pick while no engine of its role answers: others take its place, or it is refused."""


class EngineView(Protocol):
    """What programs and scheduling plugins may read of one engine.

    ``role`` is ``prefill``, ``decode`` or ``both``; ``labels`` are its operator's words. It is ``reachable`` if it
    answered when it was asked last. ``in_flight`` counts the sequences that this front door runs on it now,
    ``in_flight_tokens`` their prompt tokens. ``adapters`` are the LoRA adapters that it says it has, by name.
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


@dataclass(frozen=True)
class Route:
    """Who serves a request: ``decode`` alone, or after ``prefill`` has computed ``prompt[:split]`` for it."""

    decode: Engine
    prefill: Engine | None = None
    split: int = 0


class PrefillRule(Protocol):
    """Whether a second engine shall prefill; deciders of a scheduling file are such rules."""

    def disaggregates(self, request: Request, cached: int, prefill: Any) -> bool:
        """``cached`` tokens of the prompt are believed to be on the decode engine; ``prefill`` are who could help."""
        ...


class Fleet(Protocol):
    """The engines that a program picks from.

    Each program gets a view for its request: what failed the request is not picked for it again while there is another.
    """

    @property
    def members(self) -> Sequence[EngineView]:
        """Every engine, those that are being drained included."""
        ...

    def pick(
        self,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> AbstractContextManager[Engine]:
        """An engine that may serve in ``role`` (``both`` means any); counted as busy while entered.

        ``by`` is ``round_robin``, ``least_loaded``, the name of a scheduling profile, or ``scheduled`` for the profile
        of the role. Profiles that look at prompts or headers need the ``request``.

        Engines that are being drained are left out, and those without the request's LoRA adapter; those that do not
        answer are while others do, and so is ``other_than``. If no engine of the role answers, others serve in its
        place, unless the fleet is told to refuse that. Raises :class:`~tercet.protocol.EngineUnreachable` if there is
        no engine or a strict filter leaves none, :class:`~tercet.protocol.RoleUnavailable`,
        :class:`~tercet.protocol.UnknownAdapter`, and :class:`~tercet.protocol.BadRequest` for an unknown ``by``.
        """
        ...

    def engine(self, name: str) -> AbstractContextManager[Engine]:
        """The engine of that name, counted while entered; raises :class:`~tercet.protocol.UnknownEngine`."""
        ...

    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> AbstractContextManager[Route]:
        """The engine, or the pair of engines, that is predicted to serve the request at the least cost.

        ``ttft`` and ``tpot`` are objectives in seconds: what meets them goes before what is cheaper. ``explore`` is the
        share of requests that may take a pair which is not the cheapest, to learn from it, while the fleet is idle.
        Engines are left out as in :meth:`pick`, their roles do not count.
        Raises :class:`~tercet.protocol.EngineUnreachable` if there is no engine, and
        :class:`~tercet.protocol.BadRequest` for an objective or a share that makes no sense.
        """
        ...

    def offers(self, role: Role) -> bool:
        """Whether there is an engine for the role that answers and has not failed this request."""
        ...

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        """Whether another engine shall prefill for ``decode``, which was picked for this request.

        ``by`` is a rule, or names a decider of the scheduling file; None is its handler's. False if there is no other
        engine to prefill. Raises :class:`~tercet.protocol.BadRequest` for an unknown decider.
        """
        ...
