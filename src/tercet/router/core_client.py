"""The engine-core client that runs programs, in the place where vLLM's API server expects one engine.

Relies on ``AsyncLLM`` using, for generation, only the methods below and the attributes ``engine_ranks_managed`` and
``resources.engine_dead``. That flag is never set: the loss of one engine must not fail every request.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient

from tercet.router.context import current
from tercet.router.convert import to_request
from tercet.router.program_outputs import ProgramOutputs
from tercet.router.service import Service
from tercet.router.streaming import current_stream

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


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
        # Set once what get_output_async returned last, or will return next, is in its requests' streams.
        self._last_batch, self._next_batch = asyncio.Event(), asyncio.Event()
        self.engine_ranks_managed = [0]
        self.resources = Resources()

    def attach(self, output_processor: OutputProcessor) -> None:
        """Where requests' errors go, so that clients get the status and the message."""
        self._output_processor = output_processor

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
        """Start the request's program, or hand it to the plain stream that the request is."""
        context = current()
        try:
            sequence = to_request(request, context.headers, context.asked.user)
        except VLLMValidationError:
            # AsyncLLM has registered it already, and does not undo that for errors raised here.
            if self._output_processor is not None:
                self._output_processor.abort_requests((request.request_id,), internal=True)
            raise
        stream = current_stream()
        outputs = ProgramOutputs(self._service, sequence, context)
        if stream is not None:
            stream.begin(outputs)
            return
        task = asyncio.get_running_loop().create_task(self._run(outputs))
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

    async def _run(self, outputs: ProgramOutputs) -> None:
        try:
            with outputs.failures():
                first = True
                async with aclosing(outputs.stream) as stream:
                    async for output in stream:
                        self._ready.put_nowait(outputs.to_core_output(output))
                        if first and not output.finished:
                            # The client has its first token before the program goes on to what the second one needs.
                            await self._next_batch.wait()
                        first = False
        except Exception as error:
            self._fail(outputs.seq_id, error)

    def _fail(self, seq_id: str, error: Exception) -> None:
        processor = self._output_processor
        state = processor.request_states.get(seq_id) if processor is not None else None
        if processor is None or state is None or state.queue is None:
            return
        state.queue.put(error)
        processor.abort_requests((seq_id,), internal=True)
