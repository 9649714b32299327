"""Streams that vLLM makes of its own chat streams (Anthropic's API): an error in the one is an error in the other.

Relies on ``AnthropicServingMessages`` making its events of what its ``chat_completion_stream_generator`` yields, and on
``message_stream_converter`` saying ``error`` for an item that is no ``data:``, whatever that is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

from tercet.protocol.sse import object_of
from tercet.vllm_plugin.frontend.request_context import current

ERROR_ITEM = 'data: {"error"'
# Its converter takes this for no chunk, and ends with an error: what that says is put there by ``ErrorSend``.
NO_CHUNK = "error"


def tell_errors_of(serving: Any) -> None:
    """Have the serving object's streams end with the error of the chat stream, instead of failing to convert it."""
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
