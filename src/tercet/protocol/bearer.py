"""Keys that callers send as ``Authorization: Bearer KEY``: one rule for empty keys, and one check of the header."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from tercet.protocol.errors import BadRequest, Unauthorized


class BearerKeys:
    """A set of keys; a caller must send one of them. Without keys, every caller is accepted. Keys are never printed.

    The check ignores space around a configured key, such as the line break at the end of a file. ``always``: a key is
    required even if the set is empty; every caller is then refused, for example after a key file was emptied.
    """

    def __init__(self, keys: Iterable[str], always: bool = False) -> None:
        self._always = always
        self.replace(keys)

    def __bool__(self) -> bool:
        return self._always or bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace all keys by ``keys``."""
        self._digests = [_digest(key.strip()) for key in keys if key.strip()]

    def shares_with(self, other: BearerKeys) -> bool:
        """Return True if both sets have a key in common."""
        return not set(self._digests).isdisjoint(other._digests)

    def require(self, authorization: Sequence[str], refusal: str) -> None:
        """Raise :class:`~tercet.protocol.Unauthorized` with the text ``refusal`` unless the caller sent a key.

        ``authorization`` are the values of all headers of that name. The rule is that of vLLM, so all routes accept the
        same headers: the scheme in any case, one space, and the key as it is. Two such headers are refused: servers and
        proxies disagree on which one counts.
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
        """Return True if the value of a header contains one of the keys."""
        scheme, _, shown = authorization.partition(" ")
        # All digests have the same length, so the time of a comparison reveals nothing about a key.
        fits = [secrets.compare_digest(_digest(shown), digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def bearer(key: str) -> dict[str, str]:
    """Return the header that carries ``key``, or no header if ``key`` is empty."""
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def key_of(text: str, name: str) -> str:
    """Return the key in ``text`` without surrounding space, such as a line break; empty if ``text`` is empty.

    Raise :class:`~tercet.protocol.BadRequest` if ``text`` is blank but not empty, for example the line of an empty
    file: a key was intended, and without a key all callers would be accepted. Raise it also for a key that a header
    cannot carry. ``name`` is the setting's name.
    """
    key = text.strip()
    if text and not key:
        raise BadRequest(f"{name}: the key is blank; give a key, or leave {name} out", name)
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in key):
        raise BadRequest(f"{name}: has a control character; give a key of one line without control characters", name)
    if not key.isascii():
        raise BadRequest(f"{name}: has a character that is not ASCII, which a header cannot carry; use ASCII", name)
    return key


def given_key(text: str | None, name: str) -> str:
    """Return :func:`key_of` a flag's value, and an empty text without the flag (None).

    Raise :class:`~tercet.protocol.BadRequest` for an empty value, too: a key was intended.
    """
    return "" if text is None else key_of(text or " ", name)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
