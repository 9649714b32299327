"""The wire format of token streams: frames of MessagePack, each after its length in four bytes, big-endian.

An engine sends one :class:`Hello`, then :class:`Step` after step. The front door answers the hello with an empty
:class:`Order`, and sends orders from then on; an empty one is a heartbeat. Structs are arrays on the wire, but for
the call, which has the fields of the body of ``POST /tercet/v1/start_generate``::

    Hello = [protocol, key, engine]
    Step  = [[item, ...], load or nil]            load = [waiting, running, kv_usage, tokens or nil, step_time or nil]
    Item  = [number, position, [token, ...], ending or nil]
    Order = [[number, ...], [call, ...]]          sequences that nobody waits for any more, and new ones
"""

from __future__ import annotations

from typing import Any

import msgspec

from tercet.protocol import EngineLoad, Output, TercetError, TokenLogprob, Usage, from_wire
from tercet.protocol.types import FinishReason
from tercet.protocol.wire import StartGenerateCall

PROTOCOL = "tercet-stream/2"
REPORT_SECONDS = 0.1
"""An engine with nothing else to say says how busy it is this often."""
BEAT_SECONDS = 1.0
"""How often a front door says that it is still there."""
SILENCE_SECONDS = 15.0
"""Silence of the other side past this ends a connection."""
LENGTH_BYTES = 4
LONGEST_HELLO = 1024
# The log probabilities of a long prompt are one item.
LONGEST_FRAME = 64 * 1024 * 1024


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an item may have beside tokens; most have nothing. ``error`` is that of an HTTP answer, and the last."""

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        """Whether its sequence ends here."""
        return self.finish_reason is not None or self.error is not None


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of the sequence that the front door calls ``number``.

    ``position`` is that of the first of them among the sequence's output tokens, those included that were generated
    elsewhere; it is what the position of the item before says it must be.
    """

    number: int
    position: int
    token_ids: tuple[int, ...]
    ending: Ending | None = None

    def to_output(self) -> Output:
        """The item in the words of programs; raises the :class:`~tercet.protocol.TercetError` that it carries."""
        ending = self.ending
        if ending is None:
            return Output(self.token_ids)
        if ending.error is not None:
            raise from_wire(500, ending.error)
        return Output(
            self.token_ids,
            ending.finish_reason,
            ending.stop_reason,
            ending.logprobs,
            ending.prompt_logprobs,
            ending.usage,
        )


def item_of(number: int, position: int, output: Output) -> Item:
    """An output as an item."""
    plain = output.finish_reason is None and output.logprobs is None and output.usage is None
    if plain and output.prompt_logprobs is None:
        return Item(number, position, output.token_ids)
    ending = Ending(
        output.finish_reason, output.stop_reason, output.logprobs, output.prompt_logprobs, output.usage
    )  # fmt: skip
    return Item(number, position, output.token_ids, ending)


def failed_item(number: int, position: int, error: TercetError) -> Item:
    """The last item of a sequence that failed."""
    return Item(number, position, (), Ending(error=error.to_wire()))


class Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step produced for one front door, and how busy the engine is now."""

    items: tuple[Item, ...] = ()
    load: EngineLoad | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a connection: ``key`` says which front door's engine speaks, and that it may."""

    protocol: str
    key: str
    engine: str


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What a front door tells an engine: sequences to end and to start. Without any it is a heartbeat.

    Every call in ``starts`` has its ``door``. What becomes of it comes back as the sequence's items.
    """

    cancelled: tuple[int, ...] = ()
    starts: tuple[StartGenerateCall, ...] = ()


_encode = msgspec.msgpack.Encoder().encode


def frame_of(message: Step | Hello | Order) -> bytes:
    """The message as it goes onto the wire."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
