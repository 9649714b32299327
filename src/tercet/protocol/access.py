"""Who may call: keys that callers send, and proofs by members of a fleet that they know its secret.

A key is sent as ``Authorization: Bearer KEY``: one rule for empty keys, and one check of the header.

A member proves that it knows the secret without sending it. The called server answers 401 with a challenge, as in
HTTP's Digest scheme. The caller derives a key from the secret, the challenge and its own random text, and signs each
call with it: method, path, body, number. A signed call is valid once, and only for the server that issued the
challenge. The server stores nothing for a challenge until a call uses it; from then on it stores the numbers of the
calls until the challenge expires.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from tercet.protocol.errors import BadRequest, Unauthorized

SCHEME = "Tercet"
CHALLENGE_HEADER = "www-authenticate"
# Lifetime of a challenge, in seconds; then the caller gets another one.
CHALLENGE_SECONDS = 3600.0
# Concurrent calls may overtake one another. A call is refused if its number is this far behind the latest one.
WINDOW = 65_536
_FIELDS = re.compile(r'(\w+)="([A-Za-z0-9_=-]*)"')
_RANDOM_BYTES = 16
_MAC_BYTES = 16


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
        self._digests = [_digest(key.strip()) for key in keys if key.strip()]

    def shares_with(self, other: BearerKeys) -> bool:
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


def secrets_of(text: str) -> tuple[str, ...]:
    """Return the secrets in a setting, separated by spaces.

    The first makes proofs; two exist only during a rotation.
    """
    return tuple(text.split())


def digest_of(body: bytes | None) -> str:
    """Return the digest of a body, for a proof."""
    return hashlib.sha256(body or b"").hexdigest()


class Prover:
    """A caller's side of the exchange with one engine. Without a ``secret`` it adds no proofs."""

    def __init__(self, secret: str) -> None:
        self._secret = next(iter(secrets_of(secret)), "")
        self._challenge = self._own = ""
        self._key = b""
        self._number = 0

    def meets(self, headers: Sequence[str]) -> bool:
        """Return True if one of the challenges in :data:`CHALLENGE_HEADER` can be answered; then retry the call."""
        for value in headers:
            scheme, _, rest = value.partition(" ")
            challenge = dict(_FIELDS.findall(rest)).get("challenge", "")
            if self._secret and scheme == SCHEME and challenge and challenge != self._challenge:
                self._challenge, self._own, self._number = challenge, secrets.token_hex(_RANDOM_BYTES), 0
                self._key = _key(self._secret, challenge, self._own)
                return True
        return False

    def headers(self, method: str, path: str, digest: str) -> dict[str, str]:
        """Return the headers of a call; none before the first challenge. ``path`` is relative to ``/tercet/v1``."""
        if not self._challenge:
            return {}
        self._number += 1
        proof = _proof(self._key, method, path, self._number, digest)
        said = f'challenge="{self._challenge}", own="{self._own}", number="{self._number}"'
        return {"authorization": f'{SCHEME} {said}, body="{digest}", proof="{proof}"'}


class Callers:
    """The server's side of the exchange: it decides who may call. Callers may also send one of the ``keys`` itself."""

    def __init__(self, keys: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = [key.strip() for key in keys if key.strip()]
        self._bearer = BearerKeys(self._keys)
        self._clock = clock
        # New at each start: a challenge of an earlier start is not valid, since its used numbers are forgotten.
        self._own = secrets.token_bytes(32)
        self._seen: dict[tuple[str, str], _Numbers] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def challenge(self) -> str:
        """Return a value of :data:`CHALLENGE_HEADER` for a caller that is refused."""
        said = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(_RANDOM_BYTES)
        text = base64.urlsafe_b64encode(said + self._mac(said)).decode()
        return f'{SCHEME} challenge="{text}"'

    def require(self, authorization: Sequence[str], method: str, path: str, refusal: str) -> str | None:
        """Raise :class:`~tercet.protocol.Unauthorized` for a caller that is not a member.

        Return the digest that the body must have (:func:`require_digest`), or None if the caller sent a key or none is
        required.
        """
        # Two headers, or another scheme: the rules of keys decide, and refuse what does not fit them.
        if not self._keys or len(authorization) != 1 or not authorization[0].startswith(f"{SCHEME} "):
            self._bearer.require(authorization, refusal)
            return None
        shown = dict(_FIELDS.findall(authorization[0]))
        challenge, own, body, number = (shown.get(name, "") for name in ("challenge", "own", "body", "number"))
        ends = self._end_of(challenge)
        if ends is None or len(own) < _RANDOM_BYTES or not number.isdecimal() or len(number) > 15:
            raise Unauthorized(f"{refusal}; the challenge has expired; retry with the new one", "authorization")
        expected = (_proof(_key(key, challenge, own), method, path, int(number), body) for key in self._keys)
        # All secrets are tried, so that the time does not tell which one matched.
        fits = [hmac.compare_digest(shown.get("proof", ""), proof) for proof in expected]
        if not any(fits):
            raise Unauthorized(f"{refusal}; the proof does not match any secret of this server", "authorization")
        # The numbers of a challenge are kept from its first valid call on: other callers cannot fill this table.
        numbers = self._seen.get((challenge, own))
        if numbers is None:
            now = self._clock()
            self._seen = {key: each for key, each in self._seen.items() if each.ends > now}
            numbers = self._seen[challenge, own] = _Numbers(ends)
        if not numbers.take(int(number)):
            raise Unauthorized("this call has already been made, or arrived too late; sign it again", "authorization")
        return body

    def _end_of(self, challenge: str) -> float | None:
        """Return the time at which this process's ``challenge`` expires; None if it has expired or is not valid."""
        try:
            said = base64.urlsafe_b64decode(challenge)
        except ValueError:
            return None
        said, mac = said[:-_MAC_BYTES], said[-_MAC_BYTES:]
        if len(said) != 8 + _RANDOM_BYTES or not hmac.compare_digest(mac, self._mac(said)):
            return None
        ends = int.from_bytes(said[:8], "big") / 1000 + CHALLENGE_SECONDS
        return ends if ends > self._clock() else None

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._own, said, "sha256")[:_MAC_BYTES]


class _Numbers:
    """Numbers of the calls under one challenge, each accepted once; the challenge expires at ``ends``."""

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self._before = 0  # all numbers up to this one were used or are too old
        self._since: set[int] = set()

    def take(self, number: int) -> bool:
        """Return whether this number was not used before, and mark it as used."""
        if number <= self._before or number in self._since:
            return False
        self._since.add(number)
        while self._before + 1 in self._since:
            self._before += 1
            self._since.remove(self._before)
        # A caller that skips numbers must not make this set grow without a limit.
        if len(self._since) > WINDOW:
            self._before = min(self._since)
            self._since.remove(self._before)
        return True


def require_digest(body: bytes, digest: str | None) -> None:
    """Raise :class:`~tercet.protocol.Unauthorized` for a body that differs from the signed one."""
    if digest is not None and not hmac.compare_digest(digest_of(body), digest):
        raise Unauthorized("the body differs from the one that the caller signed", "authorization")


def _key(secret: str, challenge: str, own: str) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), f"tercet call {challenge} {own}".encode(), "sha256")


def _proof(key: bytes, method: str, path: str, number: int, digest: str) -> str:
    said = f"{method.upper()}\n{path}\n{number}\n{digest}"
    return hmac.new(key, said.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
