"""Which requests are plain streams, and where in vLLM's serving layer they are found.

Relies on ``completion_stream_generator`` of ``OpenAIServingCompletion`` and ``chat_completion_stream_generator`` of
``OpenAIServingChat`` being looked up on the instance for each request, with the request first, and on ``app.state``
naming the instances.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable
from typing import Any

from tercet.router.streaming.connection import current_connection
from tercet.router.streaming.stream import PlainStream

Generate = Callable[..., AsyncGenerator[str, None]]


def stream_directly(state: Any, args: argparse.Namespace, own_middleware: int = 1) -> bool:
    """Let plain streams of vLLM's serving objects in ``state`` go the short way; False if none may.

    Middleware of the user's (more than our ``own_middleware``) may look at what is sent, and keep-alive comments go by
    what vLLM's path sends: with either everything stays there.
    """
    if len(args.middleware) > own_middleware or args.sse_keep_alive_interval > 0 or args.enable_log_outputs:
        return False
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    if completion is not None:
        completion.completion_stream_generator = _watched(completion.completion_stream_generator, is_plain_completion)
    if chat is not None and chat.parser_cls is None:
        chat.chat_completion_stream_generator = _watched(chat.chat_completion_stream_generator, is_plain_chat)
    return True


def _watched(generate: Generate, is_plain: Callable[..., bool]) -> Generate:
    def generate_watched(request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        chunks = generate(request, *args, **kwargs)
        connection = current_connection()
        if connection is None or not is_plain(request, **kwargs):
            return chunks
        return PlainStream(connection).watching(chunks)

    return generate_watched


def is_plain_completion(request: Any, num_prompts: int = 1, **_: Any) -> bool:
    """Whether chunks of this completion differ in their text alone."""
    return (
        num_prompts == 1
        and _is_plain(request)
        and request.logprobs is None
        and not request.use_beam_search
        and request.prompt_embeds is None
    )


def is_plain_chat(request: Any, **_: Any) -> bool:
    """Whether chunks of this chat answer, parsed by nobody, differ in their text alone."""
    return _is_plain(request) and not (request.logprobs or request.tools or request.use_beam_search)


def _is_plain(request: Any) -> bool:
    options = request.stream_options
    return not (
        (request.n or 1) > 1
        or request.echo
        or request.prompt_logprobs is not None
        or request.return_token_ids
        or (options is not None and options.continuous_usage_stats)
    )
