"""The headers of an engine's own OpenAI API that name engines to prefill, or report a prefill that is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tercet.protocol import TercetError
from tercet.protocol.access import BearerKeys
from tercet.protocol.errors import error_body
from tercet.protocol.headers import PREFILLED_BELOW, PREFILLED_HEADER, PREFILLER_HEADER
from tercet.protocol.hosts import AllowedPrefillers
from tercet.protocol.trace import VerbTrace
from tercet.wire.serving.answers import TracingSend, require_trace_reader, wants_trace

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

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


named_prefillers: ContextVar[NamedPrefillers | None] = ContextVar("tercet_prefillers", default=None)
reported_prefill: ContextVar[Prefilled | None] = ContextVar("tercet_prefilled", default=None)


class PrefillerHeader:
    """An ASGI layer before an engine's own API, for the header that names engines to prefill.

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
        headers = dict[str, str]()
        if scope["type"] == "http" and scope["path"].startswith(PREFILLED_BELOW):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        said = headers.get(PREFILLER_HEADER) if allowed else None
        if said is None:
            lease, _, cached = headers.get(PREFILLED_HEADER, "").partition(" ")
            token = reported_prefill.set(Prefilled(lease, int(cached)) if _COUNT.fullmatch(cached) else None)
            try:
                await self._app(scope, receive, send)
            finally:
                reported_prefill.reset(token)
            return
        try:
            hosts, traced = allowed.named(said), wants_trace(headers)
            if traced:
                self._require_operator(scope)
        except TercetError as error:
            body = error_body(scope["path"], error)
            kind, length = (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": error.status, "headers": [kind, length]})
            await send({"type": "http.response.body", "body": body})
            return
        async with AsyncExitStack() as held:
            named = NamedPrefillers(hosts, held)
            token = named_prefillers.set(named)
            try:
                await self._app(scope, receive, TracingSend(send, named.traces) if traced else send)
            finally:
                named_prefillers.reset(token)
