"""Checks of server URLs that people and other programs give."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from tercet.protocol import BadRequest
from tercet.protocol.names import shown

LONGEST_URL = 2048
_HOST = re.compile(r"[\w.-]+")


def require_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if ``given`` is not an http or https URL with a host."""
    if not _is_url(given):
        raise BadRequest(f"{name}: {shown(given)} is not a URL such as {example}", name)


def require_engine_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Check as :func:`require_url` does, and refuse what does not belong to an address.

    That is a user or password, since logs and metrics show an engine's URL, and a query or fragment, since paths of
    routes are appended to the URL.
    """
    require_url(given, name, example)
    if "@" in urlsplit(given).netloc:
        raise BadRequest(
            f"{name}: must not have a user or password, which logs would show; engines check TERCET_SECRET", name
        )
    if "?" in given or "#" in given:
        raise BadRequest(f"{name}: {shown(given)} must not have a query or fragment", name)


def _is_url(given: str) -> bool:
    # urlsplit removes line breaks and tabs instead of refusing them.
    if len(given) > LONGEST_URL or not given.isprintable() or " " in given or "\\" in given:
        return False
    try:
        parts = urlsplit(given)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or parts.port == 0 or not host:
            return False
        if "[" in parts.netloc:
            return bool(IPv6Address(host))
        return _HOST.fullmatch(host) is not None and bool(host.encode("idna"))  # it refuses parts of wrong length
    except ValueError:  # brackets that do not match, a port that is not a number, a host that is not a name
        return False
