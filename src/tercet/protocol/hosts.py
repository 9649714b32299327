"""Hosts and ports as URLs have them, and the allow-list of engines that a request may name to prefill its prompt."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tercet.protocol.errors import BadRequest
from tercet.protocol.headers import PREFILLER_HEADER

LAST_PORT = 65535
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
        address = _address(host)
        if isinstance(self.host, str):
            return address is None and fnmatchcase(host, self.host)
        return address is not None and address.version == self.host.version and address in self.host


class AllowedPrefillers:
    """The allow-list in ``text``: patterns ``HOST:PORT``, separated by commas; empty text allows no host.

    ``HOST`` is an address, a network (``10.0.0.0/8``, ``[fd00::]/8``) or a name, which may have ``*`` in it; ``PORT``
    is a port, a range (``8000-8010``) or ``*``. Raises :class:`~tercet.protocol.BadRequest` naming ``param``.
    """

    def __init__(self, text: str, param: str) -> None:
        self._patterns = [_pattern(part.strip(), param) for part in text.split(",") if part.strip()]

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
        if _address(host) is None and not _NAME.fullmatch(host):
            raise _refused(f"{part!r:.200} is not HOST:PORT")
        if not any(pattern.covers(host, int(port)) for pattern in self._patterns):
            raise _refused(f"{part:.200} is not one of the engines that may prefill here (prefill-hosts)")
        return host_and_port(host, int(port))


def _refused(why: str) -> BadRequest:
    return BadRequest(f"{PREFILLER_HEADER}: {why}", PREFILLER_HEADER)


def _pattern(text: str, param: str) -> _Pattern:
    host, ports = _host_and_port(text.lower())
    found = (1, LAST_PORT) if ports == "*" else _range_of(ports)
    of = _network(host) or (host if _NAME_PATTERN.fullmatch(host) and "/" not in host else None)
    if found is None or of is None:
        raise BadRequest(
            f"{param}: {text!r} is not HOST:PORT; such as 10.0.0.0/8:8000, *.prefill.svc:8000-8010 or 127.0.0.1:*",
            param,
        )
    return _Pattern(of, *found)


def _range_of(text: str) -> tuple[int, int] | None:
    matched = _PORTS.fullmatch(text)
    if matched is None:
        return None
    first, last = int(matched[1]), int(matched[2] or matched[1])
    return (first, last) if 1 <= first <= last <= LAST_PORT else None


def _host_and_port(text: str) -> tuple[str, str]:
    """Return host and port, without the brackets of an IPv6 address (a network's length may follow the brackets)."""
    host, _, port = text.rpartition(":")
    return host.replace("[", "", 1).replace("]", "", 1) if host.startswith("[") else host, port


def _address(host: str) -> _Address | None:
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


def _network(host: str) -> _Network | None:
    try:
        return ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None
