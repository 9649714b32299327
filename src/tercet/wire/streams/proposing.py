"""Proposals to move a sequence, passed on from an engine to the router that runs the sequence."""

from __future__ import annotations

from collections.abc import Mapping

from tercet.protocol import Conflict, MoveProposal, UnknownSequence
from tercet.protocol.names import find_id
from tercet.protocol.wire import MoveCall
from tercet.wire.streams.router_connection import SequenceSender


def propose_move(senders: Mapping[str, SequenceSender | None], seq_id: str, call: MoveCall) -> None:
    """Send a router the proposal to move a sequence.

    ``senders`` has the sender of each sequence that the engine generates, by the engine's ids; None without a router.
    ``seq_id`` is one of these ids, or its client's.

    Raises :class:`~tercet.protocol.UnknownSequence` if the sequence is not here, and :class:`~tercet.protocol.Conflict`
    if no router runs it.
    """
    found = find_id(senders, seq_id)
    if found is None:
        raise UnknownSequence(f"seq_id: this engine does not generate {seq_id!r}", "seq_id")
    sender = senders[found]
    if sender is None or not sender.open:
        raise Conflict(f"seq_id: {found} is not run by a router, so it cannot be moved", "seq_id")
    sender.propose(MoveProposal(found, call.destination, call.reason))
