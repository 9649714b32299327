"""One plain stream: a sequence whose chunks are written here, from its program's outputs straight to the socket.

vLLM's output processor makes the text of its first and last output, with all of vLLM's counters. The outputs between
are written as they arrive, and wake up no task.

Relies on ``AsyncLLM.add_request`` validating a request, registering it with the ``OutputProcessor`` and giving it to
the engine-core client; on ``process_outputs`` putting the result of an output into the request's queue at once; on
``RequestState`` having ``detokenizer``, ``stream_interval`` and ``stats``; and on serving objects making the events of
errors by ``create_streaming_error_response``, ``_raise_if_error`` and
``_convert_generation_error_to_streaming_response``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tercet.protocol import Output, ProgramFailed
from tercet.vllm_plugin.fast_path.sse_chunks import DONE, ChunkWriter
from tercet.vllm_plugin.fast_path.stream_metrics import StreamStats
from tercet.vllm_plugin.fast_path.token_texts import TokenTexts, look_up
from tercet.vllm_plugin.frontend.program_client import SequenceFailed, SequenceOutputs
from tercet.wire.serving.client_connection import ClientConnection
from tercet.wire.serving.error_answers import with_named_code

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor

logger = logging.getLogger(__name__)


class TextEnded(Exception):
    """The sequence's text ends before its program does: at a stop string."""


@dataclass(frozen=True)
class StreamTools:
    """Common parts of plain streams: vLLM's output processor, token counters, and the texts of tokens."""

    processor: OutputProcessor
    stats: StreamStats
    texts: TokenTexts | None


@dataclass(frozen=True)
class StreamPlan:
    """How to write one answer: ``serving`` is vLLM's object that prepared it.

    ``role`` is that of a chat answer, None for a completion; ``usage`` tells whether the client asked for a count.
    """

    serving: Any
    chunks: ChunkWriter
    role: str | None
    usage: bool


class PlainStream:
    """The stream of one request, to ``connection``; :meth:`run` returns once only its end is left to send."""

    def __init__(self, connection: ClientConnection, tools: StreamTools, plan: StreamPlan) -> None:
        self._connection = connection
        self._tools = tools
        self._plan = plan
        # Returns the text of the next token if the detokenizer does nothing else with it.
        self._decode_next: Callable[[int], str] | None = None
        self._outputs: SequenceOutputs | None = None
        self._state: Any = None
        self._queue: Any = None
        self._first: RequestOutput | None = None
        # Whether outputs only need their text written, and whether vLLM has made the last result.
        self._is_flowing = self._is_finished = False
        self._num_tokens = 0
        self._end = b""

    # ---- from start to end -----------------------------------------------------------------------------------

    async def run(self, add_request: Callable[[], Awaitable[Any]]) -> bytes:
        """Stream what ``add_request`` adds to vLLM; returns the last chunks, one of which has an error if any."""
        try:
            self._queue = await add_request()
            await self._stream()
            end = self._end + self._usage()
        except GenerationError as error:
            end = _error_event(
                with_named_code(self._plan.serving._convert_generation_error_to_streaming_response(error).encode())
            )
        except SequenceFailed as failed:
            end = _error_event(msgspec.json.encode(failed.error.to_wire()))
        except Exception as error:
            if not isinstance(error, (VLLMClientError, GracefulHTTPError)):
                logger.exception("a stream failed")
            end = _error_event(with_named_code(self._plan.serving.create_streaming_error_response(error).encode()))
        return end + DONE

    def begin(self, outputs: SequenceOutputs) -> None:
        """The engine-core client got the request with these ``outputs``; called while it is being added."""
        self._outputs = outputs
        self._state = self._tools.processor.request_states[outputs.request_id]
        detokenizer = self._state.detokenizer
        decode_next = look_up(detokenizer, self._tools.texts, self._state.prompt_token_ids or ())
        if not detokenizer.stop:
            self._decode_next = decode_next

    async def _stream(self) -> None:
        outputs = self._outputs
        if outputs is None:
            raise RuntimeError("vLLM added a request without telling its engine-core client")
        try:
            with outputs.failures():
                await self._run_program(outputs)
        finally:
            self._tools.processor.abort_requests((self._state.request_id,), internal=True)
            self._queue.close()

    async def _run_program(self, outputs: SequenceOutputs) -> None:
        try:
            await outputs.stream.run(self._consume, self._sent)
        except TextEnded:
            return
        if not self._is_finished:
            raise ProgramFailed("the program ended before its sequence did")

    async def _sent(self) -> None:
        self._connection.flush()
        await self._connection.has_room()

    # ---- outputs ---------------------------------------------------------------------------------------------

    def _consume(self, output: Output) -> None:
        """Write an output as soon as it arrives. Raises :class:`TextEnded` if no more are wanted."""
        is_text = self._is_flowing and output.finish_reason is None and output.logprobs is None and output.token_ids
        left = self._write_text(output.token_ids) if is_text else self._in_vllms_words(output)
        if left is not None:
            self._process(left)
            if self._is_finished and output.finish_reason is None:
                raise TextEnded
        if self._connection.is_full:
            self._connection.require_reader()

    def _in_vllms_words(self, output: Output) -> EngineCoreOutput | None:
        return None if self._outputs is None else self._outputs.to_core_output(output)

    def _process(self, output: EngineCoreOutput) -> None:
        """Let vLLM's processor make a result of an output, and send it before the program continues."""
        self._tools.processor.process_outputs([output], time.monotonic(), self._tools.stats.iteration())
        result = self._queue.get_nowait()
        if result is not None:
            self._write(result)
            self._connection.flush()

    def _write_text(self, token_ids: Sequence[int]) -> EngineCoreOutput | None:
        """Send the text of these tokens; returns the end of the stream instead, if they complete a stop string.

        The text before a stop string is not sent: it belongs to the last chunk.
        """
        num_tokens = len(token_ids)
        if self._decode_next is not None:
            self._num_tokens += num_tokens
            text = "".join(map(self._decode_next, token_ids))
        else:
            detokenizer = self._state.detokenizer
            before = detokenizer.num_output_tokens()
            stop = detokenizer.update(list(token_ids), False)
            # A stop string inside several tokens of one step drops the tokens after it.
            self._num_tokens += detokenizer.num_output_tokens() - before
            if stop is not None:
                self._tools.stats.count(self._state.stats, num_tokens)
                return _stopped(self._state.request_id, stop)
            text = detokenizer.get_next_output_text(False, True)
        self._tools.stats.observe(self._state.stats, num_tokens)
        self._connection.write(self._plan.chunks.text(text))
        return None

    # ---- results ---------------------------------------------------------------------------------------------

    def _write(self, result: RequestOutput) -> None:
        """Send the chunks of a result, but keep the last one for the end."""
        plan, completion = self._plan, result.outputs[0]
        if self._first is None:
            self._first = result
            if plan.role is not None:
                self._connection.write(plan.chunks.role(plan.role))
        plan.serving._raise_if_error(completion.finish_reason, self._state.request_id)
        self._is_flowing, self._is_finished = self._state.stream_interval <= 1, result.finished
        if not (completion.text or completion.token_ids or self._num_tokens):
            return
        self._num_tokens += len(completion.token_ids)
        if completion.finish_reason is None:
            self._connection.write(plan.chunks.text(completion.text))
        else:
            fingerprint = None if plan.usage else plan.serving.system_fingerprint
            self._end = plan.chunks.last(
                completion.text, completion.finish_reason, completion.stop_reason, fingerprint
            )  # fmt: skip

    def _usage(self) -> bytes:
        plan, first = self._plan, self._first
        if not plan.usage or first is None:
            return b""
        details = _prompt_details(first, plan) if plan.serving.enable_prompt_tokens_details else None
        num_prompt_tokens = len(first.prompt_token_ids or ())
        return plan.chunks.usage(num_prompt_tokens, self._num_tokens, details, plan.serving.system_fingerprint)


def _stopped(request_id: str, stop: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, new_token_ids=[], finish_reason=FinishReason.STOP, stop_reason=stop)


def _prompt_details(first: RequestOutput, plan: StreamPlan) -> dict[str, int] | None:
    """vLLM's details of the prompt's tokens: those created in the cache in chat answers only."""
    created = None if plan.role is None else first.num_cache_creation_tokens
    counts = {"cached_tokens": first.num_cached_tokens, "created_cache_tokens": created}
    return {name: count for name, count in counts.items() if count is not None} or None


def _error_event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
