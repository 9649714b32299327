"""The engine-core client that runs programs, in place of vLLM's client of one engine, and the conversion of messages.

Relies on ``AsyncLLM`` using, for generation, only the methods below and the attributes ``engine_ranks_managed`` and
``resources.engine_dead``. ``engine_dead`` is never set: the loss of one engine must not fail every request. Also on
``OutputProcessor.abort_requests`` with a parent's id removing all of its sequences, and ``RequestState.parent_req``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from tercet.aio.tasks import TaskSet
from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    MultiModalFeature,
    Output,
    ProgramFailed,
    Request,
    RouterFailed,
    TercetError,
    TokenLogprob,
    Usage,
)
from tercet.protocol.wire import TokenId
from tercet.router.serve.service import RequestRun, Service
from tercet.vllm_plugin.mm_features import to_wire
from tercet.wire.serving.server_access import NOTHING, Asked, RequestContext, current

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

logger = logging.getLogger(__name__)
# Largest number of tokens and log probabilities that wait in vLLM's layer for a client that does not read.
MOST_UNTAKEN = 256 * 1024
# Number of sequences of one request that are added before other requests get a turn.
BETWEEN_PAUSES = 8
# Token ids are below this bound, as in all messages.
MOST_TOKENS: int = get_args(TokenId)[1].lt


class SequenceOutputs(RequestRun):
    """One sequence's outputs as vLLM's messages, and its failures as vLLM's exceptions.

    The constructor raises :class:`SequenceFailed` for a request that no engine accepts. ``request_id`` is vLLM's id of
    the sequence in this process; the client may have chosen it.
    """

    def __init__(self, service: Service, request: Request, context: RequestContext, request_id: str) -> None:
        try:
            super().__init__(service, request, context)
        except BadRequest as error:
            context.failed = context.failed or error
            raise SequenceFailed(error) from error
        self.request_id = request_id
        self._num_prompt_tokens = request.num_tokens
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
        # vLLM counts a prompt once, by its first output.
        usage = self.prompt_usage(output.usage) if self._is_first else None
        self._is_first = False
        return to_core_output(self.request_id, self._num_prompt_tokens, output, usage)

    @contextmanager
    def failures(self) -> Generator[None]:
        """Raise the failures that occur while entered as exceptions from which vLLM makes the client's error."""
        try:
            yield
        except GenerationError:  # vLLM's own exception
            raise
        except Exception as error:
            failure = error
            if not isinstance(failure, TercetError):  # an unexpected error fails this request only
                logger.exception("request %s failed", self._seq_id)
                failure = RouterFailed("the router failed while it served this request; its log says how")
            for_client = self.failed(failure)
            self._context.failed = self._context.failed or for_client
            raise SequenceFailed(for_client) from error


class SequenceFailed(GracefulHTTPError):
    """One of Tercet's errors, as an exception from which vLLM makes an answer with its status."""

    def __init__(self, error: TercetError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


class RouterLLM(AsyncLLM):
    """vLLM's ``AsyncLLM``, which starts the prompts of a request one after the other; others are served in between.

    vLLM's handlers start all prompts at once, and the first step of each prompt prepares it.
    """

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        context, outputs = current(), super().generate(*args, **kwargs)
        context.generations += 1

        async def in_turn() -> AsyncGenerator[RequestOutput, None]:
            async with context.starting:
                await asyncio.sleep(0)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

        return outputs if context.generations == 1 else in_turn()


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
        self._processor = output_processor

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
        context, request_id = current(), request.request_id
        # AsyncLLM has already registered the request. It removes one whose last output it gets, or whose task is
        # cancelled after this call. Every other one (refused here, cancelled here, or on the fast path) is forgotten at
        # the end of its HTTP request.
        context.when_ended.append(lambda _: self._forget(request_id))
        if context.has_ended:
            self._forget(request_id)
        # The router has counted the sequences in the body; this counts those that vLLM makes of it.
        if context.most_sequences is not None and len(context.running) >= context.most_sequences:
            raise VLLMValidationError(
                f"the request asks for more than {context.most_sequences} sequences, and this router allows "
                f"{context.most_sequences} per request (max-sequences); send several requests"
            )
        features = await features_of(request, self._service.fleet.model_dtype)
        sequence = to_request(request, context.headers, context.asked, features, context.background)
        outputs = SequenceOutputs(self._service, sequence, context, request_id)
        if context.begin_stream is not None:
            context.begin_stream(outputs)
            return
        task = self._tasks.spawn(self._run(outputs, context.concurrency()))
        self._running[request_id] = context.running[request_id] = task
        task.add_done_callback(partial(self._ended, request_id, context))
        if context.has_ended:  # the client left while vLLM added the request: nothing will abort it any more
            task.cancel()
        if len(context.running) % BETWEEN_PAUSES == 0:
            await asyncio.sleep(0)  # vLLM adds all sequences of one request in a row; other requests get a turn here

    def _ended(self, request_id: str, context: RequestContext, _: asyncio.Task[None]) -> None:
        self._running.pop(request_id, None)
        context.running.pop(request_id, None)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Cancel the programs of these requests; each releases its resources on all engines."""
        for request_id in request_ids:
            task = self._running.get(request_id)
            if task is not None:
                task.cancel()

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass  # the router has no cache of an engine

    def shutdown(self, timeout: float | None = None) -> None:
        self._tasks.cancel()

    def dp_engines_running(self) -> bool:
        return bool(self._running)

    async def _run(self, outputs: SequenceOutputs, turn: AbstractAsyncContextManager[None]) -> None:
        try:
            async with turn:
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
        except Exception as error:
            queue = self._queue_of(outputs.request_id)
            if queue is not None:
                queue.put(error)
                self._forget(outputs.request_id)  # now, not at the end: its client may be slow to take the error

    def _require_taken(self, request_id: str) -> None:
        """Raise :class:`~tercet.protocol.DeadlineExceeded` if too much of the sequence waits for its client."""
        queue = self._queue_of(request_id)
        waiting = queue.output if queue is not None else None
        choices = waiting.outputs if isinstance(waiting, RequestOutput) else ()
        # Each token, with as many log probabilities as the last one.
        size = sum(len(each.token_ids) * (1 + len((each.logprobs or [None])[-1] or ())) for each in choices)
        if size > MOST_UNTAKEN:
            raise DeadlineExceeded(
                f"the client does not read its answer: over {MOST_UNTAKEN} tokens and log probabilities wait for it"
            )

    def _forget(self, request_id: str) -> None:
        """Make vLLM abort the whole request of a sequence, if vLLM still has it."""
        state = self._processor.request_states.get(request_id)
        if state is not None:
            parent = state.parent_req
            self._processor.abort_requests((parent.request_id if parent else request_id,), internal=True)

    def _queue_of(self, request_id: str) -> RequestOutputCollector | None:
        state = self._processor.request_states.get(request_id)
        return state.queue if state is not None else None


# ---- vLLM's messages and Tercet's -----------------------------------------------------------------------------

FINISH_REASONS: Mapping[str, FinishReason] = {str(reason): reason for reason in FinishReason}
# Fields that the router itself uses to make the text, or that vLLM derives again on the engine.
NOT_FORWARDED = frozenset(
    {"n", "stop", "output_kind", "skip_clone", "detokenize", "output_text_buffer_length", "extra_args",
     "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
     "flat_logprobs"}
)  # fmt: skip
# Extra arguments that the serving layer has read: a session, and parameters of engines that prefill.
READ_BY_ROUTER = frozenset({"kv_transfer_params", "session_id"})
_DEFAULTS = SamplingParams()
FORWARDED = tuple(
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in NOT_FORWARDED
)
_forwarded_of: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*FORWARDED)
_FORWARDED_DEFAULTS = _forwarded_of(_DEFAULTS)


def to_request(
    request: EngineCoreRequest, headers: Mapping[str, str], known: Asked = NOTHING,
    features: tuple[MultiModalFeature, ...] = (), background: bool = False,
) -> Request:  # fmt: skip
    """Return the program's request for vLLM's; ``known`` are the fields that were read from its body.

    Raises ``VLLMValidationError`` (status 400) for what cannot be sent to engines.
    """
    unsupported = {
        "prompt embeddings": request.prompt_embeds is not None,
        "pooling": request.pooling_params is not None,
        "streaming input": request.resumable,
    }
    for what, wanted in unsupported.items():
        if wanted:
            raise VLLMValidationError(f"{what}: not supported by this router; ask an engine directly")
    params = request.sampling_params or _DEFAULTS
    if extra := (params.extra_args or {}).keys() - READ_BY_ROUTER:
        raise VLLMValidationError(f"extra_args: {', '.join(sorted(extra))} is not supported by this router")
    # Only what differs from vLLM's defaults: engines of another version have their own defaults for the rest.
    sampling = {
        name: _plain(value)
        for name, value, default in zip(FORWARDED, _forwarded_of(params), _FORWARDED_DEFAULTS, strict=True)
        if value is not default and (isinstance(value, np.ndarray) or value != default)
    }
    return Request(
        seq_id=request.request_id, prompt=tuple(request.prompt_token_ids or ()),
        sampling_params=sampling | _reasoning(request), priority=request.priority, background=background,
        cache_salt=request.cache_salt, headers=headers, user=known.user,
        session=known.session_name, mm_features=features,
        adapter=None if request.lora_request is None else request.lora_request.lora_name,
    )  # fmt: skip


async def features_of(request: EngineCoreRequest, model_dtype: str = "") -> tuple[MultiModalFeature, ...]:
    """Return a request's media inputs for engines that compute in ``model_dtype``; raises ``VLLMValidationError``."""
    if not (specs := request.mm_features):
        return ()
    try:
        # In a thread: megabytes are encoded and digested, and the tokens of other requests would wait for it.
        return await asyncio.to_thread(lambda: tuple(to_wire(spec, model_dtype) for spec in specs))
    except (ValueError, TypeError) as error:
        raise VLLMValidationError(f"multi-modal input: {error}") from error


def _reasoning(request: EngineCoreRequest) -> dict[str, Any]:
    """Return the fields that vLLM's serving layer gives engines about the reasoning; only structures need them."""
    if request.sampling_params is None or request.sampling_params.structured_outputs is None:
        return {}
    fields = {name: getattr(request, name) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: kept for name, kept in fields.items() if kept is not None and not name.startswith("_")}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return value


def to_core_output(seq_id: str, prompt_len: int, output: Output, usage: Usage | None) -> EngineCoreOutput:
    """Return vLLM's message for one output; ``usage`` is None except for the first output."""
    stats, tensors = None, None
    if output.prompt_logprobs is not None:
        import torch

        # The first position has none: nothing comes before it.
        lists = _logprobs_lists([position for position in output.prompt_logprobs if position is not None])
        token_ids, values = torch.from_numpy(lists.logprob_token_ids), torch.from_numpy(lists.logprobs)
        tensors = LogprobsTensors(token_ids, values, torch.from_numpy(lists.sampled_token_ranks))
    if usage is not None:
        stats, cached = PrefillStats(), min(usage.cached, prompt_len)
        stats.set(prompt_len, cached, min(usage.received, prompt_len - cached))
    return EngineCoreOutput(
        request_id=seq_id, new_token_ids=list(output.token_ids),
        new_logprobs=None if output.logprobs is None else _logprobs_lists(output.logprobs),
        new_prompt_logprobs_tensors=tensors,
        finish_reason=None if output.finish_reason is None else FINISH_REASONS[output.finish_reason],
        stop_reason=output.stop_reason, prefill_stats=stats,
    )  # fmt: skip


def _logprobs_lists(positions: Sequence[Sequence[TokenLogprob]]) -> LogprobsLists:
    """Return vLLM's arrays: the sampled token in column 0 and the token of rank *i* in column *i*.

    The engine's answer has each token once, so a sampled token that is among the top tokens is inserted again.
    """
    width = 1
    for position in positions:
        sampled, *top = (token.rank or 0 for token in position)
        # A sampled token that is among the top tokens has a column there, too.
        width = max(width, 1 + max([*top, sampled if sampled <= len(position) else 0]))
    token_ids = np.zeros((len(positions), width), dtype=np.int64)
    values = np.full((len(positions), width), -np.inf, dtype=np.float32)
    ranks = np.zeros(len(positions), dtype=np.int64)
    for row, position in enumerate(positions):
        sampled, by_rank = position[0], {token.rank: token for token in position}
        ranks[row] = sampled.rank or 0
        for column in range(width):
            token = by_rank.get(column, sampled) if column else sampled
            token_ids[row, column], values[row, column] = token.token_id, token.logprob
    if token_ids.size and token_ids.min() < 0:
        raise EngineError("an output of the program has log probabilities with negative token ids")
    return LogprobsLists(token_ids, values, ranks)
