"""Routes of vLLM's server that need engine time: one table for router and endpoint picker, by decoded path."""

from __future__ import annotations

from urllib.parse import unquote

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GENERATING = frozenset(
    {COMPLETIONS, CHAT, RESPONSES, "/v1/chat/completions/batch", "/v1/messages", "/v1/systemone",
     "/inference/v1/generate", "/cohere/v2/chat", "/generative_scoring", "/invocations"}
)  # fmt: skip
"""Routes that generate: an engine computes, and the request occupies a slot of the fleet."""
POOLING = frozenset(
    {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
     "/v2/rerank"}
)  # fmt: skip
"""Routes of pooling models, whose servers do not use the verbs."""
PREFILLED_BELOW = "/v1/"
"""Prefix of routes on which engines can let other engines prefill a prompt, if the request asks for it."""


def path_of(target: str) -> str:
    """Return the path of a request target in the form that servers match: decoded, and without the query."""
    return unquote(target.partition("?")[0].partition("#")[0])
