"""Answers of the two APIs of agents: Anthropic's Messages, in content blocks, and OpenAI's Responses, in items.

vLLM makes Messages' events from its chat chunks. Here the text of an output is written as an event of the open block.
Of Responses, vLLM makes the events that begin and end items and the response; the deltas between them are written here,
in the form of one event of vLLM's.

Relies on ``AnthropicServingMessages.message_stream_converter`` for the events, their fields and their order, and on
``_to_anthropic_stop_reason`` and ``_build_anthropic_usage``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from pydantic_core import PydanticSerializationError
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses import protocol
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, _StateType, split_delta
from vllm.outputs import RequestOutput

from tercet.protocol.errors import MESSAGES, in_form, last_events
from tercet.protocol.headers import RESPONSES
from tercet.protocol.sse import object_of
from tercet.router.openai.fast_path.sse_chunks import NULL, Extras, counts_of, encode, error_of, framed
from tercet.router.openai.program_client import SequenceFailed
from tercet.vllm_plugin.differences import CONVERTED_AS_TEXT, closed_items, last_response_event
from tercet.wire.serving.answers import fault_of

if TYPE_CHECKING:
    from tercet.router.openai.fast_path.request_stream import ChoiceStream


class ItemEvents:
    """The events of one choice (:class:`~.sse_chunks.ChoiceEvents`), of which none has log probabilities or extras.

    One item is open at a time. A delta here is one whole event, or several: those that close an item and open the next.
    """

    empty = b""

    def __init__(self) -> None:
        # Events of the first parts of a delta, if a later part could not be written.
        self.unsent: list[bytes] = []

    def text_delta(self, text: str) -> bytes:
        raise NotImplementedError

    def text(self, text: str) -> bytes:
        return self.frame(self.text_delta(text))

    def frame(self, delta: bytes, _logprobs: bytes = NULL) -> bytes:
        return framed(delta) if delta else b""

    def event(self, delta: bytes, _extras: Extras) -> bytes:
        return delta

    def _write(self, part: Any, events: list[bytes]) -> None:
        """Append the events for a ``part`` of a parser's delta."""
        raise NotImplementedError

    def _events_of(self, delta: Any, parts: Iterable[Any]) -> bytes:
        """Return the events of the ``parts`` of a parser's delta; raises vLLM's exception if they cannot be written."""
        events = self.unsent = list[bytes]()
        for part in parts:
            is_whole = False
            with suppress(UnicodeEncodeError):  # half of a character, from an escape that an output has cut
                self._write(part, events)
                is_whole = True
            if not is_whole:
                delta.model_dump_json()  # outside of the handler: the client's error is made of the whole chain
        self.unsent = []
        return b"".join(events)


# ---- Messages --------------------------------------------------------------------------------------------------------

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

    def text_delta(self, text: str) -> bytes:
        if self._open is CALL_BLOCK:
            self._waiting += text
            return b""
        return self._into(TEXT_BLOCK) + TEXT % (encode(text), self._index) if text else b""

    def reasoning_delta(self, text: str) -> bytes:
        return self._into(THINKING_BLOCK) + THINKING % (encode(text), self._index) if text else b""

    def arguments_delta(self, call: int, text: str) -> bytes:
        if self._call_id is None or self._call_id != self._calls.get(call):
            return b""
        self._arguments.append(text)
        return ARGUMENTS % (encode(text), self._index)

    def parsed_delta(self, delta: Any) -> bytes:
        return self._events_of(delta, (delta,))

    def last(
        self, delta: bytes, finish_reason: str, stop_reason: int | str | None, _fingerprint: str | None, _extras: Extras
    ) -> bytes:
        """Return ``delta``, and keep the reasons for the end of the message."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return delta

    def _write(self, part: Any, events: list[bytes]) -> None:
        if part.reasoning:
            events.append(self._into(THINKING_BLOCK))
            events.append(THINKING % (encode(part.reasoning), self._index))
        if part.content and self._open is CALL_BLOCK:
            self._waiting += part.content
        elif part.content:
            events.append(self._into(TEXT_BLOCK))
            events.append(TEXT % (encode(part.content), self._index))
        for call in part.tool_calls:
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
                events.append(self.arguments_delta(call.index, function.arguments))

    def is_call_whole(self) -> bool:
        """True if the last call's arguments are complete JSON."""
        with suppress(json.JSONDecodeError):
            json.loads("".join(self._arguments))
            return self.has_calls
        return False

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
        return self._blocks

    def begin(self) -> bytes:
        return b""

    def result(self, result: RequestOutput) -> bytes:
        if self._first is not None:
            return b""
        self._first = result
        return MESSAGE_START % (encode(self._id), encode(self._model), len(result.prompt_token_ids or ()))

    async def end(self, choices: Sequence[ChoiceStream]) -> bytes:
        first, blocks = self._first, self._blocks
        if first is None:
            return MESSAGE_STOP
        counts = counts_of(self._serving, first, choices, is_chat=True, multimodal=None)
        from vllm.entrypoints.anthropic.serving import _to_anthropic_stop_reason

        reason, sequence = _to_anthropic_stop_reason(
            blocks.finish_reason or "stop", blocks.stop_reason, tool_used=blocks.has_calls,
            tool_complete=blocks.is_call_whole(),
        )  # fmt: skip
        closed = blocks.close()
        return closed + MESSAGE_DELTA % (encode(reason), encode(sequence), encode(_usage(counts))) + MESSAGE_STOP

    def failed(self, error: Exception) -> bytes:
        before = b"" if CONVERTED_AS_TEXT.is_here else b"".join(self._blocks.unsent) + self._blocks.stop()
        if isinstance(error, SequenceFailed):
            return before + last_events(MESSAGES, error.error)
        refusal = msgspec.json.decode(error_of(self._serving, error))["error"]
        # From 0.33 on, vLLM fails while it writes an event, with status 500; earlier versions fail at a chat chunk.
        is_unwritable = isinstance(error, PydanticSerializationError) and not CONVERTED_AS_TEXT.is_here
        status = HTTPStatus.INTERNAL_SERVER_ERROR if is_unwritable else refusal["code"]
        return before + b"event: error\ndata: %b\n\n" % in_form(MESSAGES, status, {"message": refusal["message"]})


def _usage(counts: dict[str, Any]) -> dict[str, int]:
    """Return a chat answer's usage in Anthropic's fields: ``input_tokens`` does not include cached tokens."""
    details = counts.get("prompt_tokens_details") or {}
    read, created = details.get("cached_tokens"), details.get("created_cache_tokens")
    left = counts["prompt_tokens"] - (read or 0) - (created or 0)
    usage = {"input_tokens": max(0, left), "output_tokens": counts["completion_tokens"]}
    if created is not None:
        usage["cache_creation_input_tokens"] = created
    if read is not None:
        usage["cache_read_input_tokens"] = read
    return usage


# ---- Responses -------------------------------------------------------------------------------------------------------

# All delta events of one item (text, reasoning or arguments) differ only in their delta and their number. vLLM writes
# the first one, which is the template ("form") of the others.
#
# Relies on ``SimpleStreamingEventProcessor``, its ``state`` and the functions of its ``_STATE_HANDLERS``; on
# ``SimpleContext`` keeping the data from which ``responses_full_generator`` makes the whole response; and on events
# being written with all of their fields, ``response.created`` ending with its number and its type.


# Placeholders for the delta and the number in the form of an event.
SOME_DELTA, SOME_NUMBER = "\ue000 delta \ue000", 987654321987654321
EVENT = b"event: %b\ndata: %b\n\n"


@dataclass
class Numbered:
    """Writer of one answer's events, which get consecutive numbers; ``next`` is the number of the next event."""

    next: int = 0

    def written(self, events: Sequence[Any]) -> bytes:
        written: list[bytes] = []
        for event in events:
            if hasattr(event, "sequence_number"):
                event.sequence_number = self.next
            self.next += 1
            written.append(event_of(event))
        return b"".join(written)


def event_of(event: Any) -> bytes:
    """Return the bytes of one of vLLM's events, as vLLM's route writes it."""
    return EVENT % (event.type.encode(), event.model_dump_json(indent=None, by_alias=True).encode())


class ResponseItems(ItemEvents):
    """The events of a response's items; one item is open at a time."""

    def __init__(self, tools: Any, numbered: Numbered) -> None:
        super().__init__()
        self.processor = SimpleStreamingEventProcessor(tools=tools)
        self._numbered = numbered
        # The form of the open item's deltas, the state it belongs to, and the deltas missing in the processor's state.
        self._form: bytes | None = None
        self._form_of: _StateType | None = None
        self._deltas: list[str] = []
        self._no_output: Any = None  # vLLM reads an output for its log probabilities only

    def text_delta(self, text: str) -> bytes:
        if not text:
            return b""
        if self._form_of is _StateType.CONTENT:
            return self._more(text)
        return self.parsed_delta(DeltaMessage(content=text))

    def reasoning_delta(self, text: str) -> bytes:
        if self._form_of is _StateType.REASONING:
            return self._more(text)
        return self.parsed_delta(DeltaMessage(reasoning=text))

    def arguments_delta(self, call: int, text: str) -> bytes:
        if self._form_of is _StateType.TOOL_CALL and self.processor.state.tool_call_index == call:
            return self._more(text)
        more = DeltaToolCall(index=call, function=DeltaFunctionCall(arguments=text))
        return self.parsed_delta(DeltaMessage(tool_calls=[more]))

    def parsed_delta(self, delta: Any) -> bytes:
        return self._events_of(delta, split_delta(delta))

    def last(
        self, delta: bytes, _finish_reason: str, _stop_reason: Any, _fingerprint: str | None, _extras: Extras
    ) -> bytes:
        return delta

    def _write(self, part: Any, events: list[bytes]) -> None:
        processor = self.processor
        kind, call = processor.resolve_target_state(part)
        if kind is _StateType.NONE:
            return
        if processor.needs_transition(kind, call):
            events.append(self.close())
            events.append(self._numbered.written(processor.open(kind, call)))
        if kind is _StateType.CONTENT:
            events.append(self._more(part.content))
        elif kind is _StateType.REASONING:
            events.append(self._more(part.reasoning))
        elif processor.state.tool_call_is_custom:
            events.append(self._numbered.written(processor.emit_delta(part, self._no_output)))
        elif more := "".join(each.function.arguments or "" for each in part.tool_calls if each.function is not None):
            events.append(self._more(more))

    def _more(self, delta: str) -> bytes:
        form = self._form
        if form is None:
            # One event of the open item, as vLLM makes it from a copy of its state, becomes the form of all of them:
            # only the delta and the number differ.
            state = copy.copy(self.processor.state)
            (event,) = self.processor._STATE_HANDLERS[state.current_state].delta_fn(state, SOME_DELTA)
            event.sequence_number = SOME_NUMBER
            form = event_of(event).replace(b"%", b"%%")
            for some, name in ((encode(SOME_DELTA), b"%(delta)b"), (b"%d" % SOME_NUMBER, b"%(number)d")):
                form = form.replace(some, name)
            self._form, self._form_of = form, state.current_state
        number = self._numbered.next
        written = form % {b"delta": encode(delta), b"number": number}
        self._numbered.next = number + 1
        self._deltas.append(delta)
        return written

    def close(self, finish_reason: str | None = None) -> bytes:
        """Return the events that close the open item; ``finish_reason`` is the response's, given at its end only."""
        self.processor.state.accumulated_text += "".join(self._deltas)
        self._deltas.clear()
        self._form = self._form_of = None
        return self._numbered.written(closed_items(self.processor, finish_reason))


@dataclass
class ResponseTask:
    """Arguments with which vLLM makes the whole response, under vLLM's names."""

    request: Any
    sampling_params: Any
    context: Any
    model_name: str
    tokenizer: Any
    request_metadata: Any
    created_time: int


class ResponseAnswer:
    """One response, which vLLM's object ``serving`` prepared."""

    keeps_alive = False

    def __init__(self, serving: Any, task: ResponseTask) -> None:
        self._serving = serving
        self._task = task
        self._numbered = Numbered()
        self._items = ResponseItems(task.request.tools, self._numbered)
        self._opening = b""

    def choice(self, _index: int) -> ResponseItems:
        return self._items

    def begin(self) -> bytes:
        task = self._task
        response: Any = protocol.ResponsesResponse.from_request(
            task.request, task.sampling_params, model_name=task.model_name, created_time=task.created_time,
            output=[], status="in_progress", usage=None,
        ).model_dump(mode="json", by_alias=True)  # fmt: skip
        created = protocol.ResponseCreatedEvent(type="response.created", sequence_number=-1, response=response)
        self._opening = self._numbered.written([created])
        data = self._opening.partition(b"\ndata: ")[2].rpartition(b',"sequence_number":')[0]
        again = b'%b,"sequence_number":%d,"type":"response.in_progress"}' % (data, self._numbered.next)
        self._numbered.next += 1
        return self._opening + EVENT % (b"response.in_progress", again)

    def result(self, result: RequestOutput) -> bytes:
        """Add ``result`` to the context; return nothing, since a result has no event."""
        self._task.context.append_output(result)
        return b""

    async def end(self, choices: Sequence[ChoiceStream]) -> bytes:
        """Return the events that close the last item, and the event with the whole response."""
        task, context = self._task, self._task.context
        (choice,) = choices
        context.num_output_tokens = choice.num_tokens
        context._accumulated_token_ids = [] if choice.parsed is None else choice.parsed.token_ids
        closed = self._items.close(context.last_output.outputs[0].finish_reason)
        context.streamed_output_items = self._items.processor.output_items
        response = await self._serving.responses_full_generator(
            task.request, task.sampling_params, _no_outputs(), context, task.model_name, task.tokenizer,
            task.request_metadata, created_time=task.created_time,
        )  # fmt: skip
        return closed + self._numbered.written([last_response_event(response)])

    def failed(self, error: Exception) -> bytes:
        fault = error.error if isinstance(error, SequenceFailed) else fault_of(error)
        before = {"sequence_number": self._numbered.next - 1, "response": object_of(self._opening).get("response")}
        return b"".join(self._items.unsent) + last_events(RESPONSES, fault, before)


async def _no_outputs() -> AsyncGenerator[Any, None]:
    """Yield nothing: all outputs were read before."""
    for output in ():
        yield output
