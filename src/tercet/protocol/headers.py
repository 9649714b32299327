"""The HTTP headers that Tercet reads or sends, each declared once, and the paths of vLLM's server by their kind."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

PROGRAM_HEADER = "x-tercet-program"
TRACE_HEADER = "x-tercet-trace"
BEHIND_HEADER = "x-tercet-behind"
INCARNATION_HEADER = "x-tercet-incarnation"
SESSION_HEADER = "x-session-token"
# Session headers of Dynamo's and vLLM's clients; the first one in a request counts, after SESSION_HEADER.
OTHER_SESSION_HEADERS = ("x-dynamo-session-id", "x-session-id")
# Session headers of coding agents: Claude Code, OpenCode, and Codex in two forms.
AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
# Id of the Claude Code subagent that sends the request. Its reasoning is a session, separate from that of the run.
SUBAGENT_HEADER = "x-claude-code-agent-id"
# Value `true` on the last request of a session.
SESSION_FINAL_HEADER = "x-dynamo-session-final"
REQUEST_ID_HEADER = "x-request-id"
PREFILLER_HEADER = "x-prefiller-host-port"
PREFILLED_HEADER = "x-tercet-prefilled"
# With these headers a client could choose the engine itself. The deciding server replaces them.
CONTROL_HEADERS = (
    "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint-subset",
    PREFILLER_HEADER, PREFILLED_HEADER, "x-prefiller-url", "x-encoder-hosts-ports", "x-data-parallel-host-port",
)  # fmt: skip
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
"""Routes whose body may be a form with an audio file."""
FILES, BATCHES = "/v1/files", "/v1/batches"
"""Routes of batches: :data:`FILES` takes a form with the file; the bodies of all other routes are JSON."""
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


class Header(NamedTuple):
    """A header, the messages that carry it, and its meaning."""

    name: str
    on: str
    meaning: str


HEADERS = (
    Header(PROGRAM_HEADER, "requests to a router", "The program that serves this request."),
    Header(
        TRACE_HEADER,
        "requests to a router, an engine or a sidecar",
        "`true` or `1`: add to the answer what each engine did for it, under `tercet`; in a stream as the event before "
        "`[DONE]`. `false` or `0`: do not. For administrators, or with `--client-traces`; else 403.",
    ),
    Header(
        SESSION_HEADER,
        "requests to a router",
        "The session, for `--sessions` and `session-affinity-scorer`, whose parameter `header` can name another one.",
    ),
    *(
        Header(name, "requests to a router", f"The same; used if a request has no `{SESSION_HEADER}`.")
        for name in OTHER_SESSION_HEADERS
    ),
    Header(SUBAGENT_HEADER, "requests to a router", "The same, from a subagent of Claude Code; for `--sessions` only."),
    *(
        Header(name, "requests to a router", "The same, from a coding agent; for `--sessions` only.")
        for name in AGENT_HEADERS
    ),
    Header(
        SESSION_FINAL_HEADER,
        "requests to a router",
        "`true`: the session ends with this request; with `--sessions` the router forgets it.",
    ),
    Header(
        REQUEST_ID_HEADER,
        "requests to a router, calls to an engine",
        "The id of the request, as in vLLM, in its answer and in each log line about it. Logs and traces have an id of "
        "over 128 characters as its beginning and a digest; so has the answer if it is over 8,192.",
    ),
    Header(
        "authorization",
        "requests to a router or an engine",
        "`Bearer KEY`: the API key of either, the admin key on `/tercet/v1` of a router, or the fleet's secret "
        "on calls to an engine. `Tercet ...`: a member's proof, for this call, that it knows the secret.",
    ),
    Header(
        "www-authenticate",
        "answers of an engine or a sidecar",
        '`Tercet challenge="..."`: with 401, the challenge that a caller signs its calls with.',
    ),
    Header(
        PREFILLER_HEADER,
        "requests to an engine or a sidecar",
        "Engines that may prefill the prompt (`HOST:PORT`), in order; all must be in the server's `prefill-hosts`.",
    ),
    Header(
        PREFILLED_HEADER,
        "requests of a sidecar to its engine",
        "`LEASE CACHED`: KV of the prompt arrived under this lease, from an engine that had CACHED tokens of it in "
        "its cache; the answer's `cached_tokens` reports that. A lease that the engine does not hold is ignored.",
    ),
    Header(
        BEHIND_HEADER,
        "answers of a router",
        "Processes of the fleet that have not applied a change within 30 s, and the reasons.",
    ),
    Header("retry-after", "answers of a router", "Seconds after which a retry may succeed (429 and 503)."),
    Header(
        INCARNATION_HEADER,
        "calls to an engine",
        "The engine's incarnation for which the call is meant; another incarnation refuses it (409).",
    ),
)


def path_of(target: str) -> str:
    """Return the path of a request target in the form that servers match: decoded, and without the query."""
    return unquote(target.partition("?")[0].partition("#")[0])


def is_for_clients(path: str) -> bool:
    """True if a decoded path is one of :data:`CLIENTS`, or that of one stored answer.

    Paths are compared as they are. No server here merges slashes or resolves dots, so another spelling of a route is
    not that route.
    """
    return path in CLIENTS or _STORED_ANSWER.fullmatch(path) is not None
