"""Names that people, clients and other programs give: one rule for each kind of name, applied where it enters.

Names stand in URLs, headers, metrics, logs, command lines and in the state that routers share. So a name of an engine,
an adapter or a fleet that cannot be used in one of these places is refused where it enters, and not found there later:
each check raises :class:`~tercet.protocol.errors.BadRequest` that names the field.

Names that clients choose (ids of requests, sessions, users, salts) are not refused but bounded: a client decides
neither how many bytes a server keeps nor how many it logs or copies with each token. A longer name is replaced by its
beginning and a digest, so two long names that differ stay different.

Hosts and ports are as URLs have them; :class:`AllowedPrefillers` lists the engines that a request may name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tercet.protocol.errors import BadRequest
from tercet.protocol.headers import PREFILLER_HEADER

Role = Literal["prefill", "decode", "both"]
"""What an engine is picked for."""
STORE = "store"
MemberRole = Literal["prefill", "decode", "both", "store"]
"""The role of a member of a fleet; a store is never picked."""
LONGEST_NAME = 256
LONGEST_TEXT = 4096
LONGEST_UID = 256
_SHOWN = 60
_ENGINE = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:\[\]-]*")
_ADAPTER = re.compile(r"\w[\w.:@+~-]*(/\w[\w.:@+~-]*)*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
LONGEST_KEPT = 128
"""Maximum characters of a name that is kept as its client wrote it."""
# Characters of a digest in a shortened name, and of the digest that stands for a client.
_DIGEST, _OWNER = 32, 16
# Maximum characters of a sequence's id: engines accept 256, and later attempts add a few characters.
LONGEST_ID = 200


def require_engine_name(name: str, field: str = "name") -> None:
    """Check the name of an engine: letters and digits of ASCII, and ``. _ : - [ ]``, as in ``10.0.0.7:8001``."""
    _require(_ENGINE, name, field, "the name of an engine", "ASCII letters, digits and . _ : - [ ]", LONGEST_NAME)


def require_adapter_name(name: str, field: str = "name") -> None:
    """Check the name of a LoRA adapter, which requests give as their model, such as ``sql`` or ``team/sql:v2``."""
    _require(_ADAPTER, name, field, "the name of an adapter", "letters, digits and . _ : @ + ~ - /", LONGEST_NAME)


def require_fleet_name(name: str, field: str) -> None:
    """Check the name of a fleet on Ray; the names of its actors begin with it."""
    _require(_GROUP, name, field, "the name of a fleet", "ASCII letters, digits and . _ -", LONGEST_NAME)


def require_uid(uid: str, longest: int = LONGEST_UID) -> None:
    """Check the id of one start of an engine, which has at most ``longest`` characters."""
    _require(_UID, uid, "uid", "the id of a start", "ASCII letters, digits and . _ : -", longest)


def require_text(text: str, field: str, longest: int = LONGEST_TEXT) -> None:
    """Check a text that is shown in one line, such as a program's name or a path: no control characters, not empty."""
    if not text or len(text) > longest or not text.isprintable() or text != text.strip():
        raise BadRequest(
            f"{field}: must be 1 to {longest} printable characters without space at its ends, is {shown(text)}", field
        )


def shown(text: str) -> str:
    """Return the text for a message: quoted, escaped, and shortened if it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def _require(pattern: re.Pattern[str], name: str, field: str, what: str, characters: str, longest: int) -> None:
    if len(name) > longest or pattern.fullmatch(name) is None:
        raise BadRequest(
            f"{field}: {shown(name)} cannot be {what}: use 1 to {longest} characters ({characters}), and begin with a "
            "letter or digit", field
        )  # fmt: skip


def kept_name(name: str, longest: int = LONGEST_KEPT) -> str:
    """Return a client's name as it is kept, logged and passed on.

    It is the name itself, unless that has more than ``longest`` characters or characters that cannot be printed: then
    it is the beginning of the name, in ASCII, and a digest of the whole name, with at most ``longest`` characters.
    """
    if len(name) <= longest and name.isprintable():
        return name
    beginning = name[: longest - _DIGEST - 1]
    readable = "".join(each if each.isascii() and each.isprintable() else "_" for each in beginning)
    return f"{readable}-{_digest(name)[:_DIGEST]}"


def owned_name(name: str, headers: Mapping[str, str]) -> str:
    """Return a session's name among those of all clients: equal names of clients with different keys differ.

    The client is known by the key in its ``authorization`` header, which cannot be read from the result. All processes
    of a fleet return the same for the same client. Clients without a key are one client.
    """
    # Without the key, a client could use the session, and the cached KV, of another one by guessing its name.
    kept, key = kept_name(name), headers.get("authorization", "").partition(" ")[2]  # the scheme has any case
    return f"{kept}@{_digest(f'{len(key)} {key} {kept}')[:_OWNER]}" if key else kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sequence_id(request_id: str) -> str:
    """Return the id of a request's sequence on engines and in logs. The client may have chosen the request's id.

    It is the request's id, unless that is too long or not printable: then it is the beginning and a digest of the id.
    """
    return kept_name(request_id, LONGEST_ID)


def further_id(seq_id: str, number: int) -> str:
    """Return the id of a later attempt of the request ``seq_id``; numbers start at 1."""
    return f"{seq_id}.{number}"


def find_id(known: Iterable[str], wanted: str) -> str | None:
    """Return ``wanted`` if it is in ``known``, else the id of the last later attempt of that request, or None."""
    ids, later = list(known), re.compile(rf"{re.escape(wanted)}\.[0-9]+")
    return wanted if wanted in ids else next(filter(later.fullmatch, reversed(ids)), None)


def chosen_by_weight(weights: Sequence[float], draw: float) -> int:
    """Return the index of the item whose part of ``[0, 1)`` contains ``draw``; an item with weight 0 has no part.

    ``weights`` are finite, at least 0, and not all 0.
    """
    # Relative to the largest: sums of the weights may overflow, and products of a draw with the smallest floats round.
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    left = draw * sum(parts)
    last = 0
    for index, part in enumerate(parts):
        if part > 0:
            last = index
            left -= part
            if left < 0:
                break
    return last  # rounding errors may leave a small rest, which is the last item's


LAST_PORT = 65535
# If one port is given, the ranks of a machine use the next ones; this is the number of ports that are tried.
PORTS_TRIED = 64
MOST_NAMED = 8
# The last label must begin with a letter: resolvers read 2130706433 and 0x7f.1 as addresses.
_NAME = re.compile(r"([a-z0-9_][a-z0-9_-]{0,62}\.){0,30}[a-z][a-z0-9-]{0,62}")
_NAME_PATTERN = re.compile(r"[a-z0-9*._-]{1,253}")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_ONE_PORT = re.compile("[0-9]{1,5}")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def bracketed(host: str) -> str:
    """Return a name or address in the form that goes before ``:port``."""
    return f"[{host}]" if ":" in host else host


def host_and_port(host: str, port: int) -> str:
    """Return ``host:port``."""
    return f"{bracketed(host)}:{port}"


@dataclass(frozen=True)
class _Pattern:
    """Hosts of a network, or hosts whose names match, at ports of ``[first, last]``."""

    host: _Network | str
    first: int
    last: int

    def covers(self, host: str, port: int) -> bool:
        """True if the pattern covers the host and port. Names are not resolved: a DNS answer may change later."""
        if not self.first <= port <= self.last:
            return False
        address = ip_of(host)
        if isinstance(self.host, str):
            return address is None and fnmatchcase(host, self.host)
        return address is not None and address.version == self.host.version and address in self.host


def port_range(text: str, name: str) -> tuple[int, ...]:
    """Return the ports that may be tried: the given one and those after it, or a range first-last; none for 0, any.

    Raises :class:`~tercet.protocol.BadRequest` with the ``name`` of the setting.
    """
    first, dash, last = text.partition("-")
    if text == "0":
        return ()
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise BadRequest(f"{name}: must be a port, or a range first-last, is {text!r}", name)
    begin = int(first)
    end = int(last) + 1 if dash else min(begin + PORTS_TRIED, LAST_PORT + 1)
    if not 1 <= begin < end <= LAST_PORT + 1:
        raise BadRequest(f"{name}: must be from 1 to {LAST_PORT}, or a range first-last of these, is {text!r}", name)
    return tuple(range(begin, end))


class AllowedPrefillers:
    """The allow-list in ``text``: patterns ``HOST:PORT``, separated by commas; empty text allows no host.

    ``HOST`` is an address, a network (``10.0.0.0/8``, ``[fd00::]/8``) or a name, which may have ``*`` in it; ``PORT``
    is a port, a range (``8000-8010``) or ``*``. Raises :class:`~tercet.protocol.BadRequest` naming ``param``.
    """

    def __init__(self, text: str, param: str) -> None:
        self._patterns = list[_Pattern]()
        for part in filter(None, map(str.strip, text.split(","))):
            host, ports = _host_and_port(part.lower())
            matched = _PORTS.fullmatch("1-65535" if ports == "*" else ports)
            first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
            try:
                of = ipaddress.ip_network(host, strict=False)
            except ValueError:
                of = host if _NAME_PATTERN.fullmatch(host) and "/" not in host else None
            if of is None or not 1 <= first <= last <= LAST_PORT:
                such_as = "such as 10.0.0.0/8:8000, *.prefill.svc:8000-8010 or 127.0.0.1:*"
                raise BadRequest(f"{param}: {part!r} is not HOST:PORT; {such_as}", param)
            self._patterns.append(_Pattern(of, first, last))

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def named(self, header: str) -> Sequence[str]:
        """Return the engines (``host:port``) that the header's value names, in order.

        Raises :class:`~tercet.protocol.BadRequest`, which names the header, if it is malformed or an engine is not
        allowed.
        """
        parts = [part.strip().lower() for part in header.split(",") if part.strip()]
        if not 1 <= len(parts) <= MOST_NAMED:
            raise _refused(f"names {len(parts)} engines, and 1 to {MOST_NAMED} are allowed")
        return list(dict.fromkeys(self._allowed(part) for part in parts))

    def _allowed(self, part: str) -> str:
        host, port = _host_and_port(part)
        if not _ONE_PORT.fullmatch(port) or not 1 <= int(port) <= LAST_PORT:
            raise _refused(f"{part!r:.200} is not HOST:PORT")
        if ip_of(host) is None and not _NAME.fullmatch(host):
            raise _refused(f"{part!r:.200} is not HOST:PORT")
        # After the form: a header that is malformed is not looked up in the list.
        if not any(pattern.covers(host, int(port)) for pattern in self._patterns):
            raise _refused(f"{part:.200} is not one of the engines that may prefill here (prefill-hosts)")
        return host_and_port(host, int(port))


def _refused(why: str) -> BadRequest:
    return BadRequest(f"{PREFILLER_HEADER}: {why}", PREFILLER_HEADER)


def _host_and_port(text: str) -> tuple[str, str]:
    """Return host and port, without the brackets of an IPv6 address (a network's length may follow the brackets)."""
    host, _, port = text.rpartition(":")
    return host.replace("[", "", 1).replace("]", "", 1) if host.startswith("[") else host, port


def ip_of(host: str) -> _Address | None:
    """Return the address, an IPv4-mapped IPv6 address as IPv4; None if it is not an address or has a zone.

    A zone may be any text, including characters that change the host of a URL.
    """
    if "%" in host:
        return None
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
