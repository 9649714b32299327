"""Keys that callers show as ``Authorization: Bearer KEY``: one notion of an empty key, one check of a header."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from tercet.protocol.errors import BadRequest, Unauthorized


class BearerKeys:
    """The keys of which a caller must show one; without any, every caller is accepted. They are never shown.

    The check ignores space around a configured key, such as the line break at the end of a file. ``always``: a key is
    asked for even while there is none, and then nobody is accepted, as with a file of keys that has been emptied.
    """

    def __init__(self, keys: Iterable[str], always: bool = False) -> None:
        self._always = always
        self.replace(keys)

    def __bool__(self) -> bool:
        return self._always or bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these are the keys."""
        self._digests = [_digest(key.strip()) for key in keys if key.strip()]

    def shares_with(self, other: BearerKeys) -> bool:
        """Whether a key is one of both."""
        return not set(self._digests).isdisjoint(other._digests)

    def require(self, authorization: Sequence[str], refusal: str) -> None:
        """Raise :class:`~tercet.protocol.Unauthorized` with the text ``refusal`` unless a key is shown.

        ``authorization`` are the values of all headers of that name. The rule is vLLM's own, so that a header that one
        route accepts is accepted by all: the scheme in any case, one space, and the key as it is. Two headers are
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
        """Whether the value of a header shows one of the keys."""
        scheme, _, shown = authorization.partition(" ")
        # Hashes have one length, so that the time of a comparison tells nothing about a key.
        fits = [secrets.compare_digest(_digest(shown), digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def bearer(key: str) -> dict[str, str]:
    """The header that shows ``key``; none for an empty one."""
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def key_of(text: str, name: str) -> str:
    """The key in ``text`` without the space around it, such as the end of a file's line; empty if ``text`` is.

    Raises :class:`~tercet.protocol.BadRequest` if ``text`` is blank but not empty, as an empty file's line is: a key
    was wanted, and without one all callers would be accepted; and for one that no header can carry. ``name`` is the
    setting's.
    """
    key = text.strip()
    if text and not key:
        raise BadRequest(f"{name}: the key is blank; give a key, or leave {name} out", name)
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in key):
        raise BadRequest(f"{name}: a key is on one line, without control characters", name)
    return key


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
