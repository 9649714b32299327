"""Which requests are plain streams: those whose chunks differ in their text alone, and whose way in has no detours."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def may_be_shortened(args: argparse.Namespace, own_middleware: int = 1) -> bool:
    """Whether any request may go the short way under vLLM's options ``args``.

    Middleware of the user's (more than our ``own_middleware``) may look at what passes; the other options change what
    vLLM's own way sends or counts.
    """
    return not (
        len(args.middleware) > own_middleware
        or args.sse_keep_alive_interval > 0
        or args.enable_log_outputs
        or args.enable_request_id_headers
        or args.enable_server_load_tracking
    )


def is_plain_call(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether a request's headers ask for nothing that other layers answer: no browser's origin, no trace."""
    return (
        scope["http_version"] == "1.1"
        and headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        and "origin" not in headers
        and "x-tercet-trace" not in headers
    )


def is_plain_completion(request: Any) -> bool:
    """Whether chunks of this completion differ in their text alone."""
    return (
        _is_one_prompt(request.prompt)
        and _is_plain(request)
        and request.logprobs is None
        and not request.use_beam_search
        and request.prompt_embeds is None
    )


def is_plain_chat(request: Any) -> bool:
    """Whether chunks of this chat answer, parsed by nobody, differ in their text alone."""
    return _is_plain(request) and not (request.logprobs or request.tools or request.use_beam_search)


def _is_plain(request: Any) -> bool:
    options = request.stream_options
    return bool(request.stream) and not (
        (request.n or 1) > 1
        or request.echo
        or request.prompt_logprobs is not None
        or request.return_token_ids
        or (options is not None and options.continuous_usage_stats)
    )


def _is_one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))
