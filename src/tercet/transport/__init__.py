"""Moving KV between engines: from one rank's KV cache straight into another's reserved blocks.

:class:`KVTransport` is what the vLLM plugin uses; :class:`RankTransport` is the one there is. Decisions are pure state
machines (:mod:`.grants`: what may be written where; :mod:`.inbound`: what a connection may say), sockets and threads
are thin shells around them (:mod:`.receiver`, :mod:`.peer`). :mod:`.backends` are ways to read another rank's memory
without a socket.
"""

from tercet.transport.agent import AgentProcess, ControlClient, SharedKV
from tercet.transport.agent.messages import (
    CancelSend,
    Completion,
    Destination,
    GrantLease,
    LayersDone,
    LeaseFilled,
    Push,
    PushCached,
    ReadCounters,
    RevokeLease,
    SendDone,
    SendOpening,
    StepBegins,
    StepEnds,
)
from tercet.transport.backends import AUTO, TRANSPORTS
from tercet.transport.base import KVTransport, SendReport, Target
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.mapping import HeadSlice, routes
from tercet.transport.rank import RankTransport, TransportSettings
from tercet.transport.recut import BlockShape
from tercet.transport.region import PAGE_BYTES, TAIL_BYTES, KVRegion, RegionShape, create_file
from tercet.transport.session import MAX_STREAMS

__all__ = [
    "AUTO",
    "MAX_STREAMS",
    "PAGE_BYTES",
    "TAIL_BYTES",
    "TRANSPORTS",
    "AgentProcess",
    "BlockShape",
    "CancelSend",
    "Completion",
    "ControlClient",
    "Destination",
    "Grant",
    "GrantLease",
    "GrantTable",
    "HeadSlice",
    "KVRegion",
    "KVTransport",
    "LayersDone",
    "LeaseFilled",
    "Push",
    "PushCached",
    "RankTransport",
    "ReadCounters",
    "RegionShape",
    "RevokeLease",
    "SendDone",
    "SendOpening",
    "SendReport",
    "SharedKV",
    "StepBegins",
    "StepEnds",
    "Target",
    "TransportSettings",
    "create_file",
    "routes",
]
