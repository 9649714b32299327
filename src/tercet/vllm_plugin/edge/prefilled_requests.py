"""Requests of an engine's own OpenAI API that name engines to prefill: they reach the core with their KV.

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

from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.protocol import BadRequest, Request, Reservation, TercetError
from tercet.protocol.access import BearerKeys
from tercet.protocol.errors import error_body
from tercet.protocol.headers import PREFILLED_BELOW, PREFILLED_HEADER, PREFILLER_HEADER
from tercet.protocol.hosts import AllowedPrefillers
from tercet.protocol.names import sequence_id
from tercet.protocol.trace import TraceEvent, VerbTrace
from tercet.vllm_plugin.edge.verbs import EngineVerbs
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


_named: ContextVar[NamedPrefillers | None] = ContextVar("tercet_prefillers", default=None)
_told: ContextVar[Prefilled | None] = ContextVar("tercet_prefilled", default=None)


class PrefillerHeader:
    """An ASGI layer before vLLM's API, for the header that names engines to prefill.

    It reads the header, refuses engines that are not allowed, and adds traces to answers. Without ``allowed`` engines,
    the header is ignored. A sidecar's header reports a prefill that is already done. ``require_operator`` raises for a
    caller who may not see traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed: Callable[[], AllowedPrefillers],
        require_operator: Callable[[Scope], None] = lambda scope: require_trace_reader(scope, BearerKeys(())),
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._require_operator = require_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, as an ASGI application."""
        allowed = self._allowed()
        headers = _headers(scope) if scope["type"] == "http" and scope["path"].startswith(PREFILLED_BELOW) else {}
        said = headers.get(PREFILLER_HEADER) if allowed else None
        if said is None:
            token = _told.set(_prefilled(headers.get(PREFILLED_HEADER, "")))
            try:
                await self._app(scope, receive, send)
            finally:
                _told.reset(token)
            return
        try:
            hosts, traced = allowed.named(said), wants_trace(headers)
            if traced:
                self._require_operator(scope)
        except TercetError as error:
            await _refuse(send, scope["path"], error)
            return
        async with AsyncExitStack() as held:
            named = NamedPrefillers(hosts, held)
            token = _named.set(named)
            try:
                await self._app(scope, receive, TracingSend(send, named.traces) if traced else send)
            finally:
                _named.reset(token)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _prefilled(said: str) -> Prefilled | None:
    """Return the content of a sidecar's header; None for an invalid one."""
    lease, _, cached = said.partition(" ")
    return Prefilled(lease, int(cached)) if _COUNT.fullmatch(cached) else None


async def _refuse(send: Send, path: str, error: TercetError) -> None:
    body = error_body(path, error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PrefilledRequests:
    """A layer between ``AsyncLLM`` and its core: requests whose HTTP request names prefill engines get their KV first.

    Without ``remote``, requests cannot name engines.
    """

    def __init__(self, client: AsyncLLM, verbs: EngineVerbs, remote: RemotePrefill | None) -> None:
        self._verbs = verbs
        self._remote = remote
        self._processor = client.output_processor
        core: Any = client.engine_core
        self._add: Callable[[EngineCoreRequest], Awaitable[None]] = core.add_request_async
        core.add_request_async = self.add_request

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._verbs.name

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        """Reserve blocks: see :class:`~tercet.wire.client.remote_prefill.Receiver`."""
        return self._verbs.reserved(request, end)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Get the request's KV from the named engines, if any, and then add the request to the core.

        This method replaces ``engine_core.add_request_async``.
        """
        named, told = _named.get(), _told.get()
        if told is not None and self._verbs.leases.has(told.lease):
            self._tell_cached(request, told.cached)
        if named is not None and self._remote is not None:
            try:
                await self._prefill(request, named, self._remote)
            except BaseException:
                # AsyncLLM has already registered the request, and does not undo that for exceptions from here.
                self._processor.abort_requests((request.request_id,), internal=True)
                raise
            if request.request_id not in self._processor.request_states:
                return  # the client has left in the meantime
        await self._add(request)

    def _tell_cached(self, request: EngineCoreRequest, cached: int) -> None:
        """Set the number of cached tokens in the answer."""
        state = self._processor.request_states.get(request.request_id)
        if state is not None:
            state.remote_prefill_cached_tokens = min(cached, len(request.prompt_token_ids or ()))

    async def _prefill(self, request: EngineCoreRequest, named: NamedPrefillers, remote: RemotePrefill) -> None:
        trace = VerbTrace()
        named.traces.append(trace)
        reason = _only_here(request)
        if reason:
            prefill_here(self.name, request.request_id, BadRequest(f"{reason} cannot be prefilled elsewhere"), trace)
            return
        sequence = Request(
            seq_id=sequence_id(request.request_id),
            prompt=tuple(request.prompt_token_ids or ()),
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        async with AsyncExitStack() as held:
            with self._verbs.meter.computed_elsewhere(sequence.num_tokens):
                begin = await held.enter_async_context(remote.prefilled(self, sequence, named.hosts, trace))
            try:
                params = await named.held.enter_async_context(self._verbs.adopted(sequence))
            except TercetError as error:  # the request was aborted in the meantime, or its lease has ended
                prefill_here(self.name, request.request_id, error, trace)
                return
        if params is None or request.sampling_params is None:
            return
        sent = trace.filled()
        if sent is not None:
            self._tell_cached(request, sent.cached)
        given = request.sampling_params.extra_args or {}
        theirs = given.get("kv_transfer_params")
        theirs = theirs if isinstance(theirs, dict) else {}  # with vllm_xargs it may be text
        ours = params.to_kv_transfer_params()
        request.sampling_params = copy(request.sampling_params)  # sequences of one request may share them
        request.sampling_params.extra_args = {**given, "kv_transfer_params": {**theirs, **ours}}
        trace.events.append(TraceEvent("start_generate", self.name, begin=begin, end=sequence.num_tokens))


def _only_here(request: EngineCoreRequest) -> str:
    """Return why only this engine can compute the prompt's KV; empty if other engines can."""
    params = request.sampling_params
    reasons = {
        "pooling": params is None,
        "multi-modal input": bool(request.mm_features),
        "a prompt of embeddings": request.prompt_embeds is not None or not request.prompt_token_ids,
        "a prompt with a LoRA adapter": request.lora_request is not None,
        "streaming input": request.resumable,
        "a prompt with requested log probabilities": params is not None and params.prompt_logprobs is not None,
    }
    return next((what for what, holds in reasons.items() if holds), "")
