"""The name of a request's session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tercet.protocol import Request
from tercet.protocol.client_names import kept_name, owned_name
from tercet.protocol.headers import AGENT_HEADERS, OTHER_SESSION_HEADERS, SESSION_HEADER, SUBAGENT_HEADER

HEADERS = (SESSION_HEADER, *OTHER_SESSION_HEADERS, SUBAGENT_HEADER, *AGENT_HEADERS)
# Fields of bodies, first those of vLLM's API; the first one in a body counts. A trajectory is one chain of reasoning of
# a run, and is therefore the session; if a client of Dynamo names no trajectory, its session id is used.
FIELDS = (
    ("session_id",),
    ("vllm_xargs", "session_id"),
    ("nvext", "agent_context", "trajectory_id"),
    ("nvext", "agent_context", "session_id"),
    ("nvext", "session_control", "session_id"),
    ("program_id",),
)


def session_named(request: Request | None) -> str | None:
    """Return the session of a request, from its headers or its body; None without one.

    A session belongs to the client that made it (:func:`~tercet.protocol.client_names.owned_name`). The field ``user``
    is not used: one user has many sessions.
    """
    if request is None:
        return None
    headers = request.headers
    named = next((headers[name] for name in HEADERS if headers.get(name)), None) or request.session
    return owned_name(named, headers) if named else None


def session_in_body(body: Mapping[str, Any]) -> str | None:
    """Return the session that a body names, in the form that is kept; None unless it is a string."""
    return next((kept_name(found) for path in FIELDS if (found := _text_at(body, path))), None)


def closes_session(body: Mapping[str, Any]) -> bool:
    """Return True if a body says that its session ends with this request, as clients of Dynamo 1.1 do."""
    return _text_at(body, ("nvext", "session_control", "action")) == "close"


def _text_at(body: Any, path: tuple[str, ...]) -> str | None:
    for name in path:
        if not isinstance(body, dict):
            return None
        body = cast("dict[str, Any]", body).get(name)
    return body if isinstance(body, str) else None
