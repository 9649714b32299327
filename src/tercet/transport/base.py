"""The transport as the plugin sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol import TercetError
from tercet.transport.grants import Grant
from tercet.transport.mapping import HeadSlice


@dataclass(frozen=True)
class SendReport:
    """A send that is in place at the receiver: KV bytes, the chunks that they went in, and over what."""

    bytes: int
    chunks: int
    transport: str = ""


@dataclass(frozen=True)
class Target:
    """Where a send goes: one receiving rank, by all of its addresses, a lease of it, and which part of the blocks."""

    addresses: tuple[str, ...]
    lease: str
    head_slice: HeadSlice


OnDone = Callable[[SendReport | TercetError], None]
OnFinished = Callable[[str, int], None]


class KVTransport(Protocol):
    """One rank's transport, both ways.

    Calls come from several threads; none of them waits for the network, except :meth:`cancel`, and that for a bounded
    time.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers connect, one for each host that it listens on."""
        ...

    def grant(self, grant: Grant) -> None:
        """Let a peer write under a lease."""
        ...

    def revoke(self, lease: str) -> int:
        """End a lease; once this returns no byte is written under it. Returns the end of its valid KV (tokens)."""
        ...

    def open(self, send_id: str, target: Target, on_done: OnDone) -> None:
        """Begin a send.

        ``on_done`` is called exactly once, also for wrong input, with nothing of the transport locked; mostly from
        another thread, but perhaps before a call for this send returns. From then on the send's KV is not read.
        """
        ...

    def push(self, send_id: str, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """Queue ``blocks`` of every one of ``layers`` for the receiver's slots from ``slot`` on.

        The layers are neighbours. The KV must stay as it is.
        """
        ...

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """Queue the claim that the KV of tokens ``[begin, end)`` is complete."""
        ...

    def cancel(self, send_id: str) -> None:
        """End a send; once this returns its KV is not read any more. Unknown ids are fine."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, and what is under way."""
        ...

    def close(self) -> None:
        """Stop every thread and connection."""
        ...
