"""Routes of vLLM's server, by decoded path: those that need engine time, and those that clients may use."""

from __future__ import annotations

import re
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
TRANSCRIBING = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Routes whose body is a form with an audio file; the bodies of all other routes are JSON."""
MODELS = "/v1/models"
PROBES = frozenset({"/health", "/ping", "/live", "/load", "/version", "/metrics", "/metrics/"})
"""Routes for probes and monitoring. vLLM and a router serve them without a key."""
CLIENTS = GENERATING | POOLING | TRANSCRIBING | {
    MODELS, "/version", "/tokenize", "/detokenize", "/tokenizer_info", "/v1/messages/count_tokens",
    *(f"{path}/{step}" for path in (COMPLETIONS, CHAT, RESPONSES, "/v1/messages", "/cohere/v2/chat")
      for step in ("render", "derender")),
}  # fmt: skip
"""Routes for clients. Other routes of vLLM, such as ``/sleep`` or ``/v1/load_lora_adapter``, are for operators."""
_STORED_ANSWER = re.compile(r"/v1/responses/[\w-]{1,256}(/cancel)?", re.ASCII)
PREFILLED_BELOW = "/v1/"
"""Prefix of routes on which engines can let other engines prefill a prompt, if the request asks for it."""


def path_of(target: str) -> str:
    """Return the path of a request target in the form that servers match: decoded, and without the query."""
    return unquote(target.partition("?")[0].partition("#")[0])


def is_for_clients(path: str) -> bool:
    """True if a decoded path is one of :data:`CLIENTS`, or that of one stored answer.

    Paths are compared as they are. No server here merges slashes or resolves dots, so another spelling of a route is
    not that route.
    """
    return path in CLIENTS or _STORED_ANSWER.fullmatch(path) is not None
