"""Streams that vLLM converts from its chat streams (Anthropic's API): passes errors of the chat stream on.

Relies on ``AnthropicServingMessages`` making its events from the items of its ``chat_completion_stream_generator``, and
on ``message_stream_converter`` yielding ``error`` for an item that does not begin with ``data:``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

from tercet.protocol.sse import object_of
from tercet.wire.serving.request_context import current

ERROR_ITEM = 'data: {"error"'
# Its converter cannot read this, and ends with an error; ``ErrorSend`` inserts the error's text.
NO_CHUNK = "error"


def tell_errors_of(serving: Any) -> None:
    """Make the serving object's streams end with the error of the chat stream, instead of failing to convert it."""
    generate = serving.chat_completion_stream_generator

    async def telling(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        async for item in generate(*args, **kwargs):
            if item.startswith(ERROR_ITEM):
                said = object_of(item.encode()).get("error")
                current().stream_error = cast("dict[str, Any]", said) if isinstance(said, dict) else None
                yield NO_CHUNK
                return
            yield item

    serving.chat_completion_stream_generator = telling
