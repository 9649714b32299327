"""Requests of an engine's own OpenAI API that name engines to prefill: they reach the core with their KV.

:class:`PrefillerHeader` reads what a request's headers say of its prefill, for :class:`PrefilledRequests` below it.

Relies on ``AsyncLLM`` registering a request with its ``OutputProcessor`` before it gives it to
``engine_core.add_request_async``, in the context of the HTTP request, and on waiting there having no other effect: the
request is held back until its KV has arrived, and then decodes with it as ``start_generate`` does. So all features of
vLLM's API stay vLLM's. The cached tokens of the prefilling engine are reported as vLLM reports them for its own
protocol: its ``RequestState`` has a field for that.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.datastructures import State
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.engine import verbs
from tercet.protocol import BadRequest, Request, Reservation, TercetError
from tercet.protocol.errors import error_body
from tercet.protocol.headers import PREFILLED_BELOW, PREFILLED_HEADER, PREFILLER_HEADER
from tercet.protocol.names import AllowedPrefillers, sequence_id
from tercet.protocol.spans import TraceEvent, VerbTrace
from tercet.protocol.wire import JSON
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.edge.attached_engine import AttachedEngine
from tercet.wire.client.remote_prefill import RemotePrefill, prefill_here
from tercet.wire.serving.answers import TracingSend, require_trace_reader, wants_trace

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

_COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(eq=False)
class NamedPrefillers:
    """The engines that prefill for the sequences of one HTTP request, and each sequence's trace.

    ``held`` is closed when the request ends.
    """

    hosts: Sequence[str]
    held: AsyncExitStack
    traces: list[VerbTrace] = field(default_factory=list[VerbTrace])


class Prefilled(NamedTuple):
    """A finished prefill: another engine has sent the KV under ``lease``, and had ``cached`` tokens in its cache."""

    lease: str
    cached: int


_said: ContextVar[NamedPrefillers | Prefilled | None] = ContextVar("tercet_prefill", default=None)


class PrefillerHeader:
    """An ASGI layer before an engine's own API, for the header that names engines to prefill.

    It reads the header, refuses engines that are not allowed, and adds traces to answers. Without allowed engines, the
    header is ignored. A sidecar's header reports a prefill that is already done. ``state`` is the server's: it has the
    allowed engines, and the keys of those who may see traces (None: all).
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed: AllowedPrefillers = self._state.tercet_prefillers
        headers = dict[str, str]()
        if scope["type"] == "http" and scope["path"].startswith(PREFILLED_BELOW):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        async with AsyncExitStack() as held:
            if allowed and (named := headers.get(PREFILLER_HEADER)) is not None:
                try:
                    said = NamedPrefillers(allowed.named(named), held)
                    if wants_trace(headers):
                        if (keys := self._state.tercet_trace_keys) is not None:
                            require_trace_reader(scope, keys, is_keyed=bool(self._state.tercet_verbs.callers))
                        send = TracingSend(send, said.traces)
                except TercetError as error:
                    refusal = Response(error_body(scope["path"], error), error.status, media_type=JSON)
                    await refusal(scope, receive, send)
                    return
            else:
                lease, _, cached = headers.get(PREFILLED_HEADER, "").partition(" ")
                said = Prefilled(lease, int(cached)) if _COUNT.fullmatch(cached) else None
            token = _said.set(said)
            try:
                await self._app(scope, receive, send)
            finally:
                _said.reset(token)


class PrefilledRequests:
    """A layer between ``AsyncLLM`` and its core: requests that name prefill engines get their KV first."""

    def __init__(self, client: AsyncLLM, engine: AttachedEngine, remote: RemotePrefill | None) -> None:
        self._edge, self._meter = engine.edge, engine.meter
        self._remote = remote
        self._processor = client.output_processor
        core: Any = client.engine_core
        self._add: Callable[[EngineCoreRequest], Awaitable[None]] = core.add_request_async
        core.add_request_async = self.add_request

    @property
    def name(self) -> str:
        return self._edge.name

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        return verbs.reserved(self._edge, request, end)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Get the request's KV from the named engines, if any, and then add it to the core, as vLLM's method does."""
        said = _said.get()
        if isinstance(said, Prefilled) and self._edge.leases.find(said.lease) is not None:
            self._set_cached(request, said.cached)
        if isinstance(said, NamedPrefillers) and self._remote is not None:
            try:
                await self._prefill(request, said, self._remote)
            except BaseException:
                # AsyncLLM has already registered the request, and does not undo that for exceptions from here.
                self._processor.abort_requests((request.request_id,), internal=True)
                raise
            if request.request_id not in self._processor.request_states:
                return  # the client has left in the meantime
        await self._add(request)

    def _set_cached(self, request: EngineCoreRequest, cached: int) -> None:
        state = self._processor.request_states.get(request.request_id)
        if state is not None:
            state.remote_prefill_cached_tokens = min(cached, len(request.prompt_token_ids or ()))

    async def _prefill(self, request: EngineCoreRequest, named: NamedPrefillers, remote: RemotePrefill) -> None:
        trace = VerbTrace()
        named.traces.append(trace)
        # What only this engine can compute: other engines get a prompt of tokens, and send KV.
        params = request.sampling_params
        reasons = {
            "pooling": params is None,
            "multi-modal input": bool(request.mm_features),
            "a prompt of embeddings": request.prompt_embeds is not None or not request.prompt_token_ids,
            "a prompt with a LoRA adapter": request.lora_request is not None,
            "streaming input": request.resumable,
            "a prompt with requested log probabilities": params is not None and params.prompt_logprobs is not None,
        }
        if reason := next((what for what, holds in reasons.items() if holds), ""):
            prefill_here(self.name, request.request_id, BadRequest(f"{reason} cannot be prefilled elsewhere"), trace)
            return
        sequence = Request(
            seq_id=sequence_id(request.request_id),
            prompt=tuple(request.prompt_token_ids or ()),
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        async with AsyncExitStack() as held:
            with self._meter.computed_elsewhere(sequence.num_tokens):
                begin = await held.enter_async_context(remote.prefilled(self, sequence, named.hosts, trace))
            try:
                seq = await named.held.enter_async_context(verbs.adopted(self._edge, sequence))
            except TercetError as error:  # the request was aborted in the meantime, or its lease has ended
                prefill_here(self.name, request.request_id, error, trace)
                return
        if seq is None or request.sampling_params is None:
            return
        sent = trace.filled()
        if sent is not None:
            self._set_cached(request, sent.cached)
        given = request.sampling_params.extra_args or {}
        theirs = given.get("kv_transfer_params")
        theirs = theirs if isinstance(theirs, dict) else {}  # with vllm_xargs it may be text
        ours = TercetParams(self._edge.description.token, seq=seq).to_kv_transfer_params()
        # The core finds the lease by these parameters, as it does for a request of the verbs.
        request.sampling_params = copy(request.sampling_params)  # sequences of one request may share them
        request.sampling_params.extra_args = {**given, "kv_transfer_params": {**theirs, **ours}}
        trace.events.append(TraceEvent("start_generate", self.name, begin=begin, end=sequence.num_tokens))
