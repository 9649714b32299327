"""Bodies of requests: reading one whole, reading its JSON, and the message that the application receives again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import msgspec
from starlette.types import Message, Receive, Scope

from tercet.decisions.sessions import closes_session, session_in_body
from tercet.fleet.admission import ClientLeft
from tercet.fleet.bodies import HeldBody
from tercet.protocol.headers import SESSION_FINAL_HEADER
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.names import kept_name
from tercet.protocol.request_checks import announces_body, forms_of, labelled
from tercet.router.limits.body_items import require_few_items, require_readable, require_small_structures
from tercet.wire.serving.request_context import Asked, RequestContext, read_whole


class ReceivedBody:
    """A whole body that was read, which the application receives again."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.content = content
        self._content: bytes | None = content
        self._receive = receive
        self._next: asyncio.Future[Message] | None = None

    def replace(self, content: bytes) -> None:
        """Replace the content that the application receives."""
        self.content = self._content = content

    async def receive(self) -> Message:
        """Return the body, then later messages: ASGI's ``receive``."""
        if self._content is not None:
            content, self._content, self.content = self._content, None, b""  # vLLM has its own copy from now on
            return {"type": "http.request", "body": content, "more_body": False}
        return await (self._receive() if self._next is None else asyncio.shield(self._next))

    def left(self) -> asyncio.Future[Message]:
        """Return a future that is done once the client has closed its connection."""
        self._next = self._next or asyncio.ensure_future(self._receive())
        return self._next

    def close(self) -> None:
        """Stop waiting for the client."""
        if self._next is not None:
            self._next.cancel()


def nothing_from(receive: Receive) -> Receive:
    """Return an ASGI ``receive`` for a body that is ignored: an empty body, then messages that are not a body's."""
    began = False

    async def received() -> Message:
        nonlocal began
        if not began:
            began = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return received


def _again(first: Message, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` that first returns ``first``, a message that was received already."""
    left = [first]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received


async def receive_body(
    context: RequestContext, scope: Scope, receive: Receive, limit: int, kept: HeldBody
) -> ReceivedBody:
    """Decide what the body of a request is, read it, and return it; ``kept`` counts its bytes.

    The application gets only the header fields of that decision. Raises the errors of
    :func:`~tercet.protocol.request_checks.labelled`, :class:`~tercet.protocol.RequestTooLarge`,
    :class:`~tercet.protocol.Saturated` if all bodies together are too large, and :class:`ClientLeft` if the client
    leaves before the end of the body.
    """
    announced = context.headers.get("content-length", "")
    taker = "this router (--max-request-bytes)"
    if announces_body(scope["headers"]):
        _decide(context, scope)
    first = await receive()
    if first["type"] == "http.request" and first.get("more_body", False):
        async with kept.until_let_go():
            is_whole = await read_whole(_again(first, receive), announced, limit, taker, kept)
    else:  # a body in one message, the usual case
        is_whole = await read_whole(_again(first, receive), announced, limit, taker, kept)
    if not is_whole:
        raise ClientLeft
    if kept.content and not context.form:  # HTTP/2 need not announce a body
        _decide(context, scope)
    return ReceivedBody(kept.content, receive)


def _decide(context: RequestContext, scope: Scope) -> None:
    context.form, scope["headers"], _ = labelled(scope["headers"], forms_of(context.path))


async def read_body(context: RequestContext, body: ReceivedBody, most_items: int) -> None:
    """Read the fields of a JSON body into ``context``, and convert the body to UTF-8.

    Raises :class:`~tercet.protocol.BadRequest` for content that is not valid JSON, and for JSON with too many items.
    """
    content = in_utf8(body.content)
    if content is not body.content:
        body.replace(content)
    require_readable(content)
    found = read_json(content)
    if isinstance(found, (dict, list)):
        await require_few_items(context.path, content, found, most_items)
    if isinstance(found, dict):
        context.fields = cast("dict[str, Any]", found)
        await require_small_structures(content, context.fields)
        context.asked = asked_by(context.fields)
        if closes_session(context.fields):
            context.headers = {**context.headers, SESSION_FINAL_HEADER: "true"}


def asked_by(fields: dict[str, Any]) -> Asked:
    """Return the fields of a body that the router uses; skip a field of a wrong type, which vLLM refuses or ignores."""
    given = {name: fields[name] for name in _ASKED if name in fields}
    try:
        asked = msgspec.convert(given, Asked, strict=False)
    except msgspec.ValidationError:
        asked = msgspec.convert(dict(_valid(given)), Asked, strict=False)
    user = None if asked.user is None else kept_name(asked.user)
    session, parameters = session_in_body(fields), parameters_of(fields)
    if user is None and session is None and not parameters:
        return asked
    return msgspec.structs.replace(asked, user=user, session_name=session, parameters=parameters)


def _valid(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        with suppress(msgspec.ValidationError):
            msgspec.convert({name: value}, Asked, strict=False)
            yield name, value


def parameters_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a body from which vLLM derives sampling parameters of other names, by parameter."""
    if _DERIVING.isdisjoint(fields):
        return {}
    return {
        parameter: name
        for parameter, names in _DERIVED.items()
        if (name := next((name for name in names if _has_effect(fields, name)), None)) is not None
    }


def _has_effect(fields: Mapping[str, Any], path: str) -> bool:
    found: Any = fields
    for name in path.split("."):
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found is not None and found not in _WITHOUT_EFFECT.get(path, ())


_ASKED = tuple(name for name in Asked.__struct_fields__ if name not in ("session_name", "parameters"))
# Fields of the APIs, by the sampling parameter that vLLM derives from them; of several, the first one decides.
_DERIVED = {
    "structured_outputs": (
        "sampling_params.structured_outputs",
        "structured_outputs",
        "tool_choice",
        "response_format",
        "text.format",
        "output_config.format",
        "output_format",
        "parallel_tool_calls",
        "tools",
    ),
    "logprobs": ("sampling_params.logprobs", "logprobs", "top_logprobs", "include"),
    "prompt_logprobs": ("sampling_params.prompt_logprobs", "prompt_logprobs", "echo"),
    "max_tokens": ("sampling_params.max_tokens", "max_completion_tokens", "max_output_tokens"),
}
_DERIVING = frozenset(name.partition(".")[0] for names in _DERIVED.values() for name in names)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},), "text.format": ({"type": "text"},),
    "parallel_tool_calls": (True,), "tools": ([],), "echo": (False,), "logprobs": (False,),
}  # fmt: skip
