"""Leases without I/O, and the rules of the three verbs: what an engine of any kind refuses, keeps and answers.

A sequence has at most one lease, which belongs to the callers that know its name. It ends by itself ``ttl`` seconds
after the last activity; arriving KV is one. Real engines (:mod:`.lease_timers`, which draws the states) and simulated
engines are shells around this and own blocks, agents and links. Time is that of the running event loop, real or
virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tercet.protocol import BadRequest, Conflict, KVAddrInfo, KVLayout, LeaseEnded, UnknownSequence, Usage
from tercet.protocol.types import resolve_end

Ledger = Literal["timers", "reservations", "grants"]
LeaseState = Literal[
    "asked", "reserved", "open", "filled", "claimed", "ending", "fenced", "adopted", "freed", "refused"
]  # fmt: skip
# The ledger that enters each state, and the states that may follow it.
LIFE: Mapping[LeaseState, tuple[Ledger, frozenset[LeaseState]]] = {
    # A sequence may be claimed, aborted or expire at any time, also while its blocks are being reserved.
    "asked": ("timers", frozenset({"reserved", "refused", "claimed", "ending"})),
    "reserved": ("reservations", frozenset({"open", "filled", "claimed", "ending"})),
    "open": ("grants", frozenset({"open", "filled", "claimed", "ending"})),
    "filled": ("grants", frozenset({"open", "filled", "claimed", "ending"})),
    "claimed": ("timers", frozenset({"fenced", "ending"})),
    "ending": ("timers", frozenset({"fenced"})),
    "fenced": ("grants", frozenset({"adopted", "freed"})),
    "adopted": ("reservations", frozenset()),
    "freed": ("reservations", frozenset()),
    "refused": ("reservations", frozenset()),
}


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    """One lease of the sequence ``seq_id``; ``timer`` ends it after ``ttl`` seconds of silence."""

    name: str
    seq_id: str
    ttl: float = 0.0
    timer: asyncio.TimerHandle | None = None


L = TypeVar("L", bound=Lease)


class LeaseTable(Generic[L]):
    """The leases that an engine holds, by name and by sequence. ``expired`` gets each one whose time is over."""

    def __init__(self, expired: Callable[[L], object]) -> None:
        self._expired = expired
        self._by_name: dict[str, L] = {}
        self._by_seq: dict[str, L] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[L]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> L | None:
        return self._by_name.get(name)

    def of(self, seq_id: str) -> L | None:
        return self._by_seq.get(seq_id)

    def add(self, lease: L) -> None:
        """Hold a lease whose blocks are being reserved. Raise ``Conflict`` if its sequence has one."""
        require_unused(lease.seq_id, lease.seq_id in self._by_seq)
        self._by_name[lease.name] = self._by_seq[lease.seq_id] = lease

    def require(self, name: str, seq_id: str | None = None) -> L:
        """Return the lease ``name``, of ``seq_id`` if given; raise ``UnknownSequence`` if it is not held here."""
        lease = self._by_name.get(name)
        if lease is None or seq_id not in (None, lease.seq_id):
            whose = "" if seq_id is None else f" for {seq_id}"
            raise UnknownSequence(f"lease {name} is not held here{whose}: released, expired or already used", "lease")
        return lease

    def renew(self, lease: L) -> None:
        """Count an activity: the lease's time begins again."""
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = asyncio.get_running_loop().call_later(lease.ttl, self._expired, lease)

    def remove(self, lease: L) -> bool:
        """Hold a lease no longer: its request or its end takes care of it. Return False if it was not held."""
        if self._by_name.get(lease.name) is not lease:
            return False
        if lease.timer is not None:
            lease.timer.cancel()
        del self._by_name[lease.name], self._by_seq[lease.seq_id]
        return True


def aborted_while_reserving(seq_id: str) -> LeaseEnded:
    """Return the error for a caller whose lease ended before it had its blocks."""
    return LeaseEnded(f"{seq_id} was aborted, or its ttl ended, while blocks were being reserved", "seq_id")


# ---- prep_recv -----------------------------------------------------------------------------------------------


def end_of_reservation(length: int, end: int | None) -> int:
    """Return the end of ``prompt[:end]`` of a prompt of ``length`` tokens; raise ``BadRequest`` if nothing is left."""
    resolved = resolve_end(length, end)
    if resolved == 0:
        raise BadRequest(f"end: {end} leaves nothing of a prompt of {length} tokens", "end")
    return resolved


def require_unused(seq_id: str, used: bool) -> None:
    """Raise ``Conflict`` for a reservation of a sequence that already generates, or has a lease."""
    if used:
        raise Conflict(f"seq_id: {seq_id} is in use on this engine; abort it or choose another", "seq_id")


def time_to_live(asked: float | None, longest: float) -> float:
    """Return the seconds of silence after which a lease ends: those that were asked for, at most the engine's."""
    return min(asked or longest, longest)


def require_continued(reserved: Sequence[int], tokens: Sequence[int], differs: str) -> None:
    """Raise ``BadRequest`` unless ``tokens`` begin with the ``reserved`` ones of the sequence's lease.

    ``differs`` is the field of the calls, other than the prompt, that differs; empty if none does.
    """
    if differs:
        verb = "differ from those" if differs == "mm_features" else "differs from that"
        raise BadRequest(f"{differs}: {verb} of prep_recv for this sequence", differs)
    if tokens[: len(reserved)] != reserved:
        at = next((at for at, token in enumerate(reserved) if at >= len(tokens) or tokens[at] != token), 0)
        raise BadRequest(f"prompt: differs from the prompt of prep_recv, first at position {at}", "prompt")


# ---- remote_send and start_generate --------------------------------------------------------------------------


def check_range(
    info: KVAddrInfo, begin: int, end: int, length: int, sample: bool, layout: KVLayout, cached_only: bool = False
) -> None:  # fmt: skip
    """Refuse to send ``[begin, end)`` of a prompt of ``length`` tokens into a reservation that it does not fit.

    Raise ``LayoutMismatch`` or ``BadRequest``.
    """
    layout.require_mappable(info.layout, info.engine)
    info.require_covers(begin, end)
    if sample and cached_only:
        raise BadRequest("cached_only: computes nothing, so there is no first token; leave sample out", "cached_only")
    if sample and end != length:
        raise BadRequest(f"sample: needs the whole prompt, and end {end} is not its length {length}", "sample")


def check_generation(seq_id: str, begin: int, length: int, generates: bool) -> None:
    """Refuse a generation from ``begin`` on of a prompt of ``length`` tokens, or a second one of a sequence."""
    if not 0 <= begin <= length:
        raise BadRequest(f"begin: {begin} is past a prompt of {length} tokens", "begin")
    if generates:
        raise Conflict(f"seq_id: {seq_id} is generating here already", "seq_id")


def usage_of(total: int, here: int, matched: int) -> Usage:
    """Return the usage of a request of ``total`` tokens: ``here`` were not computed, ``matched`` of them were cached.

    Others among these were received under the sequence's lease.
    """
    cached = min(here, matched)
    return Usage(cached=cached, received=here - cached, computed=total - here)
