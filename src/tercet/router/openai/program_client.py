"""The engine-core client that runs programs, in place of vLLM's client of one engine.

Relies on ``AsyncLLM`` using, for generation, only the methods below and the attributes ``engine_ranks_managed`` and
``resources.engine_dead``. ``engine_dead`` is never set: the loss of one engine must not fail every request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from tercet.aio import TaskSet
from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    Output,
    ProgramFailed,
    Request,
    RouterFailed,
    TercetError,
)
from tercet.router.openai.conversion import features_of, to_core_output, to_request
from tercet.router.serve.service import Service
from tercet.wire.serving.server_access import Concurrency, RequestContext, current

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

logger = logging.getLogger(__name__)
# Largest number of tokens and log probabilities that wait in vLLM's layer for a client that does not read.
MOST_UNTAKEN = 256 * 1024
# Number of sequences of one request that are added before other requests get a turn.
BETWEEN_PAUSES = 8
# Token ids are below this bound: no vocabulary has larger ids, and they do not fit vLLM's arrays.
MOST_TOKENS = 2**31


class SequenceOutputs:
    """One sequence's outputs as vLLM's messages, and its failures as vLLM's exceptions.

    The constructor raises :class:`SequenceFailed` for a request that no engine accepts.
    """

    def __init__(
        self, service: Service, request: Request, context: RequestContext, request_id: str | None = None
    ) -> None:
        self.seq_id = request.seq_id
        # vLLM's id of the sequence in this process; the client may have chosen it.
        self.request_id = request_id or request.seq_id
        self._num_prompt_tokens = request.num_tokens
        self._context = context
        try:
            self._run = service.answer(request, context)
        except BadRequest as error:
            context.failed = context.failed or error
            raise SequenceFailed(error) from error
        self.stream = self._run.stream
        self._is_first = True
        asked = request.sampling_params.keys()
        self._wants_logprobs = not asked.isdisjoint(("logprobs", "logprob_token_ids"))
        self._wants_prompt_logprobs = not asked.isdisjoint(("prompt_logprobs", "prompt_logprob_token_ids"))

    def to_core_output(self, output: Output) -> EngineCoreOutput:
        """Return vLLM's message for the next output.

        Raises :class:`~tercet.protocol.ProgramFailed` for an output that a correct engine never returns: it would end
        vLLM's output handler, and with it every request.
        """
        unasked = (output.logprobs is not None and not self._wants_logprobs) or (
            output.prompt_logprobs is not None and not self._wants_prompt_logprobs
        )
        if unasked or not all(0 <= token < MOST_TOKENS for token in output.token_ids):
            raise ProgramFailed(
                "an output of the program has log probabilities that the request did not ask for, or invalid token ids"
            )
        usage = self._run.prompt_usage(output.usage) if self._is_first else None
        self._is_first = False
        return to_core_output(self.request_id, self._num_prompt_tokens, output, usage)

    @contextmanager
    def failures(self) -> Generator[None]:
        """Raise the failures that occur while entered as exceptions from which vLLM makes the client's error."""
        try:
            yield
        except GenerationError:  # vLLM's own exception
            raise
        except TercetError as error:
            raise self._failed(error) from error
        except Exception as error:  # an unexpected error fails this request only
            logger.exception("request %s failed", self.seq_id)
            failure = RouterFailed("the router failed while it served this request; its log says how")
            raise self._failed(failure) from error

    def _failed(self, error: TercetError) -> SequenceFailed:
        told = self._run.failed(error)
        self._context.failed = self._context.failed or told
        return SequenceFailed(told)


class SequenceFailed(GracefulHTTPError):
    """One of Tercet's errors, as an exception from which vLLM makes an answer with its status."""

    def __init__(self, error: TercetError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


def _require_few(context: RequestContext) -> None:
    if context.most_sequences is not None and len(context.running) >= context.most_sequences:
        raise VLLMValidationError(
            f"the request asks for more than {context.most_sequences} sequences, "
            f"and this router allows {context.most_sequences} per request (max-sequences); send several requests"
        )


class RouterLLM(AsyncLLM):
    """vLLM's ``AsyncLLM``, which starts the prompts of a request one after the other; others are served in between.

    vLLM's handlers start all prompts at once, and the first step of each prompt prepares it.
    """

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        context, outputs = current(), super().generate(*args, **kwargs)
        context.generations += 1
        return outputs if context.generations == 1 else _in_turn(context, outputs)


async def _in_turn(
    context: RequestContext, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    async with context.starting:
        await asyncio.sleep(0)
    async with aclosing(outputs):
        async for output in outputs:
            yield output


def _size(choice: CompletionOutput) -> int:
    tokens, logprobs = len(choice.token_ids), choice.logprobs
    return tokens * (1 + len(logprobs[-1] or ())) if logprobs else tokens


class ProgramClient(EngineCoreClient):
    """Engine-core client that takes requests from ``AsyncLLM``, runs a program for each, and returns its outputs."""

    _processor: OutputProcessor

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._ready: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        # Set once the outputs that get_output_async returned last, or will return next, are in their requests' streams.
        self._last_batch, self._next_batch = asyncio.Event(), asyncio.Event()
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    def attach(self, output_processor: OutputProcessor) -> None:
        """Use ``output_processor`` to pass errors to requests. Call this before the first request.

        Clients then get the status and the message of an error.
        """
        self._processor = output_processor

    # ---- what AsyncLLM calls ---------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return all outputs since the last call; wait for at least one."""
        self._last_batch.set()  # AsyncLLM calls again once it has put the last outputs into its requests' streams
        outputs = [await self._ready.get()]
        while not self._ready.empty():
            outputs.append(self._ready.get_nowait())
        self._last_batch, self._next_batch = self._next_batch, asyncio.Event()
        return EngineCoreOutputs(outputs=outputs)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start the request's program, or pass its outputs to the request's stream on the fast path."""
        context = current()
        try:
            _require_few(context)
            features = await features_of(request, self._service.fleet.model_dtype)
            sequence = to_request(request, context.headers, context.asked, features)
            outputs = SequenceOutputs(self._service, sequence, context, request.request_id)
        except (VLLMValidationError, SequenceFailed):
            # AsyncLLM has already registered the request, and does not remove it after an error raised here.
            self._processor.abort_requests((request.request_id,), internal=True)
            raise
        if context.stream is not None:
            context.stream.begin(outputs)
            return
        task = self._tasks.spawn(self._run(outputs, context.concurrency))
        self._running[request.request_id] = context.running[request.request_id] = task
        task.add_done_callback(partial(self._ended, request.request_id, context))
        if context.has_ended:
            task.cancel()
        if len(context.running) % BETWEEN_PAUSES == 0:
            await asyncio.sleep(0)  # vLLM adds all sequences of one request in a row; other requests get a turn here

    def _ended(self, request_id: str, context: RequestContext, task: asyncio.Task[None]) -> None:
        self._running.pop(request_id, None)
        context.running.pop(request_id, None)
        if task.cancelled():  # vLLM does not abort a request if it was cancelled while it added the request
            self._forget(request_id)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Cancel the programs of these requests; each releases its resources on all engines."""
        for request_id in request_ids:
            task = self._running.get(request_id)
            if task is not None:
                task.cancel()

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """Return the only supported task, text generation."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: the router has no multi-modal cache of an engine."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel every program."""
        self._tasks.cancel()

    def dp_engines_running(self) -> bool:
        """True if a program is running."""
        return bool(self._running)

    # ---- one request -----------------------------------------------------------------------------------------

    async def _run(self, outputs: SequenceOutputs, concurrency: Concurrency | None) -> None:
        try:
            async with nullcontext() if concurrency is None else concurrency.one():
                await self._pass_on(outputs)
        except Exception as error:
            self._fail(outputs.request_id, error)

    async def _pass_on(self, outputs: SequenceOutputs) -> None:
        with outputs.failures():
            first = True
            async with aclosing(outputs.stream) as stream:
                async for output in stream:
                    self._require_taken(outputs.request_id)
                    self._ready.put_nowait(outputs.to_core_output(output))
                    if first and not output.finished:
                        # The client gets the first token before the program starts its work for the second one.
                        await self._next_batch.wait()
                    first = False

    def _require_taken(self, request_id: str) -> None:
        """Raise :class:`~tercet.protocol.DeadlineExceeded` if too much of the sequence waits for its client."""
        queue = self._queue_of(request_id)
        waiting = queue.output if queue is not None else None
        choices = waiting.outputs if isinstance(waiting, RequestOutput) else ()
        if sum(_size(choice) for choice in choices) > MOST_UNTAKEN:
            raise DeadlineExceeded(
                f"the client does not read its answer: over {MOST_UNTAKEN} tokens and log probabilities wait for it"
            )

    def _fail(self, request_id: str, error: Exception) -> None:
        queue = self._queue_of(request_id)
        if queue is not None:
            queue.put(error)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Make vLLM abort the whole request of a sequence, if vLLM still has it."""
        state = self._processor.request_states.get(request_id)
        if state is not None:
            parent = state.parent_req
            self._processor.abort_requests((parent.request_id if parent else request_id,), internal=True)

    def _queue_of(self, request_id: str) -> RequestOutputCollector | None:
        state = self._processor.request_states.get(request_id)
        return state.queue if state is not None else None
