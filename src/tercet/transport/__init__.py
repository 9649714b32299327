"""Movement of KV between engines, from one rank's KV cache directly into reserved blocks of another rank.

The room has three concepts. The *agent* (:mod:`.agent`) is the process that moves one rank's KV, next to the worker
that computes it. The *transport* (:class:`RankTransport`) belongs to one rank and works in both directions. A *peer*
(:mod:`.peer`) is a receiver as its sender sees it. Receivers read: a sender describes where its blocks are, and a
receiver copies them into blocks that it has reserved under a lease, by one of the :mod:`.backends`. Decisions are state
machines without I/O (:mod:`.grants`: which blocks may be written; :mod:`.inbound`: a sender's messages), with thin
layers of sockets and threads around them.
"""

from tercet.transport.agent.agent import AgentSetup
from tercet.transport.agent.agent_messages import (
    CancelSend,
    ExtendLease,
    GrantLease,
    LayersDone,
    LeaseFilled,
    Push,
    PushCached,
    ReadCounters,
    ReceiveDone,
    RevokeLease,
    SendComplete,
    SendDone,
    SendOpening,
    StepBegins,
    StepEnds,
)
from tercet.transport.agent.agent_process import AgentProcess
from tercet.transport.agent.control_channel import AsyncControlClient, ControlServer
from tercet.transport.backends import AUTO, TRANSPORTS
from tercet.transport.backends.tcp import MAX_STREAMS
from tercet.transport.block_sizes import BlockShape
from tercet.transport.core_words import CoreWords, core_word
from tercet.transport.grant import Grant
from tercet.transport.head_slices import HeadSlice
from tercet.transport.layer_runs import PlaneRun
from tercet.transport.local_rank import TransportSettings
from tercet.transport.memory.block_order import BlockOrder
from tercet.transport.memory.handles import DeviceHandles
from tercet.transport.outgoing import SendReport
from tercet.transport.rank import RankTransport
from tercet.transport.receive_traces import ReceiveEnd
from tercet.transport.region import (
    CORE_WORDS,
    PAGE_BYTES,
    TAIL_BYTES,
    KVRegion,
    RegionShape,
    create_file,
    create_sealed_file,
    shape_of,
)
from tercet.transport.routes import RankRoute, routes
from tercet.transport.sender import SendDestination
from tercet.transport.sockets import is_address

__all__ = [
    "AUTO",
    "CORE_WORDS",
    "MAX_STREAMS",
    "PAGE_BYTES",
    "TAIL_BYTES",
    "TRANSPORTS",
    "AgentProcess",
    "AgentSetup",
    "AsyncControlClient",
    "BlockOrder",
    "BlockShape",
    "CancelSend",
    "ControlServer",
    "CoreWords",
    "DeviceHandles",
    "ExtendLease",
    "Grant",
    "GrantLease",
    "HeadSlice",
    "KVRegion",
    "LayersDone",
    "LeaseFilled",
    "PlaneRun",
    "Push",
    "PushCached",
    "RankRoute",
    "RankTransport",
    "ReadCounters",
    "ReceiveDone",
    "ReceiveEnd",
    "RegionShape",
    "RevokeLease",
    "SendComplete",
    "SendDestination",
    "SendDone",
    "SendOpening",
    "SendReport",
    "StepBegins",
    "StepEnds",
    "TransportSettings",
    "core_word",
    "create_file",
    "create_sealed_file",
    "is_address",
    "routes",
    "shape_of",
]
