"""Checks of server URLs that people give."""

from __future__ import annotations

from urllib.parse import urlsplit

from tercet.protocol import BadRequest


def require_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if ``given`` is not an http or https URL with a host."""
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is not a number
        is_url = False
    if not is_url:
        raise BadRequest(f"{name}: {given!r} is not a URL such as {example}", name)


def require_engine_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Check as :func:`require_url` does, and refuse a user or password: logs and metrics show an engine's URL."""
    require_url(given, name, example)
    if "@" in urlsplit(given).netloc:
        raise BadRequest(
            f"{name}: must not have a user or password, which logs would show; engines check TERCET_SECRET", name
        )
