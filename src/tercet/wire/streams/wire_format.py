"""The wire format of token streams: frames of MessagePack, each after its length in four bytes, big-endian.

::

    engine ──▶  │ length │ StreamHello │ length │ OutputBatch │ length │ OutputBatch │ …   a batch per step  ──▶ router
    engine ◀──           │ length │ StreamCommand │ length │ StreamCommand │ …     calls, cancels, heartbeats ◀── router

An engine sends one :class:`StreamHello`, then an :class:`OutputBatch` after each step. The router answers the hello
with an empty :class:`StreamCommand`, and sends commands from then on; an empty one is a heartbeat. Structs are arrays
on the wire, except the call, which has the fields of the body of ``POST /tercet/v1/start_generate``::

    StreamHello   = [protocol, key, engine, incarnation]
    OutputBatch   = [[delta, ...], load or nil, [proposal, ...]]
                    load = [waiting, running, kv_usage, tokens or nil, step_time or nil, stalled_s, stopping,
                            [[running adapter, ...], [waiting adapter, ...], max, stamp] or nil, paused]
                    proposal = [seq_id, destination, reason]
    TokenDelta    = [number, position, [token, ...], details or nil]
    StreamCommand = [[number, ...], [call, ...], [name, ...]]
                    cancelled sequences, new ones, and the x-request-id that logs show for each new one
"""

from __future__ import annotations

from typing import Any

import msgspec

from tercet.protocol import EngineLoad, MoveProposal, Output, TercetError, TokenLogprob, Usage, from_wire
from tercet.protocol.types import FinishReason
from tercet.protocol.wire import StreamDestination, TokenId

PROTOCOL = "tercet-stream/4"
REPORT_SECONDS = 0.1
"""Interval of an engine's load reports if it sends nothing else, in seconds."""
HEARTBEAT_SECONDS = 1.0
"""Interval of a router's heartbeats, in seconds."""
SILENCE_SECONDS = 15.0
"""Seconds of silence of the other side after which a connection is closed."""
LENGTH_BYTES = 4
LONGEST_HELLO = 1024
# The log probabilities of a long prompt are one delta.
LONGEST_FRAME = 64 * 1024 * 1024
"""Longest message, in bytes after its length. Data that does not fit ends only its own sequence."""


class DeltaDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """The optional parts of a delta; most deltas have none. ``error`` is as in an HTTP answer, and is the last part."""

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of the sequence that the router calls ``number``.

    ``position`` is the position of the first of them among the sequence's output tokens, including those that were
    generated elsewhere; it follows the delta before without a gap.
    """

    number: int
    position: int
    token_ids: tuple[TokenId, ...]
    details: DeltaDetails | None = None

    @property
    def is_last(self) -> bool:
        details = self.details
        return details is not None and (details.finish_reason is not None or details.error is not None)

    def to_output(self) -> Output:
        """Return the delta as a program's output. Raises the :class:`~tercet.protocol.TercetError` that it carries."""
        details = self.details
        if details is None:
            return Output(self.token_ids)
        if details.error is not None:
            raise from_wire(500, details.error)
        return Output(
            self.token_ids, details.finish_reason, details.stop_reason, details.logprobs, details.prompt_logprobs,
            details.usage,
        )  # fmt: skip


def delta_of(number: int, position: int, output: Output) -> TokenDelta:
    """Return an output as a delta."""
    plain = output.finish_reason is None and output.logprobs is None and output.usage is None
    if plain and output.prompt_logprobs is None:
        return TokenDelta(number, position, output.token_ids)
    details = DeltaDetails(
        output.finish_reason, output.stop_reason, output.logprobs, output.prompt_logprobs, output.usage
    )  # fmt: skip
    return TokenDelta(number, position, output.token_ids, details)


def failed_delta(number: int, position: int, error: TercetError) -> TokenDelta:
    """Return the last delta of a sequence that failed."""
    return TokenDelta(number, position, (), DeltaDetails(error=error.to_wire()))


class OutputBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outputs of one engine step for one router, the engine's present load, and proposals that it passes on."""

    deltas: tuple[TokenDelta, ...] = ()
    load: EngineLoad | None = None
    proposals: tuple[MoveProposal, ...] = ()


class StreamHello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a connection: ``key`` identifies the router's engine, and authorises it.

    ``incarnation`` is the engine's, as in its status; it changes with each start.
    """

    protocol: str
    key: str
    engine: str
    incarnation: str


class StreamCommand(msgspec.Struct, frozen=True, array_like=True):
    """A router's command to an engine: sequences to end and to start. An empty one is a heartbeat."""

    cancelled: tuple[int, ...] = ()
    # Encoded ``StartGenerateCall``, each decoded by itself: an invalid call fails only itself. Every call has its
    # ``router``, whole as in a body over HTTP; only the number in it is read. Results return as the sequence's deltas.
    starts: tuple[msgspec.Raw, ...] = ()
    # The clients' ids of the requests, empty without one.
    names: tuple[str, ...] = ()
    # ``traceparent`` and ``tracestate`` of each call, if it has any; older engines do not read them.
    traces: tuple[tuple[str, ...], ...] = ()


class UnreadCall(msgspec.Struct, frozen=True):
    """The part of a call that is needed to refuse it."""

    router: StreamDestination
    output: list[msgspec.Raw] = []


_encode = msgspec.msgpack.Encoder().encode


def frame_of(message: OutputBatch | StreamHello | StreamCommand) -> bytes:
    """Return the encoded message; the sender checks whether it :func:`fits`."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def fits(frame: bytes) -> bool:
    """True if the other side accepts the frame."""
    return len(frame) <= LENGTH_BYTES + LONGEST_FRAME
