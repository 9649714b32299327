"""API keys: who has to show one, and whether what was shown is one."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from tercet.protocol import Unauthorized

# As on a vLLM server, for probes and for those who scrape metrics; they tell nothing of what clients send.
OPEN = frozenset({"/health", "/ping", "/load", "/version", "/metrics", "/metrics/"})


def require_key(keys: Sequence[str], path: str, authorization: str) -> None:
    """Raise :class:`~tercet.protocol.Unauthorized` unless ``authorization`` has one of ``keys`` or needs none."""
    if not keys or path in OPEN:
        return
    scheme, _, shown = authorization.partition(" ")
    # Hashes have one length, so that the time of a comparison tells nothing about a key.
    fits = [secrets.compare_digest(_digest(shown), _digest(key)) for key in keys]
    if scheme.lower() != "bearer" or not any(fits):
        raise Unauthorized("this front door asks for its API key: Authorization: Bearer KEY", "authorization")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
