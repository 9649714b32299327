"""Token streams: one connection from each engine to each router carries the outputs of all sequences.

Here are the wire format and the engine's side, :class:`RouterConnections`; the router's side is
:mod:`tercet.wire.client`. The router listens, engines connect. An engine sends one message per engine step and router,
with the new tokens of all of the router's sequences and the engine's load; it sends at least one message every 100 ms.
In the other direction, the router sends heartbeats, new sequences and cancellations::

    engine                                                                        router
    sequence 7  SequenceSender ─┐ deltas of                         EngineConnection ┌─▶ sequence 7  OutputStream
    sequence 9  SequenceSender ─┼─▶ one step ─▶ OutputBatch ══ TCP ══▶ SequenceInbox ┼─▶ sequence 9
    sequence 12 SequenceSender ─┘                                   StreamCommand ◀══ └─▶ sequence 12

A delta carries the position of its first token. So the inbox notices a repeated delta, and a gap.
"""

from tercet.wire.streams.router_connection import RouterConnection, RouterConnections, SequenceSender
from tercet.wire.streams.wire_format import OutputBatch, StreamHello, TokenDelta

__all__ = ["OutputBatch", "RouterConnection", "RouterConnections", "SequenceSender", "StreamHello", "TokenDelta"]
