"""The stream of one request on the fast path: its choices, and what belongs to all of them.

Relies on ``AsyncLLM.add_request`` validating a request, registering it with the ``OutputProcessor`` and giving its
sequences to the engine-core client, with one queue for all of them; and on serving objects making the events of errors
by ``create_streaming_error_response`` and ``_convert_generation_error_to_streaming_response``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput

from tercet.vllm_plugin.fast_path.choice_stream import ChoiceStream
from tercet.vllm_plugin.fast_path.keep_alive import KeepAlive
from tercet.vllm_plugin.fast_path.logprob_chunks import TokenPieces
from tercet.vllm_plugin.fast_path.sse_chunks import DONE, framed, usage_of
from tercet.vllm_plugin.fast_path.stream_plan import StreamPlan, StreamTools
from tercet.vllm_plugin.frontend.program_client import SequenceFailed, SequenceOutputs
from tercet.wire.serving.client_connection import ClientConnection
from tercet.wire.serving.error_answers import with_named_code
from tercet.wire.serving.request_context import InPortions

logger = logging.getLogger(__name__)


class RequestStream:
    """The stream of one request, to ``connection``; :meth:`run` returns once only its end is left to send.

    ``portions`` let its sequences in, where it has several; ``pieces`` are the texts of tokens with log probabilities.
    """

    def __init__(
        self, connection: ClientConnection, tools: StreamTools, plan: StreamPlan,
        portions: InPortions | None = None, pieces: TokenPieces | None = None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._tools = tools
        self._plan = plan
        self._portions = portions
        self._pieces = pieces
        self._keep_alive = KeepAlive(connection.write, tools.keep_alive) if tools.keep_alive else None
        self.write = connection.write if self._keep_alive is None else self._keep_alive.write
        self.flush = connection.flush
        self.require_reader = connection.require_reader
        self._choices: list[ChoiceStream] = []
        self._open = plan.n
        self._first: RequestOutput | None = None
        self._end = b""
        self.queue: Any = None

    # ---- from start to end -----------------------------------------------------------------------------------

    async def run(self, add_request: Callable[[], Awaitable[Any]]) -> bytes:
        """Stream what ``add_request`` adds to vLLM; returns the last chunks, one of which has an error if any."""
        try:
            self.queue = await add_request()
            with nullcontext() if self._keep_alive is None else self._keep_alive.running():
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
        """The engine-core client got a sequence with these ``outputs``; called while the request is being added."""
        self._choices.append(ChoiceStream(self, self._tools, self._plan, outputs, self._pieces))

    async def _stream(self) -> None:
        if not self._choices:
            raise RuntimeError("vLLM added a request without telling its engine-core client")
        try:
            if len(self._choices) == 1:
                await self._choices[0].run(nullcontext())
            else:
                await self._run_all()
        finally:
            self._tools.processor.abort_requests((self._choices[0].id,), internal=True)
            self.queue.close()

    async def _run_all(self) -> None:
        """Stream all choices at the same time; the error of one ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(choice.run(self._place()))
        except* Exception as failed:
            first = failed.exceptions[0]
        else:
            return
        raise first

    def _place(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._portions is None else self._portions.one()

    @property
    def calls_tool(self) -> bool:
        """Whether any choice calls a tool."""
        return any(choice.calls_tool for choice in self._choices)

    # ---- what choices ask of it ------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether more waits for the client than allowed."""
        return self._connection.is_full

    async def sent(self) -> None:
        """Send what was written, and wait until the client has read enough."""
        self._connection.flush()
        await self._connection.has_room()

    def has_result(self, result: RequestOutput) -> None:
        """With the first result of any choice, every chat answer tells its role."""
        if self._first is not None:
            return
        self._first = result
        plan = self._plan
        if plan.role is None:
            return
        prompt = result.prompt_token_ids if plan.token_ids else None
        text = result.prompt if plan.prompt_text else None
        usage = b""
        if plan.usage_each:
            reasoning = 0 if plan.counts_reasoning else None
            usage = usage_of(len(result.prompt_token_ids or ()), 0, reasoning, is_chat=True)
        for index in range(plan.n):
            self.write(framed(plan.chunks.role(plan.role, index, prompt, text, usage)))

    def has_ended(self, last: bytes) -> None:
        """The last choice's last event is sent with the end of the stream."""
        self._open -= 1
        if self._open:
            self.write(framed(last))
        else:
            self._end = last

    # ---- the count at the end --------------------------------------------------------------------------------

    def _usage(self) -> bytes:
        plan, first = self._plan, self._first
        if not plan.usage or first is None:
            return b""
        prompt, completion = len(first.prompt_token_ids or ()), sum(choice.num_tokens for choice in self._choices)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion
        }  # fmt: skip
        if plan.serving.enable_prompt_tokens_details:
            counts["prompt_tokens_details"] = _prompt_details(first, plan)
        if plan.counts_reasoning:
            reasoning = sum(choice.reasoning_tokens for choice in self._choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return plan.chunks.usage(counts, plan.serving.system_fingerprint)


def _prompt_details(first: RequestOutput, plan: StreamPlan) -> dict[str, Any] | None:
    """vLLM's details of the prompt's tokens: completions tell of those found in the cache only."""
    counts: dict[str, Any] = {"cached_tokens": first.num_cached_tokens}
    if plan.role is not None:
        counts["created_cache_tokens"] = first.num_cache_creation_tokens
        counts["multimodal_tokens"] = plan.multimodal_tokens or None
    return {name: count for name, count in counts.items() if count is not None} or None


def _error_event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
