"""Answers of Anthropic's Messages: content blocks, made from the deltas of vLLM's chat layer.

vLLM makes its chat chunks first and converts them. This module writes the text of an output as an event of the open
block.

Relies on ``AnthropicServingMessages.message_stream_converter`` for the events, their fields and their order, and on
``_to_anthropic_stop_reason`` and ``_build_anthropic_usage``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec
from pydantic_core import PydanticSerializationError
from vllm.outputs import RequestOutput

from tercet.protocol.errors import MESSAGES, in_form, last_events
from tercet.vllm_plugin.differences import CONVERTED_AS_TEXT
from tercet.vllm_plugin.fast_path.answer_events import Told
from tercet.vllm_plugin.fast_path.chunk_answers import counts_of, error_of
from tercet.vllm_plugin.fast_path.delta_json import encode
from tercet.vllm_plugin.fast_path.item_events import ItemEvents
from tercet.vllm_plugin.fast_path.sse_chunks import Extras
from tercet.vllm_plugin.frontend.program_client import SequenceFailed

DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"%b","%b":%%b},"index":%%d}\n\n'
)
TEXT = DELTA % (b"text_delta", b"text")
THINKING = DELTA % (b"thinking_delta", b"thinking")
ARGUMENTS = DELTA % (b"input_json_delta", b"partial_json")
SIGNATURE = DELTA % (b"signature_delta", b"signature")
START = (
    b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{%b},"index":%d}\n\n'
)  # fmt: skip
TEXT_BLOCK, THINKING_BLOCK = b'"type":"text","text":""', b'"type":"thinking","thinking":""'
CALL_BLOCK = b'"type":"tool_use","id":%b,"name":%b,"input":{}'
STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":%b,"type":"message","role":"assistant",'
    b'"content":[],"model":%b,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":0}}}'
    b"\n\n"
)
MESSAGE_DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":%b,"stop_sequence":%b},"usage":%b}\n\n'
)
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageBlocks(ItemEvents):
    """The events of a message's content blocks; one block is open at a time.

    Text that arrives while a call's block is open waits until that block is closed, and then gets its own block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._index = 0
        self._open: bytes | None = None
        self._call_id: str | None = None
        self._calls: dict[int, str] = {}
        self._waiting = ""
        self._arguments: list[str] = []
        self.has_calls = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    # ---- what a choice says ----------------------------------------------------------------------------------

    def said(self, text: str) -> bytes:
        """Return the events for more of the answer's text."""
        if self._open is CALL_BLOCK:
            self._waiting += text
            return b""
        return self._into(TEXT_BLOCK) + TEXT % (encode(text), self._index) if text else b""

    def thought(self, text: str) -> bytes:
        """Return the events for more reasoning."""
        return self._into(THINKING_BLOCK) + THINKING % (encode(text), self._index) if text else b""

    def arguments(self, call: int, text: str) -> bytes:
        """Return the events for more arguments of the call with index ``call``."""
        events = list[bytes]()
        self._more_arguments(call, text, events)
        return b"".join(events)

    def delta(self, delta: Any) -> bytes:
        """Return the events for a parser's delta."""
        return self._told(delta, (delta,))

    def last(
        self, said: bytes, finish_reason: str, stop_reason: int | str | None, _fingerprint: str | None, _extras: Extras
    ) -> bytes:
        """Return ``said``, and keep the reasons for the end of the message."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return said

    def _tell(self, part: Any, events: list[bytes]) -> None:
        if part.reasoning:
            events.append(self._into(THINKING_BLOCK))
            events.append(THINKING % (encode(part.reasoning), self._index))
        if part.content and self._open is CALL_BLOCK:
            self._waiting += part.content
        elif part.content:
            events.append(self._into(TEXT_BLOCK))
            events.append(TEXT % (encode(part.content), self._index))
        for call in part.tool_calls:
            self._call(call, events)

    def _call(self, call: Any, events: list[bytes]) -> None:
        function = call.function
        if call.id is not None:
            self._calls[call.index] = call.id
            name = function.name if function else None
            if call.id != self._call_id and name is not None:
                events.append(self.close())
                events.append(START % (CALL_BLOCK % (encode(call.id), encode(name)), self._index))
                self._open, self._call_id, self.has_calls = CALL_BLOCK, call.id, True
                self._arguments = []
        if function and function.arguments:
            self._more_arguments(call.index, function.arguments, events)

    def _more_arguments(self, call: int, text: str, events: list[bytes]) -> None:
        if self._call_id is not None and self._call_id == self._calls.get(call):
            self._arguments.append(text)
            events.append(ARGUMENTS % (encode(text), self._index))

    # ---- blocks ----------------------------------------------------------------------------------------------

    @property
    def is_call_whole(self) -> bool:
        """True if the last call's arguments are complete JSON."""
        try:
            json.loads("".join(self._arguments))
        except json.JSONDecodeError:
            return False
        return self.has_calls

    def _into(self, block: bytes) -> bytes:
        """Return the events that open a block of text or reasoning; empty if a block of this kind is open."""
        if self._open is block:
            return b""
        events = self.close() + START % (block, self._index)
        self._open = block
        return events

    def close(self) -> bytes:
        """Return the events that close the open block, and those of a block for the waiting text, if any."""
        text = self._waiting
        events = self.stop()
        if not text:
            return events
        return b"%b%b%b%b" % (events, self._into(TEXT_BLOCK), TEXT % (encode(text), self._index), self.stop())

    def stop(self) -> bytes:
        """Return the events that close the open block; drop the waiting text."""
        if self._open is None:
            return b""
        signature = SIGNATURE % (encode(uuid4().hex), self._index) if self._open is THINKING_BLOCK else b""
        events = signature + STOP % self._index
        self._open, self._call_id, self._waiting = None, None, ""
        self._index += 1
        return events


class MessageAnswer:
    """One message, which vLLM's object ``serving`` prepared."""

    keeps_alive = False

    def __init__(self, serving: Any, message_id: str, model: str) -> None:
        self._serving = serving
        self._id = message_id
        self._model = model
        self._first: RequestOutput | None = None
        self._blocks = MessageBlocks()

    def choice(self, _index: int) -> MessageBlocks:
        """Return the blocks of the only choice."""
        return self._blocks

    def begin(self) -> bytes:
        """Return nothing: the first event needs a result."""
        return b""

    def result(self, result: RequestOutput) -> bytes:
        """Return the event that begins the message, at its first result; empty for later results."""
        if self._first is not None:
            return b""
        self._first = result
        return MESSAGE_START % (encode(self._id), encode(self._model), len(result.prompt_token_ids or ()))

    async def end(self, choices: Sequence[Told]) -> bytes:
        """Return the events that close the last block, with the stop reason and the usage, and ``message_stop``."""
        first, blocks = self._first, self._blocks
        if first is None:
            return MESSAGE_STOP
        counts = counts_of(self._serving, first, choices, is_chat=True, multimodal=None)
        reason, sequence = _stop_reason_of()(
            blocks.finish_reason or "stop", blocks.stop_reason, tool_used=blocks.has_calls,
            tool_complete=blocks.is_call_whole,
        )  # fmt: skip
        closed = blocks.close()
        return closed + MESSAGE_DELTA % (encode(reason), encode(sequence), encode(_usage(counts))) + MESSAGE_STOP

    def failed(self, error: Exception) -> bytes:
        """Return the events of the error in Anthropic's format."""
        before = b"" if CONVERTED_AS_TEXT.is_here else b"".join(self._blocks.unsent) + self._blocks.stop()
        if isinstance(error, SequenceFailed):
            return before + last_events(MESSAGES, error.error)
        said = msgspec.json.decode(error_of(self._serving, error))["error"]
        # From 0.33 on, vLLM fails while it writes an event, with status 500; earlier versions fail at a chat chunk.
        is_unwritable = isinstance(error, PydanticSerializationError) and not CONVERTED_AS_TEXT.is_here
        status = HTTPStatus.INTERNAL_SERVER_ERROR if is_unwritable else said["code"]
        return before + b"event: error\ndata: %b\n\n" % in_form(MESSAGES, status, {"message": said["message"]})


def _stop_reason_of() -> Callable[..., tuple[str | None, str | None]]:
    from vllm.entrypoints.anthropic.serving import _to_anthropic_stop_reason

    return _to_anthropic_stop_reason


def _usage(counts: dict[str, Any]) -> dict[str, int]:
    """Return a chat answer's usage in Anthropic's fields: ``input_tokens`` does not include cached tokens."""
    details = counts.get("prompt_tokens_details") or {}
    read, created = details.get("cached_tokens"), details.get("created_cache_tokens")
    left = counts["prompt_tokens"] - (read or 0) - (created or 0)
    found = {"input_tokens": max(0, left), "output_tokens": counts["completion_tokens"]}
    if created is not None:
        found["cache_creation_input_tokens"] = created
    if read is not None:
        found["cache_read_input_tokens"] = read
    return found
