"""Movement of KV between engines, from one rank's KV cache directly into reserved blocks of another rank.

The room has three concepts. The *agent* (:mod:`.agent`) is the process that moves one rank's KV, next to the worker
that computes it. The *transport* (:class:`RankTransport`) belongs to one rank and works in both directions. A *peer*
(:mod:`.peer`) is a receiver as its sender sees it. Receivers read: a sender describes where its blocks are, and a
receiver copies them into blocks that it has reserved under a lease, by one of the :mod:`.backends`. Decisions are state
machines without I/O (:mod:`.grants`: which blocks may be written; :mod:`.inbound`: a sender's messages), with thin
layers of sockets and threads around them.
"""

from tercet.transport.agent.agent import AgentProcess as AgentProcess
from tercet.transport.agent.agent import AgentSetup as AgentSetup
from tercet.transport.agent.agent_messages import AsyncControlClient as AsyncControlClient
from tercet.transport.agent.agent_messages import CancelSend as CancelSend
from tercet.transport.agent.agent_messages import ControlServer as ControlServer
from tercet.transport.agent.agent_messages import ExtendLease as ExtendLease
from tercet.transport.agent.agent_messages import GrantLease as GrantLease
from tercet.transport.agent.agent_messages import LayersDone as LayersDone
from tercet.transport.agent.agent_messages import LeaseFilled as LeaseFilled
from tercet.transport.agent.agent_messages import Push as Push
from tercet.transport.agent.agent_messages import PushCached as PushCached
from tercet.transport.agent.agent_messages import ReadCounters as ReadCounters
from tercet.transport.agent.agent_messages import ReceiveDone as ReceiveDone
from tercet.transport.agent.agent_messages import RevokeLease as RevokeLease
from tercet.transport.agent.agent_messages import SendComplete as SendComplete
from tercet.transport.agent.agent_messages import SendDone as SendDone
from tercet.transport.agent.agent_messages import SendPlan as SendPlan
from tercet.transport.agent.agent_messages import StepBegins as StepBegins
from tercet.transport.agent.agent_messages import StepEnds as StepEnds
from tercet.transport.backends import AUTO as AUTO
from tercet.transport.backends import TRANSPORTS as TRANSPORTS
from tercet.transport.backends.tcp import MAX_STREAMS as MAX_STREAMS
from tercet.transport.grants import Grant as Grant
from tercet.transport.grants import ReceiveEnd as ReceiveEnd
from tercet.transport.local_rank import TransportSettings as TransportSettings
from tercet.transport.peer import SendReport as SendReport
from tercet.transport.rank import RankTransport as RankTransport
from tercet.transport.rank import SendDestination as SendDestination
from tercet.transport.region import CORE_WORDS as CORE_WORDS
from tercet.transport.region import PAGE_BYTES as PAGE_BYTES
from tercet.transport.region import TAIL_BYTES as TAIL_BYTES
from tercet.transport.region import BlockOrder as BlockOrder
from tercet.transport.region import BlockShape as BlockShape
from tercet.transport.region import CoreWords as CoreWords
from tercet.transport.region import HeadSlice as HeadSlice
from tercet.transport.region import KVRegion as KVRegion
from tercet.transport.region import PlaneRun as PlaneRun
from tercet.transport.region import RankRoute as RankRoute
from tercet.transport.region import RegionShape as RegionShape
from tercet.transport.region import core_word as core_word
from tercet.transport.region import create_file as create_file
from tercet.transport.region import create_sealed_file as create_sealed_file
from tercet.transport.region import routes as routes
from tercet.transport.region import shape_of as shape_of
from tercet.transport.sockets import is_address as is_address
from tercet.transport.staged import DeviceHandles as DeviceHandles
