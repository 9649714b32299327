"""The name of a request's session."""

from __future__ import annotations

from tercet.protocol import Request
from tercet.protocol.headers import AGENT_HEADERS, OTHER_SESSION_HEADERS, SESSION_HEADER

HEADERS = (SESSION_HEADER, *OTHER_SESSION_HEADERS, *AGENT_HEADERS)


def session_named(request: Request | None) -> str | None:
    """The session of a request, from its headers or its body; None without one.

    The field ``user`` names no session: one user has many.
    """
    if request is None:
        return None
    headers = request.headers
    return next((headers[name] for name in HEADERS if headers.get(name)), None) or request.session or None
