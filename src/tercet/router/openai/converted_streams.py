"""Errors of chat streams, kept for the streams that vLLM converts from them (Anthropic's API).

Relies on ``AnthropicServingMessages`` making its events from the chunks of ``chat_completion_stream_generator_raw``;
an ``ErrorResponse`` among them ends the stream with an error. Up to vLLM 0.32, it makes them from the text of
``chat_completion_stream_generator``, and ``message_stream_converter`` yields ``error`` for text that does not begin
with ``data:``.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from tercet.protocol.sse import object_of
from tercet.vllm_plugin.differences import CONVERTED_AS_TEXT
from tercet.wire.serving.server_access import current

ERROR_ITEM = 'data: {"error"'
# vLLM's converter cannot read this, and ends with an error; ``ErrorSend`` inserts the error's text.
NO_CHUNK = "error"


def keeping_errors(serving: Any) -> Any:
    """Return a copy of the serving object whose streams end with the chat stream's error, its status and message."""
    keeping = copy.copy(serving)
    if CONVERTED_AS_TEXT.is_here:
        keeping.chat_completion_stream_generator = _of_texts(keeping.chat_completion_stream_generator)
    else:
        keeping.chat_completion_stream_generator_raw = _of_chunks(keeping.chat_completion_stream_generator_raw)
    return keeping


def _of_chunks(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    async def keeping(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for chunk in generate(*args, **kwargs):
            if isinstance(chunk, ErrorResponse):
                current().stream_error = chunk.error.model_dump()
            yield chunk

    return keeping


def _of_texts(generate: Callable[..., AsyncGenerator[str, None]]) -> Callable[..., AsyncGenerator[str, None]]:
    async def keeping(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        async for item in generate(*args, **kwargs):
            if item.startswith(ERROR_ITEM):
                said = object_of(item.encode()).get("error")
                current().stream_error = cast("dict[str, Any]", said) if isinstance(said, dict) else None
                yield NO_CHUNK
                return
            yield item

    return keeping
