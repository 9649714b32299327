"""The engine protocol: :class:`HttpEngine` calls an engine by HTTP, whose tokens come to a :class:`StreamListener`."""

from tercet.wire.client.bounded_answers import engine_tls
from tercet.wire.client.http_engine import Admit, HttpEngine
from tercet.wire.client.stream_listener import StreamListener

__all__ = ["Admit", "HttpEngine", "StreamListener", "engine_tls"]
