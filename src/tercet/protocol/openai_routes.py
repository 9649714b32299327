"""Routes of vLLM's server that cost something: one table for router and endpoint picker, by decoded path."""

from __future__ import annotations

from urllib.parse import unquote

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GENERATING = frozenset(
    {COMPLETIONS, CHAT, RESPONSES, "/v1/chat/completions/batch", "/v1/messages", "/v1/systemone",
     "/inference/v1/generate", "/cohere/v2/chat", "/generative_scoring", "/invocations"}
)  # fmt: skip
"""Those that generate: an engine computes, and the request takes a place of the fleet's."""
POOLING = frozenset(
    {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
     "/v2/rerank"}
)  # fmt: skip
"""Those of pooling models, whose servers take no part in the verbs."""
PREFILLED_BELOW = "/v1/"
"""Engines have the prompts of routes below it prefilled elsewhere if they are asked to."""


def path_of(target: str) -> str:
    """The path of a request's target as servers compare it with their routes: decoded, and without a query."""
    return unquote(target.partition("?")[0].partition("#")[0])
