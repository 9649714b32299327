"""The short way of a plain stream: from the socket to a program and back, past the layers in between.

vLLM's serving objects read and check the request and write what begins and ends its stream: the first chunk, the last
one, usage, errors. The chunks in between differ in their text alone, so they are written from a template that is taken
from the first one. What is no plain stream (``n > 1``, log probabilities, parsers, echo, ...) stays on vLLM's own way.
"""

from tercet.router.streaming.connection import StreamingProtocol
from tercet.router.streaming.short_way import short_way
from tercet.router.streaming.stats import StreamStats
from tercet.router.streaming.stream import PlainStream, current_stream

__all__ = ["PlainStream", "StreamStats", "StreamingProtocol", "current_stream", "short_way"]
