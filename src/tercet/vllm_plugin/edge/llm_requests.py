"""One request on this engine, through vLLM's ``AsyncLLM``, as Tercet's outputs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from vllm import TokensPrompt
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from tercet.engine.interface import KeyedPrompt, ModelLimits, SendParams, SeqParams
from tercet.protocol import (
    BadRequest,
    EngineError,
    MultiModalFeature,
    Output,
    TercetError,
    TokenLogprob,
)
from tercet.protocol.spans import SpanContext, current_span
from tercet.protocol.types import FinishReason
from tercet.vllm_plugin.core.connector_messages import REQUEST_PREFIX, TercetParams
from tercet.vllm_plugin.edge.adapters import to_lora_request
from tercet.vllm_plugin.edge.grammar_failures import StructureRefused, StructureUntried
from tercet.vllm_plugin.edge.sampling_params import first_token_only, reasoning_of, to_vllm
from tercet.vllm_plugin.hooks import vllm_version
from tercet.vllm_plugin.mm_features import most_features_of, to_prompt

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(eq=False)
class LLMRequest:
    """An :class:`~tercet.engine.interface.EngineRequest`; ``features`` have their data until vLLM has them."""

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
        """Return prompt, parameters and other arguments for ``AsyncLLM``."""
        prompt = await self._prompt_for_vllm()
        num_output = len(self.params.seq.output) if self.params.seq is not None else 0
        params = to_vllm(sampling_params, self.params.to_kv_transfer_params(), num_output)
        adapter = self.prompt.adapter
        lora = None if adapter is None else to_lora_request(adapter)
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


class LLMGeneration:
    """The engine behind ``client`` for the verbs: :class:`~tercet.engine.interface.GenerationHalf`.

    ``token`` marks the requests of this engine's edge.
    """

    def __init__(self, client: AsyncLLM, token: str) -> None:
        self._client = client
        self._token = token
        self.limits = limits_of(client)
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
        self,
        prompt: KeyedPrompt,
        sampling_params: Mapping[str, Any],
        work: SeqParams | SendParams,
        priority: int = 0,
        features: Sequence[MultiModalFeature] = (),
    ) -> LLMRequest:
        is_seq = isinstance(work, SeqParams)
        params = TercetParams(self._token, seq=work) if is_seq else TercetParams(self._token, send=work)
        return LLMRequest(self._client, prompt, sampling_params, params, priority, features)


def limits_of(client: AsyncLLM) -> ModelLimits:
    """Return the limits of the engine behind ``client``."""
    model, lora = client.vllm_config.model_config, client.vllm_config.lora_config
    changing = lora is not None and lora.enable_tower_connector_lora
    most = most_features_of(client.renderer)
    return ModelLimits(model.get_vocab_size(), model.max_model_len, most, changing)


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
