"""Moves that somebody proposes to an engine, on their way to the front door that runs the sequence."""

from __future__ import annotations

from collections.abc import Mapping

from tercet.protocol import Conflict, MoveProposal, UnknownSequence
from tercet.protocol.seq_ids import find_id
from tercet.protocol.wire import MoveCall
from tercet.streams.front_door_connection import SequenceSender


def propose_move(senders: Mapping[str, SequenceSender | None], seq_id: str, call: MoveCall) -> None:
    """Tell the front door of a sequence that it should be elsewhere.

    ``senders`` are what sends the outputs of each sequence that the engine generates, by the engine's ids; None where
    they go to no front door. ``seq_id`` is one of these ids, or its client's.

    Raises :class:`~tercet.protocol.UnknownSequence` if it is not here, and :class:`~tercet.protocol.Conflict` if nobody
    who could move it has it.
    """
    found = find_id(senders, seq_id)
    if found is None:
        raise UnknownSequence(f"seq_id: this engine does not generate {seq_id!r}", "seq_id")
    sender = senders[found]
    if sender is None or not sender.open:
        raise Conflict(f"seq_id: {found} sends its tokens to no front door, so nobody can move it", "seq_id")
    sender.propose(MoveProposal(found, call.destination, call.reason))
