"""The engine-core client that runs programs, in the place where vLLM's API server expects one engine.

Relies on ``AsyncLLM`` using, for generation, only the methods below and the attributes ``engine_ranks_managed`` and
``resources.engine_dead``. That flag is never set: the loss of one engine must not fail every request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from tercet.fleet import Trace
from tercet.protocol import EngineError, Request, TercetError, Usage
from tercet.router.context import RequestContext, current
from tercet.router.convert import to_core_output, to_request
from tercet.router.service import Service
from tercet.router.streaming import PlainStream, StreamStats, current_stream

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor

logger = logging.getLogger(__name__)


@dataclass
class Resources:
    """What ``AsyncLLM`` reads to know whether its engine lives."""

    engine_dead: bool = False


class ProgramClient(EngineCoreClient):
    """Takes requests from ``AsyncLLM``, runs a program for each, and hands its outputs back."""

    def __init__(self, service: Service, vllm_config: Any) -> None:
        self._service = service
        self._config = vllm_config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        self._output_processor: OutputProcessor | None = None
        self._stream_stats = StreamStats(None)
        # Set once what get_output_async returned last, or will return next, is in its requests' streams.
        self._last_batch, self._next_batch = asyncio.Event(), asyncio.Event()
        self.engine_ranks_managed = [0]
        self.resources = Resources()

    def attach(self, output_processor: OutputProcessor, stats: StreamStats) -> None:
        """Where requests' errors go, so that clients get the status and the message; and counts of streamed tokens."""
        self._output_processor = output_processor
        self._stream_stats = stats

    # ---- what AsyncLLM calls ---------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        """Everything that arrived since the last call; waits for at least one output."""
        self._last_batch.set()  # AsyncLLM asks again once it has put the last ones into its requests' streams
        outputs = [await self._ready.get()]
        while not self._ready.empty():
            outputs.append(self._ready.get_nowait())
        self._last_batch, self._next_batch = self._next_batch, asyncio.Event()
        return EngineCoreOutputs(outputs=outputs)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start the request's program."""
        context = current()
        try:
            sequence = to_request(request, context.headers, context.asked.user)
        except VLLMValidationError:
            # AsyncLLM has registered it already, and does not undo that for errors raised here.
            if self._output_processor is not None:
                self._output_processor.abort_requests((request.request_id,), internal=True)
            raise
        task = asyncio.get_running_loop().create_task(self._run(sequence, context, self._stream_of(sequence)))
        self._tasks[sequence.seq_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(sequence.seq_id, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Cancel programs; each gives back what it took, wherever it is."""
        for request_id in request_ids:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """Text generation only."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel every program."""
        for task in self._tasks.values():
            task.cancel()

    def dp_engines_running(self) -> bool:
        """Whether there is work."""
        return bool(self._tasks)

    # ---- one request -----------------------------------------------------------------------------------------

    async def _run(self, request: Request, context: RequestContext, stream: PlainStream | None) -> None:
        trace = Trace()
        context.traces.append(trace)
        with self._errors_reach_the_client(request.seq_id):
            first = True
            async with (
                self._service.deadline(context.began),
                aclosing(self._service.run(request, trace, context.asked.model)) as outputs,
            ):
                async for output in outputs:
                    if stream is not None and stream.takes(output):
                        stop = stream.write(output.token_ids)
                        if stop is not None:
                            self._ready.put_nowait(_stopped_by(request.seq_id, stop))
                            return
                        if stream.is_full:
                            await stream.has_room()
                        continue
                    usage = _prompt_usage(trace, output.usage) if first else None
                    self._ready.put_nowait(to_core_output(request.seq_id, request.num_tokens, output, usage))
                    if first and not output.finished:
                        # The client has its first token before the program goes on to what the second one needs.
                        await (self._next_batch.wait() if stream is None else stream.settled())
                    first = False

    def _stream_of(self, request: Request) -> PlainStream | None:
        """The short way to the client, if the request may go it."""
        stream = current_stream()
        state = self._output_processor.request_states.get(request.seq_id) if self._output_processor else None
        if stream is None or state is None or not stream.attach(state, self._stream_stats):
            return None
        return stream

    @contextmanager
    def _errors_reach_the_client(self, seq_id: str) -> Generator[None]:
        try:
            yield
        except TercetError as error:
            self._service.failed(error)
            self._fail(seq_id, error)
        except Exception as error:  # it fails its own request only
            logger.exception("request %s failed", seq_id)
            failure = EngineError(f"the front door failed: {type(error).__name__}: {error}")
            self._service.failed(failure)
            self._fail(seq_id, failure)

    def _fail(self, seq_id: str, error: TercetError) -> None:
        processor = self._output_processor
        state = processor.request_states.get(seq_id) if processor is not None else None
        if processor is None or state is None or state.queue is None:
            return
        state.queue.put(_http_error(error))
        processor.abort_requests((seq_id,), internal=True)


def _stopped_by(seq_id: str, stop: str) -> EngineCoreOutput:
    """The end of a stream whose text had a stop string in it; its tokens have been seen."""
    return EngineCoreOutput(
        request_id=seq_id, new_token_ids=[], finish_reason=FinishReason.STOP, stop_reason=stop
    )  # fmt: skip


def _prompt_usage(trace: Trace, usage: Usage | None) -> Usage:
    """What the client's ``usage`` shall call cached: prompt tokens that no engine had to compute."""
    if usage is not None:
        return usage
    found = next((event for event in reversed(trace.events) if event.verb == "remote_send"), None)
    cached_there = sum(event.cached for event in trace.events if event.verb == "prep_recv")
    return Usage(cached=max(cached_there, found.cached if found is not None else 0))


def _http_error(error: TercetError) -> Exception:
    if error.status == HTTPStatus.BAD_REQUEST:
        return VLLMValidationError(error.message, parameter=error.param)
    return GracefulHTTPError(error.message, HTTPStatus(error.status))
