"""The protocol that real and simulated engines implement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from tercet.protocol.addresses import KVAddrInfo
from tercet.protocol.types import AdapterReport, EngineStatus, Request, Sent

if TYPE_CHECKING:
    from tercet.protocol.stream import OutputStream


class Reservation(msgspec.Struct, frozen=True):
    """Result of ``prep_recv``: the address to send KV to, and the number of tokens that the receiver has already."""

    kv_addr_info: KVAddrInfo
    matched_len: int

    @property
    def lease(self) -> str:
        """Id of the lease that pins the blocks."""
        return self.kv_addr_info.lease

    @property
    def end(self) -> int:
        """Absolute end of the reserved range."""
        return self.kv_addr_info.end

    @property
    def missing(self) -> int:
        """Tokens that the receiver does not have yet."""
        return self.end - self.matched_len


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
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        """Get the KV of ``prompt[begin:end)`` from this engine's cache or by prefilling, and push it to ``to``.

        Returns when all of it is in place. With ``sample`` this engine also samples the first output token and returns
        it as :attr:`Sent.first`; ``end`` must then be the prompt's end.
        """
        ...

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        """Prefill ``prompt[begin:]``, then decode. The stream ends with the output that has a finish reason.

        ``begin`` is the position up to which the caller provided KV; tokens whose KV is missing are computed.
        ``output`` are tokens that another engine generated: they count for ``max_tokens``, penalties, ``min_tokens``,
        seeds and grammar state, and are not yielded again.
        """
        ...

    async def status(self) -> EngineStatus:
        """Return the engine's current state."""
        ...


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
