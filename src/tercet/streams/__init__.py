"""Token streams: what sequences produce travels from each engine to each front door over one connection.

The front door listens (:class:`Listener`), engines connect (:class:`Speaker`). An engine sends one message per engine
step and front door, with the new tokens of all of the front door's sequences and the engine's load, and one at least
every 100 ms. The front door sends heartbeats, new sequences and cancellations the other way.
"""

from tercet.streams.connection import Connection, Voice
from tercet.streams.inbox import Inbox
from tercet.streams.line import Line
from tercet.streams.listener import Listener
from tercet.streams.messages import REPORT_SECONDS, Ending, Hello, Item, Order, Step
from tercet.streams.relay import Relay
from tercet.streams.speaker import Speaker

__all__ = [
    "REPORT_SECONDS",
    "Connection",
    "Ending",
    "Hello",
    "Inbox",
    "Item",
    "Line",
    "Listener",
    "Order",
    "Relay",
    "Speaker",
    "Step",
    "Voice",
]
