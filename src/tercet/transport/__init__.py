"""Moving KV between engines: from one rank's KV cache straight into another's reserved blocks.

:class:`KVTransport` is what the vLLM plugin uses; :class:`RankTransport` is the one there is. Decisions are pure state
machines (:mod:`.grants`: what may be written where; :mod:`.inbound`: what a connection may say), sockets and threads
are thin shells around them (:mod:`.receiver`, :mod:`.peer`). :mod:`.backends` are ways to read another rank's memory
without a socket.
"""

from tercet.transport.base import KVTransport, SendReport, Target
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.mapping import Strip, routes
from tercet.transport.rank import RankTransport, TransportSettings
from tercet.transport.recut import BlockShape
from tercet.transport.region import KVRegion

__all__ = [
    "BlockShape",
    "Grant",
    "GrantTable",
    "KVRegion",
    "KVTransport",
    "RankTransport",
    "SendReport",
    "Strip",
    "Target",
    "TransportSettings",
    "routes",
]
