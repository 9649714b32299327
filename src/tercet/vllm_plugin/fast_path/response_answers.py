"""Answers of the Responses API: vLLM's functions make the items; this module writes only the deltas inside them.

All delta events of one item (text, reasoning or arguments) differ only in their delta and their number. vLLM writes the
first one, which is the template ("form") of the others.

Relies on ``SimpleStreamingEventProcessor``, its ``state`` and the functions of its ``_STATE_HANDLERS``; on
``SimpleContext`` keeping the data from which ``responses_full_generator`` makes the whole response; and on events being
written with all of their fields, ``response.created`` ending with its number and its type.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses import protocol
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor,
    _StateType,
    split_delta,
)
from vllm.outputs import RequestOutput

from tercet.protocol.errors import last_events
from tercet.protocol.headers import RESPONSES
from tercet.protocol.sse import object_of
from tercet.vllm_plugin.differences import closed_items, last_response_event
from tercet.vllm_plugin.fast_path.answer_events import Told
from tercet.vllm_plugin.fast_path.delta_json import encode
from tercet.vllm_plugin.fast_path.item_events import ItemEvents
from tercet.vllm_plugin.fast_path.sse_chunks import Extras
from tercet.vllm_plugin.frontend.program_client import SequenceFailed
from tercet.wire.serving.answers import fault_of

# Placeholders for the delta and the number in the form of an event.
SOME_DELTA, SOME_NUMBER = "\ue000 delta \ue000", 987654321987654321
EVENT = b"event: %b\ndata: %b\n\n"


@dataclass
class Numbered:
    """Writer of one answer's events, which get consecutive numbers; ``next`` is the number of the next event."""

    next: int = 0

    def written(self, events: Sequence[Any]) -> bytes:
        """Number vLLM's ``events`` and return their bytes."""
        found: list[bytes] = []
        for event in events:
            if hasattr(event, "sequence_number"):
                event.sequence_number = self.next
            self.next += 1
            found.append(event_of(event))
        return b"".join(found)


def event_of(event: Any) -> bytes:
    """Return the bytes of one of vLLM's events, as vLLM's route writes it."""
    return EVENT % (event.type.encode(), event.model_dump_json(indent=None, by_alias=True).encode())


class ResponseItems(ItemEvents):
    """The events of a response's items; one item is open at a time."""

    def __init__(self, tools: Any, numbered: Numbered) -> None:
        super().__init__()
        self._processor = SimpleStreamingEventProcessor(tools=tools)
        self._numbered = numbered
        # The form of the open item's deltas, the state it belongs to, and the deltas missing in the processor's state.
        self._form: bytes | None = None
        self._form_of: _StateType | None = None
        self._deltas: list[str] = []
        self._no_output: Any = None  # vLLM reads an output for its log probabilities only

    @property
    def finished(self) -> list[Any]:
        """The closed items."""
        return self._processor.output_items

    # ---- what a choice says ----------------------------------------------------------------------------------

    def said(self, text: str) -> bytes:
        """Return the events for more of the answer's text."""
        if not text:
            return b""
        if self._form_of is _StateType.CONTENT:
            return self._more(text)
        return self.delta(DeltaMessage(content=text))

    def thought(self, text: str) -> bytes:
        """Return the events for more reasoning."""
        if self._form_of is _StateType.REASONING:
            return self._more(text)
        return self.delta(DeltaMessage(reasoning=text))

    def arguments(self, call: int, text: str) -> bytes:
        """Return the events for more arguments of the call with index ``call``."""
        if self._form_of is _StateType.TOOL_CALL and self._processor.state.tool_call_index == call:
            return self._more(text)
        more = DeltaToolCall(index=call, function=DeltaFunctionCall(arguments=text))
        return self.delta(DeltaMessage(tool_calls=[more]))

    def delta(self, delta: Any) -> bytes:
        """Return the events for a parser's delta."""
        return self._told(delta, split_delta(delta))

    def last(
        self, said: bytes, _finish_reason: str, _stop_reason: Any, _fingerprint: str | None, _extras: Extras
    ) -> bytes:
        """Return ``said``: the last item is closed at the end of the response."""
        return said

    # ---- items -----------------------------------------------------------------------------------------------

    def _tell(self, part: Any, events: list[bytes]) -> None:
        processor = self._processor
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
        """Return an event with ``delta`` for the open item."""
        form = self._form
        if form is None:
            form = self._form = self._form_of_open()
            self._form_of = self._processor.state.current_state
        number = self._numbered.next
        event = form % {b"delta": encode(delta), b"number": number}
        self._numbered.next = number + 1
        self._deltas.append(delta)
        return event

    def _form_of_open(self) -> bytes:
        state = copy.copy(self._processor.state)
        (event,) = self._processor._STATE_HANDLERS[state.current_state].delta_fn(state, SOME_DELTA)
        event.sequence_number = SOME_NUMBER
        form = event_of(event).replace(b"%", b"%%")
        for some, name in ((encode(SOME_DELTA), b"%(delta)b"), (b"%d" % SOME_NUMBER, b"%(number)d")):
            form = form.replace(some, name)
        return form

    def close(self, finish_reason: str | None = None) -> bytes:
        """Return the events that close the open item; ``finish_reason`` is the response's, given at its end only."""
        self._processor.state.accumulated_text += "".join(self._deltas)
        self._deltas.clear()
        self._form = self._form_of = None
        return self._numbered.written(closed_items(self._processor, finish_reason))


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
        """Return the items of the only choice."""
        return self._items

    def begin(self) -> bytes:
        """Return the two first events, ``response.created`` and ``response.in_progress``."""
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

    async def end(self, choices: Sequence[Told]) -> bytes:
        """Return the events that close the last item, and the event with the whole response."""
        task, context = self._task, self._task.context
        (told,) = choices
        context.num_output_tokens, context._accumulated_token_ids = told.num_tokens, told.token_ids
        closed = self._items.close(context.last_output.outputs[0].finish_reason)
        context.streamed_output_items = self._items.finished
        response = await self._serving.responses_full_generator(
            task.request, task.sampling_params, _no_outputs(), context, task.model_name, task.tokenizer,
            task.request_metadata, created_time=task.created_time,
        )  # fmt: skip
        return closed + self._numbered.written([last_response_event(response)])

    def failed(self, error: Exception) -> bytes:
        """Return the events of the error and of the failed response."""
        said = error.error if isinstance(error, SequenceFailed) else fault_of(error)
        before = {"sequence_number": self._numbered.next - 1, "response": object_of(self._opening).get("response")}
        return b"".join(self._items.unsent) + last_events(RESPONSES, said, before)


async def _no_outputs() -> AsyncGenerator[Any, None]:
    """Yield nothing: all outputs were read before."""
    for output in ():
        yield output
