"""One request on this engine, through vLLM's ``AsyncLLM``, as Tercet's outputs: parameters, stream and failures.

A structured output's failure comes as the stop reason of a last output that is an error (:mod:`..core.grammar_time`).
Here it becomes an exception in the request's queue, for the verbs and for vLLM's own API alike: 400 if the structure is
wrong, 503 if it could not be tried. Relies on ``OutputProcessor.process_outputs`` ignoring what follows an exception in
a request's queue.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from vllm import TokensPrompt
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason as CoreFinishReason
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor

from tercet.engine.interface import KeyedPrompt, ModelLimits, SendPlan, SeqParams
from tercet.protocol import BadRequest, EngineError, GrammarsBusy, MultiModalFeature, Output, TercetError, TokenLogprob
from tercet.protocol.grammar_bounds import require_small
from tercet.protocol.spans import SpanContext, current_span
from tercet.protocol.types import FinishReason
from tercet.protocol.wire import MOST_PRIORITY
from tercet.vllm_plugin.core.connector_messages import BACKGROUND_PREFIX, REQUEST_PREFIX, TercetParams
from tercet.vllm_plugin.core.grammar_time import REFUSED, UNTRIED
from tercet.vllm_plugin.edge.adapters import to_lora_request
from tercet.vllm_plugin.hooks import Method, vllm_version, wrap
from tercet.vllm_plugin.mm_features import to_prompt

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class StructureRefused(VLLMClientError):
    """The client's structure is wrong or takes too much: vLLM's API answers 400."""


class StructureUntried(GracefulHTTPError):
    """The structure could not be tried: vLLM's API answers 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)


def failure_of(output: Any) -> StructureRefused | StructureUntried | None:
    """Return the failure of a structured output that the core's ``output`` ends with, or None."""
    if output.finish_reason != CoreFinishReason.ERROR or not isinstance(output.stop_reason, str):
        return None
    said: str = output.stop_reason
    if said.startswith(REFUSED):
        return StructureRefused(said.removeprefix(REFUSED))
    return StructureUntried(said.removeprefix(UNTRIED)) if said.startswith(UNTRIED) else None


def end_with_failures() -> None:
    """Make the requests of this process end with these failures."""
    wrap(OutputProcessor, "process_outputs", _process)


def _process(original: Method, processor: Any, engine_core_outputs: list[Any], *args: Any, **more: Any) -> Any:
    for output in engine_core_outputs:
        if output.finish_reason is not None and (failure := failure_of(output)) is not None:
            state = processor.request_states.get(output.request_id)
            if state is not None and state.queue is not None:
                state.queue.put(failure)
    return original(processor, engine_core_outputs, *args, **more)


# Fields that only the engine sets, or that have another name in the verbs.
NOT_FOR_CALLERS = frozenset({"output_kind", "skip_clone", "detokenize", "output_text_buffer_length", "extra_args"})
_PLACE = re.compile(r"`\$\.(\w+)")
# Fields of vLLM's serving layer about the reasoning, in addition to the parameters; only structured output needs them.
REASONING_FIELDS = ("reasoning_ended", "reasoning_parser_kwargs")
CALLER_FIELDS = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - NOT_FOR_CALLERS


class Reasoning(msgspec.Struct, frozen=True):
    """Whether the prompt ends after the reasoning, None if unknown, and the arguments of the reasoning parser."""

    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


def reasoning_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``given`` about the reasoning, in ``AsyncLLM``'s form. Raises ``BadRequest``."""
    found = {name: given[name] for name in REASONING_FIELDS if given.get(name) is not None}
    try:
        return found and msgspec.to_builtins(msgspec.convert(found, Reasoning, strict=True))
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}", "sampling_params") from error


def to_vllm(given: Mapping[str, Any], kv_transfer_params: Mapping[str, Any], min_tokens_done: int) -> SamplingParams:
    """Return vLLM's ``SamplingParams``; ``min_tokens_done`` output tokens exist. Raises ``BadRequest`` for a field."""
    fields = {name: value for name, value in given.items() if name not in REASONING_FIELDS}
    unknown = next((name for name in fields if name not in CALLER_FIELDS), None)
    if unknown is not None:
        raise BadRequest(f"sampling_params: unknown field `{unknown}`", f"sampling_params.{unknown}")
    if fields.get("n", 1) != 1:
        raise BadRequest("sampling_params.n: a sequence has one output; start one per choice", "sampling_params.n")
    max_tokens = fields.get("max_tokens")
    if isinstance(max_tokens, int) and 1 <= max_tokens <= min_tokens_done:
        raise BadRequest(
            f"sampling_params.max_tokens: {max_tokens} is already reached by the {min_tokens_done} tokens of output",
            "sampling_params.max_tokens",
        )
    if isinstance(structured := fields.get("structured_outputs"), Mapping):
        require_small(cast("Mapping[str, Any]", structured), "sampling_params.structured_outputs")
    ours = {
        "detokenize": bool(fields.get("stop")),
        "output_kind": RequestOutputKind.DELTA.value,
        "extra_args": {"kv_transfer_params": dict(kv_transfer_params)},
    }
    try:
        # The engine's core decodes requests with these types, and a wrong type ends the core; vLLM's constructor checks
        # few of them.
        msgspec.msgpack.encode(fields)
        return msgspec.convert({**fields, **ours}, SamplingParams, str_keys=True, dec_hook=_array)
    except VLLMValidationError as error:
        raise BadRequest(f"sampling_params: {error}", _field(error.parameter)) from error
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        raise BadRequest(f"sampling_params: {error}", _field(found and found.group(1))) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"sampling_params: {error}", "sampling_params") from error


def _array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"a value of type {kind.__name__} is not accepted")
    return np.array(value, dtype=np.int64)


def _field(parameter: str | None) -> str:
    return "sampling_params" if parameter is None else f"sampling_params.{parameter}"


def first_token_only(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same parameters for a sender that samples one token.

    ``min_tokens`` of 1 masks the end of sequence for the first token, as a larger value does.
    """
    min_tokens = given.get("min_tokens", 0)
    return {**given, "max_tokens": 1, "min_tokens": min(min_tokens, 1) if isinstance(min_tokens, int) else min_tokens}


@dataclass(eq=False)
class LLMRequest:
    """An :class:`~tercet.engine.interface.EngineRequest`; ``features`` have their data until vLLM has them."""

    client: AsyncLLM
    prompt: KeyedPrompt
    sampling_params: Mapping[str, Any]
    params: TercetParams
    priority: int = 0
    features: Sequence[MultiModalFeature] = ()
    span: SpanContext | None = field(default_factory=current_span, init=False)
    num_cached: int = field(default=0, init=False)
    request_id: str = field(init=False)
    _aborting: asyncio.Task[None] | None = field(default=None, init=False)
    _submitting: bool = field(default=False, init=False)
    _aborted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        prefix = BACKGROUND_PREFIX if self.params.background else REQUEST_PREFIX
        self.request_id = f"{prefix}{uuid.uuid4().hex}"

    def abort(self) -> None:
        self._aborted = True
        if not self._submitting:  # an abort that overtakes the request would have no effect
            self._aborting = asyncio.ensure_future(self.client.abort(self.request_id))

    async def first(self) -> Output:
        wanted = self.sampling_params.get("max_tokens")
        async for output in self._run(first_token_only(self.sampling_params)):
            if output.finish_reason in ("abort", "error"):
                raise EngineError(f"the engine ended the request: {output.finish_reason}")
            limit = self.client.vllm_config.model_config.max_model_len
            goes_on = wanted != 1 and len(self.prompt.tokens) + 1 < limit
            # It ends because one token was asked for, and not because the sequence is over: the receiver goes on.
            if output.finish_reason == "length" and goes_on:
                return Output(output.token_ids, logprobs=output.logprobs, prompt_logprobs=output.prompt_logprobs)
            return output
        raise EngineError("the engine ended the request without a token")

    def outputs(self) -> AsyncGenerator[Output, None]:
        return self._run(self.sampling_params)

    async def start(self, take: Callable[[Output | TercetError], None]) -> None:
        # Relies on ``AsyncLLM.add_request`` returning a collector whose ``put``, looked up on the instance, is called
        # with each ``RequestOutput`` and with the exception that ends everything; so there is no task per request, and
        # no task switch per token.
        def put(item: Any) -> None:
            take(_as_ours(item) if isinstance(item, Exception) else self._output_of(item))

        self._submitting = True
        try:
            prompt, params, more = await self._for_vllm(self.sampling_params)
            with _vllms_errors_as_ours():
                queue = await self.client.add_request(self.request_id, prompt, params, **more)
        except BaseException as error:
            if not isinstance(error, TercetError):  # cancelled: vLLM may have accepted it, or get it in a moment
                self._aborted = True
            raise
        finally:
            self._submitting = False
            if self._aborted:
                self.abort()
        # vLLM may have put outputs there while the request was being submitted, before `put` is replaced.
        already = queue.output
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
        tokens, salt = self.prompt.tokens, self.prompt.salt
        if self.features:
            dtype = self.client.vllm_config.model_config.dtype
            # Digests and casts of megabytes: in a thread, so that the event loop continues with others' tokens.
            prompt = await asyncio.to_thread(to_prompt, tokens, self.features, salt, dtype)
            self.features = ()
        else:
            prompt = TokensPrompt(prompt_token_ids=tokens)
            if salt is not None:
                prompt["cache_salt"] = salt
        num_output = len(self.params.seq.output) if self.params.seq is not None else 0
        params = to_vllm(sampling_params, self.params.to_kv_transfer_params(), num_output)
        lora = None if self.prompt.adapter is None else to_lora_request(self.prompt.adapter)
        # With vLLM's scheduling by priority, a background request is the last of all.
        priority = MOST_PRIORITY if self.params.background else self.priority
        more = {"priority": priority, "lora_request": lora, **reasoning_of(sampling_params)}
        # If vLLM exports traces, its own spans join the trace.
        if self.span is not None and self.client.observability_config.otlp_traces_endpoint is not None:
            more["trace_headers"] = self.span.headers()
        return prompt, params, more

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


class LLMGeneration:
    """The engine behind ``client``: :class:`~tercet.engine.interface.GenerationHalf`. ``token`` marks its requests."""

    def __init__(self, client: AsyncLLM, token: str) -> None:
        self._client = client
        self._token = token
        model, lora = client.vllm_config.model_config, client.vllm_config.lora_config
        changing = lora is not None and lora.enable_tower_connector_lora
        processor = client.renderer.mm_processor  # None for a model of text
        most = {} if processor is None else dict(processor.info.allowed_mm_limits)
        self.limits = ModelLimits(model.get_vocab_size(), model.max_model_len, most, changing)
        self.version = vllm_version()

    @property
    def model(self) -> str:
        return str(self._client.vllm_config.model_config.served_model_name)

    @property
    def model_dtype(self) -> str:
        return str(self._client.vllm_config.model_config.dtype).removeprefix("torch.")

    def encode(self, text: str) -> list[int]:
        return self._client.get_tokenizer().encode(text)

    def request(
        self, prompt: KeyedPrompt, sampling_params: Mapping[str, Any], work: SeqParams | SendPlan, priority: int = 0,
        features: Sequence[MultiModalFeature] = (), background: bool = False,
    ) -> LLMRequest:  # fmt: skip
        send, seq = (None, work) if isinstance(work, SeqParams) else (work, None)
        params = TercetParams(self._token, send, seq, background)
        return LLMRequest(self._client, prompt, sampling_params, params, priority, features)


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
    if isinstance(error, StructureUntried):
        return GrammarsBusy(error.message)
    if isinstance(error, (VLLMClientError, ValueError)):
        return BadRequest(str(error), "structured_outputs" if isinstance(error, StructureRefused) else None)
    return EngineError(f"the engine failed: {error}")


def _logprobs(at: Mapping[int, Any]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, found.logprob, found.rank) for token, found in at.items())
