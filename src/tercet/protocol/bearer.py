"""Who may call: keys that callers show as ``Authorization: Bearer KEY``."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from tercet.protocol.errors import Unauthorized


class BearerKeys:
    """The keys of which a caller must show one; without any, everybody may call. They are never told.

    Space around a key, such as the end of the line of a file, does not count.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key.strip()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def require(self, authorization: str | None, refusal: str) -> None:
        """Raise :class:`~tercet.protocol.Unauthorized` with the words of ``refusal`` unless a key is shown."""
        scheme, _, shown = (authorization or "").partition(" ")
        # Hashes have one length, so that the time of a comparison tells nothing about a key.
        fits = [secrets.compare_digest(_digest(shown), digest) for digest in self._digests]
        if fits and (scheme.lower() != "bearer" or not any(fits)):
            raise Unauthorized(refusal, "authorization")


def bearer(key: str) -> dict[str, str]:
    """The header that shows ``key``; none for an empty one."""
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode(errors="surrogateescape")).digest()
