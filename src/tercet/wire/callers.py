"""Who may call: keys that callers send, proofs by members of a fleet that they know its secret, and no web pages.

A key is sent as ``Authorization: Bearer KEY``: one rule for empty keys, and one check of the header.

A member proves that it knows the secret without sending it. The called server answers 401 with a challenge, as in
HTTP's Digest scheme. The caller derives a key from the secret, the challenge and its own random text, and signs each
call with it: method, path, body, number. A signed call is valid once, and only for the server that issued the
challenge. The server stores nothing for a challenge until a call uses it; from then on it stores the numbers of the
calls until the challenge expires.

A page of any origin can make a browser send requests to any address that the browser reaches, loopback included. Some
are sent without a preflight request, and under a host name of the page's owner (DNS rebinding) they count as the page's
own origin. Such a request cannot leave out or choose ``Host``, ``Origin`` and ``Sec-Fetch-Site``, and cannot have the
type JSON without a preflight. So an operator's requests to change a fleet are accepted, and those of pages are refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from tercet.protocol.access import secrets_of
from tercet.protocol.errors import Forbidden, Unauthorized, UnsupportedMediaType
from tercet.protocol.names import ip_of

SCHEME = "Tercet"
CHALLENGE_HEADER = "www-authenticate"
# Lifetime of a challenge, in seconds; then the caller gets another one.
CHALLENGE_SECONDS = 3600.0
# Concurrent calls may overtake one another. A call is refused if its number is this far behind the latest one.
WINDOW = 65_536
_FIELDS = re.compile(r'(\w+)="([A-Za-z0-9_=-]*)"')
_RANDOM_BYTES = 16
_MAC_BYTES = 16
# A browser's values for requests of the same origin, and for addresses that its user typed.
_OWN_SITES = frozenset({"same-origin", "none"})
# Types that pages may send to other origins without a preflight request.
_UNASKED = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
# A proxy adds one of these headers, or one that begins with the prefix, to requests that it forwards.
_OF_PROXIES = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
_PROXY_PREFIX = "x-forwarded"


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


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


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


# ---- requests of this machine, and of web pages ----------------------------------------------------------------------


class ShownHeaders:
    """The headers of one request by name; each may occur several times."""

    def __init__(self, headers: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in headers:
            self._values.setdefault(name.lower(), []).append(value)

    @classmethod
    def of_asgi(cls, headers: Iterable[tuple[bytes, bytes]]) -> ShownHeaders:
        return cls((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)

    def all(self, name: str) -> Sequence[str]:
        """Return the values of the header with this lower-case name."""
        return self._values.get(name, ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


def require_no_page(headers: ShownHeaders) -> None:
    """Raise :class:`~tercet.protocol.errors.Forbidden` for a request that a page of another origin caused."""
    sites = headers.all("sec-fetch-site")
    if any(site.strip().lower() not in _OWN_SITES for site in sites):
        raise Forbidden(
            f"sec-fetch-site: a web page of another origin sent this request ({sites[0]:.40})", "sec-fetch-site"
        )
    origins, hosts = headers.all("origin"), headers.all("host")
    if origins and (len(origins) > 1 or len(hosts) != 1 or not _is_same(origins[0], hosts[0])):
        raise Forbidden(f"origin: a web page of another origin sent this request ({origins[0]:.80})", "origin")


def require_this_machine(headers: ShownHeaders, peer: str | None, remedy: str = "") -> None:
    """Raise :class:`~tercet.protocol.errors.Forbidden` unless a process of this machine makes the request itself.

    This one check decides what is open to this machine where no key is required. ``peer`` is the caller's address; None
    for a socket file. Refused are other machines, web pages, and requests that a proxy forwards, for their sender is
    not known. The host must be a loopback name: the owner of a web page can make another name lead to this machine (DNS
    rebinding). ``remedy`` ends the errors about callers.
    """
    _require_direct(headers, peer, remedy)
    _require_local_host(headers)


def require_own_call(headers: ShownHeaders, peer: str | None) -> None:
    """Raise :class:`~tercet.protocol.TercetError` unless a process of this machine makes this call of a verb itself.

    As :func:`require_this_machine`, but names are not checked at a socket file, to which no web page connects. Types of
    bodies that a page can send unasked are refused, too.
    """
    _require_direct(headers, peer, "")
    if peer is not None:
        _require_local_host(headers)
    for each in (value.partition(";")[0].strip().lower() for value in headers.all("content-type")):
        if each in _UNASKED:
            raise UnsupportedMediaType(f"content-type: must be application/json, is {each}", "content-type")


def _require_direct(headers: ShownHeaders, peer: str | None, remedy: str) -> None:
    require_no_page(headers)
    more = remedy and f"; {remedy}"
    if peer is not None and not is_loopback_address(peer):
        raise Forbidden(f"without a key, this route accepts requests from this machine only{more}")
    if proxy := next((name for name in headers if name in _OF_PROXIES or name.startswith(_PROXY_PREFIX)), ""):
        raise Forbidden(f"{proxy}: this server has no key, so it refuses requests through a proxy{more}", proxy)


def _require_local_host(headers: ShownHeaders) -> None:
    hosts = headers.all("host")
    name = _name_in(hosts[0]) if len(hosts) == 1 else ""
    if name.rstrip(".").lower() != "localhost" and not is_loopback_address(name):  # no DNS lookup: see rebinding above
        raise Forbidden("host: must be localhost, 127.0.0.1 or [::1], because this server has no key", "host")


def is_loopback_address(text: str) -> bool:
    """True if an address, which may have a zone, reaches this machine only."""
    address = ip_of(text.partition("%")[0])
    return address is not None and address.is_loopback


def _name_in(host: str) -> str:
    """Return the name in a Host header, without its port; empty if the header is not valid."""
    try:
        parts = urlsplit(f"//{host.strip()}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host.strip() and "@" not in parts.netloc else ""


def _is_same(origin: str, host: str) -> bool:
    """True if an Origin header has the host that the request names."""
    scheme, _, place = origin.strip().lower().partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme)
    if default is None or not place:
        return False
    wanted = host.strip().lower()
    return place.removesuffix(default) == wanted.removesuffix(default)
