"""The short way of a plain stream's tokens: from a program's output to the socket, past the layers in between.

vLLM's serving layer writes what begins and ends a stream: the first chunk, the last one, usage, errors. The chunks in
between differ in their text alone, so they are written from a template that is taken from the first one. What is not a
plain stream (``n > 1``, log probabilities, parsers, echo, ...) never leaves vLLM's own way.
"""

from tercet.router.streaming.connection import StreamingProtocol
from tercet.router.streaming.install import stream_directly
from tercet.router.streaming.stats import StreamStats
from tercet.router.streaming.stream import PlainStream, current_stream

__all__ = ["PlainStream", "StreamStats", "StreamingProtocol", "current_stream", "stream_directly"]
