"""One request on this engine, through vLLM's ``AsyncLLM``, as Tercet's outputs; and a sequence that it decodes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec
from vllm import TokensPrompt
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from tercet.protocol import (
    BadRequest,
    EngineError,
    MultiModalFeature,
    Output,
    TercetError,
    TokenLogprob,
    Usage,
)
from tercet.protocol.spans import SpanContext, current_span
from tercet.protocol.types import FinishReason
from tercet.protocol.wire import StreamDestination
from tercet.settings.verb_log import LoggedGeneration
from tercet.vllm_plugin.core.connector_messages import REQUEST_PREFIX, TercetParams
from tercet.vllm_plugin.core.keyed_prompt import KeyedPrompt
from tercet.vllm_plugin.edge.grammar_failures import StructureRefused, StructureUntried
from tercet.vllm_plugin.edge.sampling_params import first_token_only, reasoning_of, to_vllm
from tercet.vllm_plugin.mm_features import to_prompt
from tercet.wire.streams import RouterConnection, SequenceSender

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(eq=False)
class LLMRequest:
    """One request: its prompt, its parameters, and its output stream; ``request_id`` is Tercet's id for it.

    ``features`` are the prompt's, with their data, until vLLM has them. ``place`` is the request's place in a
    distributed trace, or None.
    """

    client: AsyncLLM
    prompt: KeyedPrompt
    sampling_params: Mapping[str, Any]
    params: TercetParams
    priority: int = 0
    features: Sequence[MultiModalFeature] = ()
    place: SpanContext | None = field(default_factory=current_span, init=False)
    num_cached: int = field(default=0, init=False)
    request_id: str = field(default_factory=lambda: f"{REQUEST_PREFIX}{uuid.uuid4().hex}", init=False)
    _aborting: asyncio.Task[None] | None = field(default=None, init=False)
    _submitting: bool = field(default=False, init=False)
    _aborted: bool = field(default=False, init=False)

    def abort(self) -> None:
        """End the request; its stream then ends with the finish reason ``abort``."""
        self._aborted = True
        if not self._submitting:  # an abort that overtakes the request would have no effect
            self._aborting = asyncio.ensure_future(self.client.abort(self.request_id))

    async def first(self) -> Output:
        """Compute the prompt and sample one token.

        The output's finish reason is that of the whole request: a request that continues elsewhere is not finished.
        """
        wanted = self.sampling_params.get("max_tokens")
        async for output in self._run(first_token_only(self.sampling_params)):
            if output.finish_reason in ("abort", "error"):
                raise EngineError(f"the engine ended the request: {output.finish_reason}")
            limit = self.client.vllm_config.model_config.max_model_len
            goes_on = wanted != 1 and len(self.prompt.tokens) + 1 < limit
            if output.finish_reason == "length" and goes_on:
                return Output(output.token_ids, logprobs=output.logprobs, prompt_logprobs=output.prompt_logprobs)
            return output
        raise EngineError("the engine ended the request without a token")

    def outputs(self) -> AsyncGenerator[Output, None]:
        """Yield outputs until one has a finish reason."""
        return self._run(self.sampling_params)

    async def start(self, take: Callable[[Output | TercetError], None]) -> None:
        """Submit the request; then ``take`` gets its outputs, or the error that ends it, on the event loop.

        Relies on ``AsyncLLM.add_request`` returning a collector whose ``put``, looked up on the instance, is called
        with each ``RequestOutput`` and with the exception that ends everything; so there is no task per request, and no
        task switch per token. Raises :class:`~tercet.protocol.BadRequest`.
        """

        def put(item: Any) -> None:
            take(_as_ours(item) if isinstance(item, Exception) else self._output_of(item))

        self._submitting = True
        try:
            prompt, params, more = await self._for_vllm(self.sampling_params)
            with _vllms_errors_as_ours():
                queue = await self.client.add_request(self.request_id, prompt, params, **more)
        except TercetError:  # vLLM did not accept it
            raise
        except BaseException:
            self._aborted = True
            raise
        finally:
            self._submitting = False
            if self._aborted:
                self.abort()
        already = queue.output  # outputs while the request was being submitted
        queue.put = put  # type: ignore[method-assign]
        if already is not None:
            put(already)

    async def _run(self, sampling_params: Mapping[str, Any]) -> AsyncGenerator[Output, None]:
        prompt, params, more = await self._for_vllm(sampling_params)
        if self._aborted:
            yield Output((), "abort")
            return
        stream = self.client.generate(prompt, params, self.request_id, **more)
        try:
            with _vllms_errors_as_ours():
                async for item in stream:
                    yield self._output_of(item)
        finally:
            await stream.aclose()

    async def _for_vllm(
        self, sampling_params: Mapping[str, Any]
    ) -> tuple[TokensPrompt, SamplingParams, dict[str, Any]]:
        """Return prompt, parameters and other arguments for ``AsyncLLM``.

        Raises :class:`~tercet.protocol.BadRequest`.
        """
        prompt = await self._prompt_for_vllm()
        num_output = len(self.params.seq.output) if self.params.seq is not None else 0
        params = to_vllm(sampling_params, self.params.to_kv_transfer_params(), num_output)
        adapter = self.prompt.adapter
        lora = None if adapter is None else adapter.to_vllm()
        more = {"priority": self.priority, "lora_request": lora, **reasoning_of(sampling_params)}
        # If vLLM exports traces, its own spans join the trace.
        if self.place is not None and self.client.observability_config.otlp_traces_endpoint is not None:
            more["trace_headers"] = self.place.headers()
        return prompt, params, more

    async def _prompt_for_vllm(self) -> TokensPrompt:
        tokens, salt = self.prompt.tokens, self.prompt.salt
        if self.features:
            dtype = self.client.vllm_config.model_config.dtype
            # Digests and casts of megabytes: in a thread, so that the event loop continues with others' tokens.
            prompt = await asyncio.to_thread(to_prompt, tokens, self.features, salt, dtype)
            self.features = ()
            return prompt
        prompt = TokensPrompt(prompt_token_ids=tokens)
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    def _output_of(self, item: RequestOutput) -> Output:
        self.num_cached = item.num_cached_tokens or self.num_cached
        choice = item.outputs[0]
        return Output(
            token_ids=tuple(choice.token_ids),
            finish_reason=cast(FinishReason | None, choice.finish_reason),
            stop_reason=choice.stop_reason,
            logprobs=None if choice.logprobs is None else tuple(_logprobs(at) for at in choice.logprobs),
            prompt_logprobs=None
            if not item.prompt_logprobs  # only the first item of a stream has any
            else tuple(None if at is None else _logprobs(at) for at in item.prompt_logprobs),
        )


@contextmanager
def _vllms_errors_as_ours() -> Generator[None]:
    try:
        yield
    except (
        VLLMClientError, StructureUntried, ValueError, EngineDeadError, EngineGenerateError, GenerationError
    ) as error:  # fmt: skip
        raise _as_ours(error) from error


def _as_ours(error: Exception) -> TercetError:
    """Return an error of vLLM as a Tercet error: another engine can serve the request, unless the request is wrong.

    From 0.33 on vLLM ends a request with the error that it has, such as that of a paused engine.
    """
    if isinstance(error, (StructureRefused, StructureUntried)):
        return error.to_tercet()
    if isinstance(error, (VLLMClientError, ValueError)):
        return BadRequest(str(error))
    return EngineError(f"the engine failed: {error}")


def _logprobs(at: Mapping[int, Any]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, found.logprob, found.rank) for token, found in at.items())


@dataclass(eq=False)
class DecodingSequence:
    """A generation, and the resources to give back at its end: ``on_end`` is called once, with whether it began.

    ``number`` identifies it in the core; ``tokens`` are the prompt and the output so far. ``usage`` makes the first
    output's usage from the number of cached tokens. ``sender`` sends its outputs to a router, if it has one. The log
    names the ``model``.
    """

    seq_id: str
    number: int
    request: LLMRequest
    tokens: list[int]
    usage: Callable[[int], Usage]
    on_end: Callable[[bool], None]
    model: str = ""
    sender: SequenceSender | None = field(default=None, init=False)
    _logged: LoggedGeneration = field(init=False)
    _num_given: int = field(init=False)
    _status: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._num_given = len(self.tokens)
        self._logged = LoggedGeneration(self.seq_id, self.model, self._num_given)
        self.request.place = self._logged.place

    @property
    def age(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self._logged.began

    def begins_with(self, prompt: KeyedPrompt) -> bool:
        """True if KV of its first tokens is also KV of ``prompt``."""
        known, tokens, end = self.tokens, prompt.tokens, len(prompt.tokens)
        # The last token distinguishes most sequences.
        alike = len(known) >= end and known[end - 1] == tokens[end - 1]
        return alike and not prompt.difference(self.request.prompt) and known[:end] == tokens

    def told(self, output: Output) -> Output:
        """Return the output for callers, with its usage if it is the first one; record its tokens."""
        self.tokens += output.token_ids
        if output.finished:
            self._status = int(HTTPStatus.OK)
        if self._begun:
            return output
        self._begun = True
        return msgspec.structs.replace(output, usage=self.usage(self.request.num_cached))

    def end(self) -> None:
        """Give back the sequence's resources; further calls do nothing."""
        if not self._over:
            self._over = True
            self._logged.over(self._status, len(self.tokens) - self._num_given)
            self.on_end(self._begun)

    @contextmanager
    def ended(self) -> Generator[None]:
        """End the sequence at the block's exit; an error that ends it becomes its status."""
        try:
            yield
        except TercetError as error:
            self._status = error.status
            raise
        finally:
            self.end()

    async def stream(self, connection: RouterConnection, router: StreamDestination, position: int) -> None:
        """Send outputs to a router, until the last one, or until the router cancels.

        Returns once the engine has the request; raises :class:`~tercet.protocol.TercetError` if the engine refuses it.
        """
        with ExitStack() as undo:
            undo.callback(self.end)
            sender = self.sender = connection.sender(router.number, position, self._stop)
            undo.callback(sender.close)
            await self.request.start(lambda found: self._deliver(sender, found))
            undo.pop_all()

    def _deliver(self, sender: SequenceSender, found: Output | TercetError) -> None:
        if self._over:
            return  # stopped; further outputs are dropped
        if isinstance(found, TercetError):
            self._status = found.status
            self.end()
            sender.fail(found)
            return
        output = self.told(found)
        if output.finished:
            self.end()
        sender.send(output)

    def _stop(self) -> None:
        self.request.abort()
        self.end()
