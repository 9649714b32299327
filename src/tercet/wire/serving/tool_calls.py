"""Whether an answer calls a tool, from its bytes: the client then comes back with the tool's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from tercet.wire.serving.request_context import RequestContext

# Of chat, Anthropic's messages and responses. In JSON, quotes within a text are escaped: what a model writes cannot
# contain these.
MARKS = (b'"tool_calls":[{', b'"stop_reason":"tool_use"', b'"type":"function_call"')


class ToolCallsSend:
    """Passes an answer on, and notes in its ``context`` that it calls a tool. An event comes in one message."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        body = message.get("body", b"")
        if body and not self._context.calls_tool:
            self._context.calls_tool = any(mark in body for mark in MARKS)
        await self._send(message)
