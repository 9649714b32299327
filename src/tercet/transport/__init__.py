"""Movement of KV between engines, from one rank's KV cache directly into reserved blocks of another rank.

The room has three concepts. The *agent* (:mod:`.agent`) is the process that moves one rank's KV, next to the worker
that computes it. The *transport* (:class:`RankTransport`) belongs to one rank and works in both directions. A *peer*
(:mod:`.peer`) is a receiver as its sender sees it. Receivers read: a sender describes where its blocks are, and a
receiver copies them into blocks that it has reserved under a lease, by one of the :mod:`.backends`. Decisions are state
machines without I/O (:mod:`.grants`: which blocks may be written; :mod:`.inbound`: a sender's messages), with thin
layers of sockets and threads around them.
"""

from tercet.transport.agent.agent import AgentProcess, AgentSetup
from tercet.transport.agent.agent_messages import (
    AsyncControlClient,
    CancelSend,
    ControlServer,
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
    SendPlan,
    StepBegins,
    StepEnds,
)
from tercet.transport.backends import AUTO, TRANSPORTS
from tercet.transport.backends.tcp import MAX_STREAMS
from tercet.transport.grants import Grant, ReceiveEnd
from tercet.transport.local_rank import TransportSettings
from tercet.transport.peer import SendReport
from tercet.transport.rank import RankTransport, SendDestination
from tercet.transport.region import (
    CORE_WORDS,
    PAGE_BYTES,
    TAIL_BYTES,
    BlockOrder,
    BlockShape,
    CoreWords,
    HeadSlice,
    KVRegion,
    PlaneRun,
    RankRoute,
    RegionShape,
    core_word,
    create_file,
    create_sealed_file,
    routes,
    shape_of,
)
from tercet.transport.sockets import is_address
from tercet.transport.staged import DeviceHandles

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
    "SendPlan",
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
