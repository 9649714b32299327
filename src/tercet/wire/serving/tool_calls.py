"""Detection of tool calls in the bytes of an answer: the client then returns with the tool's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from tercet.wire.serving.request_context import RequestContext

# Marks of tool calls in chat, Anthropic's messages and responses. In JSON, quotes within a text are escaped: text that
# a model generates cannot contain these marks.
MARKS = (b'"tool_calls":[{', b'"stop_reason":"tool_use"', b'"type":"function_call"')


class ToolCallsSend:
    """An ASGI ``send`` that passes an answer on, and records in its ``context`` that it calls a tool.

    Each event is in one message.
    """

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context

    async def __call__(self, message: Message) -> None:
        """Send a message, as ASGI's ``send``."""
        body = message.get("body", b"")
        if body and not self._context.calls_tool:
            self._context.calls_tool = any(mark in body for mark in MARKS)
        await self._send(message)
