"""The protocol that real and simulated engines implement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from tercet.protocol.addresses import KVAddrInfo
from tercet.protocol.stream import OutputStream
from tercet.protocol.types import AdapterReport, EngineStatus, Request, Sent


class Reservation(msgspec.Struct, frozen=True):
    """What ``prep_recv`` returned: where to send, and how much is there already.

    ``matched_len`` tokens of the prompt are in the receiver's prefix cache and pinned; ``end`` is the absolute end of
    the reserved range, so ``[matched_len, end)`` is what a sender must provide.
    """

    kv_addr_info: KVAddrInfo
    matched_len: int

    @property
    def lease(self) -> str:
        """The lease that pins the blocks."""
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
    """One engine: three verbs, and what it takes to stop them.

    Every method raises errors of :mod:`tercet.protocol.errors` and nothing else. Cancelling a call, or closing its
    stream, ends the work on the engine and gives back what it took.
    """

    @property
    def name(self) -> str:
        """The engine's name in the fleet."""
        ...

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        """Match ``prompt[:end]`` in this engine's prefix cache and reserve blocks for the rest of it.

        The blocks stay pinned under a lease until ``start_generate`` of the same sequence takes them over, the
        context exits, or the lease expires. What was received by then stays behind as prefix cache.

        Raises :class:`~tercet.protocol.errors.NoSpace` when the blocks are not to be had now.
        """
        ...

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        """Extend an open reservation to ``prompt[:end]``, which begins with what it was made for; returns it anew.

        Of the new one, ``matched_len`` tokens are there by now, in whole blocks. No block is given back meanwhile, and
        the first one's context ends both. If it fails, the lease is as it was.

        Raises :class:`~tercet.protocol.errors.NoSpace`, :class:`~tercet.protocol.errors.UnknownSequence` for a lease
        that is over, :class:`~tercet.protocol.errors.BadRequest` for other tokens.
        """
        ...

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        """Have the KV of ``prompt[begin:end)`` here, from cache or by prefilling, and push it into ``to``.

        Returns when all of it is in place. With ``sample`` the first output token is sampled here too (``end`` must
        then be the prompt's end) and returned as :attr:`Sent.first`.
        """
        ...

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        """Prefill ``prompt[begin:]``, then decode; outputs come until one has a finish reason.

        ``begin`` is the position up to which the caller provided KV; what is not there after all is computed.
        ``output`` are tokens generated already, elsewhere: they count for ``max_tokens``, penalties, ``min_tokens``,
        seeds and grammar state, and are not yielded again.
        """
        ...

    async def abort(self, seq_id: str) -> None:
        """End whatever this engine does for ``seq_id``; unknown ids are fine."""
        ...

    async def status(self) -> EngineStatus:
        """The engine's current state."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that loads, replaces and unloads LoRA adapters while it runs."""

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        """Serve the adapter at ``path``, on the engine's machine, under ``name``; what it is.

        Raises :class:`~tercet.protocol.errors.Unauthorized` if its operator does not allow that,
        :class:`~tercet.protocol.errors.Conflict` for a name or path that stands for something else, and
        :class:`~tercet.protocol.errors.BadRequest` for what is no adapter of its model.
        """
        ...

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        """Have ``name`` stand for the adapter at ``path``, whatever it stood for; what it is.

        Raises as :meth:`load_adapter` does, and :class:`~tercet.protocol.errors.Conflict` while requests use what is to
        be replaced; then nothing changes.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for it; what runs with it goes on.

        Raises :class:`~tercet.protocol.errors.UnknownAdapter` and :class:`~tercet.protocol.errors.Unauthorized`.
        """
        ...
