"""Moving KV between engines: from one rank's KV cache straight into another's reserved blocks.

:class:`KVTransport` is what the vLLM plugin uses; :class:`TcpTransport` is the built-in one. Decisions are pure state
machines (:mod:`.grants`: what may be written where; :mod:`.inbound`: what a connection may say), sockets and threads
are thin shells around them (:mod:`.receiver`, :mod:`.sender`).
"""

from tercet.transport.base import KVTransport, SendReport
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.memory import BufferMemory, KVMemory
from tercet.transport.tcp import TcpTransport

__all__ = ["BufferMemory", "Grant", "GrantTable", "KVMemory", "KVTransport", "SendReport", "TcpTransport"]
