"""The protocol that real and simulated engines implement, and the fleet of engines that a program calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tercet.protocol.addresses import Reservation, Revision
from tercet.protocol.names import Role
from tercet.protocol.spans import LeaseReport
from tercet.protocol.types import AdapterReport, EngineStatus, Request, Sent

if TYPE_CHECKING:
    from tercet.protocol.stream import OutputStream

WithoutRole = Literal["serve", "refuse"]
"""Policy for picks while no engine of the role answers: other engines serve the request, or it is refused."""


class Engine(Protocol):
    """One engine: three verbs. A cancelled call or stream ends its work on the engine."""

    @property
    def name(self) -> str:
        """The engine's name in the fleet."""
        ...

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        """Match ``prompt[:end]`` in this engine's prefix cache and reserve blocks for the rest of it.

        The blocks stay pinned under a lease until ``start_generate`` of the same sequence takes them over, the context
        exits, or the lease expires. KV received by then stays as prefix cache.

        Raises :class:`~tercet.protocol.errors.NoSpace` if the blocks are not available now.
        """
        ...

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        """Extend an open reservation to ``prompt[:end]``, which begins with its prompt, and return the new reservation.

        ``matched_len`` of the new reservation counts the tokens received so far, in whole blocks. No block is released
        in between. Leaving the first reservation's context ends both. On failure the lease is unchanged.

        Raises :class:`~tercet.protocol.errors.NoSpace`, :class:`~tercet.protocol.errors.UnknownSequence` for a lease
        that has ended, :class:`~tercet.protocol.errors.BadRequest` for other tokens.
        """
        ...

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        """Get the KV of ``prompt[begin:end)`` from this engine's cache or by prefilling, and push it to ``to``.

        Returns when all of it is in place. With ``sample`` this engine also samples the first output token and returns
        it as :attr:`Sent.first`; ``end`` must then be the prompt's end.

        With ``cached_only`` it sends the longest cached whole blocks of the range and computes nothing. A busy engine
        answers between two steps. :attr:`Sent.end` says how far it came; it is ``begin`` if nothing was sent.
        """
        ...

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        """Prefill ``prompt[begin:]``, then decode. The stream ends with the output that has a finish reason.

        ``begin`` is the position up to which the caller provided KV; tokens whose KV is missing are computed.
        ``output`` are tokens that another engine generated: they count for ``max_tokens``, penalties, ``min_tokens``,
        seeds and grammar state, and are not yielded again.
        """
        ...

    async def status(self) -> EngineStatus: ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that loads, replaces and unloads LoRA adapters while it runs."""

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        """Serve the adapter at ``path`` on the engine's machine under ``name``, and return its report.

        Raises :class:`~tercet.protocol.errors.Unauthorized` if the engine's operator does not allow it,
        :class:`~tercet.protocol.errors.Conflict` if the name or the path is already in use for another adapter, and
        :class:`~tercet.protocol.errors.BadRequest` if ``path`` has no adapter for the engine's model.
        """
        ...

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        """Use ``name`` for the adapter at ``path`` from now on, and return its report.

        Raises the errors of :meth:`load_adapter`, and :class:`~tercet.protocol.errors.Conflict` while requests use the
        old adapter; then nothing changes.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Refuse further requests for the adapter; running requests continue.

        Raises :class:`~tercet.protocol.errors.UnknownAdapter` and :class:`~tercet.protocol.errors.Unauthorized`.
        """
        ...


@runtime_checkable
class ReportsLeases(Protocol):
    """An engine that tells the stories of its leases."""

    async def lease_stories(self, seq_id: str) -> list[LeaseReport]:
        """Return the lives of the latest leases of a sequence, ended ones too."""
        ...


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
class Source:
    """An engine that is believed to have the KV of ``prompt[:end)``; its sends are to be ``cached_only``."""

    engine: Engine
    end: int


@dataclass(frozen=True)
class Route:
    """Engines that serve a request: ``decode`` alone, or after ``prefill`` has computed ``prompt[:split]`` for it.

    With a ``source``, ``decode`` first pulls what that engine has cached.
    """

    decode: Engine
    prefill: Engine | None = None
    split: int = 0
    source: Source | None = None


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

        ``by`` is ``round_robin``, ``least_loaded``, ``least_work``, the name of a scheduling profile, or
        ``scheduled`` for the profile of the role. Profiles that look at prompts or headers need the ``request``.

        Four kinds of engines are left out: those that drain, those without the request's LoRA adapter, those that
        cannot exchange KV with ``other_than``, and, while others answer, ``other_than`` itself and engines that do not
        answer. If no engine of the role answers, others serve in its place, unless the fleet is configured to refuse
        that.

        Raises :class:`~tercet.protocol.EngineUnreachable` if the fleet has no engine or a strict filter leaves none,
        :class:`~tercet.protocol.RoleUnavailable`, :class:`~tercet.protocol.UnknownAdapter`, and
        :class:`~tercet.protocol.BadRequest` for an unknown ``by``.
        """
        ...

    def pick_several(
        self,
        count: int,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> AbstractContextManager[Sequence[Engine]]:
        """Pick ``count`` different engines, one after the other as :meth:`pick` does; each counts as busy.

        There are fewer if fewer may be picked, and one for a request of a session, which stays on its engine. Raises
        what :meth:`pick` raises for the first one, and :class:`~tercet.protocol.BadRequest` for a count below 1.
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

    def source(self, request: Request, engine: Engine) -> Source | None:
        """Return another engine whose cached KV of the prompt ``engine`` should pull, or None if computing is cheaper.

        The cost of a pull is that of the send alone. Engines are drawn by load, and each sends to few at a time. What
        an engine has is an estimate, by KV events if it publishes them: its answer says how far it came.
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
