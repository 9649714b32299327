"""URLs of servers, as people give them."""

from __future__ import annotations

from urllib.parse import urlsplit

from tercet.protocol import BadRequest


def require_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Raises :class:`~tercet.protocol.BadRequest` for text that is not an http or https URL with a host."""
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is not a number
        is_url = False
    if not is_url:
        raise BadRequest(f"{name}: {given!r} is not a URL such as {example}", name)


def require_engine_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """As :func:`require_url`, and none with a password: an engine's URL is shown in logs, metrics and traces."""
    require_url(given, name, example)
    if "@" in urlsplit(given).netloc:
        raise BadRequest(f"{name}: engines' URLs have no user or password; engines ask for the secret", name)
