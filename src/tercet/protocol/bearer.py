"""Keys that callers show as ``Authorization: Bearer KEY``: one rule for empty keys, one check of the header."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from tercet.protocol.errors import BadRequest, Unauthorized


class BearerKeys:
    """The keys of which a caller must show one; without keys, every caller is accepted. Keys are never printed.

    The check ignores space around a configured key, such as the line break at the end of a file. ``always``: a key is
    required even while there are no keys, and then every caller is refused, as with a key file that was emptied.
    """

    def __init__(self, keys: Iterable[str], always: bool = False) -> None:
        self._always = always
        self.replace(keys)

    def __bool__(self) -> bool:
        return self._always or bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace all keys by these."""
        self._digests = [_digest(key.strip()) for key in keys if key.strip()]

    def shares_with(self, other: BearerKeys) -> bool:
        """Return whether both have a key in common."""
        return not set(self._digests).isdisjoint(other._digests)

    def require(self, authorization: Sequence[str], refusal: str) -> None:
        """Raise :class:`~tercet.protocol.Unauthorized` with the text ``refusal`` unless a key is shown.

        ``authorization`` are the values of all headers of that name. The rule is that of vLLM, so that a header that
        one route accepts is accepted by all: the scheme in any case, one space, and the key as it is. Two headers are
        refused: servers and proxies disagree on which one counts.
        """
        if not self:
            return
        if len(authorization) > 1:
            raise Unauthorized(
                f"{refusal}; the request has {len(authorization)} Authorization headers", "authorization"
            )
        if not self.fits("".join(authorization)):
            raise Unauthorized(refusal, "authorization")

    def fits(self, authorization: str) -> bool:
        """Return whether the value of a header shows one of the keys."""
        scheme, _, shown = authorization.partition(" ")
        # All digests have the same length, so the time of a comparison reveals nothing about a key.
        fits = [secrets.compare_digest(_digest(shown), digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def bearer(key: str) -> dict[str, str]:
    """Return the header that shows ``key``; no header for an empty key."""
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def key_of(text: str, name: str) -> str:
    """Return the key in ``text`` without the space around it, such as a line break; empty if ``text`` is empty.

    Raises :class:`~tercet.protocol.BadRequest` if ``text`` is blank but not empty, as the line of an empty file is: a
    key was intended, and without one all callers would be accepted. Also raises it for a key that no header can carry.
    ``name`` is the setting's name.
    """
    key = text.strip()
    if text and not key:
        raise BadRequest(f"{name}: the key is blank; give a key, or leave {name} out", name)
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in key):
        raise BadRequest(f"{name}: a key is on one line, without control characters", name)
    return key


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
