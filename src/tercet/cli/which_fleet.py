"""Which fleet a command means: by ``--url``, ``TERCET_URL`` or ``--port``, or the only fleet that runs on this machine.

Fleets of ``tercet up`` are found by their records in the cache. A router that ``tercet router`` started has none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from tercet.protocol import BadRequest
from tercet.protocol.names import LAST_PORT
from tercet.settings import require_url
from tercet.settings.process_settings import URL_VARIABLE

if TYPE_CHECKING:
    from tercet.cluster.detached_fleets import DetachedFleet

HERE = "http://127.0.0.1:8000"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# Number of fleets that a message lists.
LISTED = 8

Url = Annotated[
    str | None,
    typer.Option(
        envvar=URL_VARIABLE,
        help="Base URL of the router.",
        show_default=f"that of the only fleet that runs here, else {HERE}",
    ),
]
RouterPort = Annotated[
    int | None, typer.Option(min=1, max=LAST_PORT, help="Port of the router on this machine, instead of --url.")
]


@dataclass(frozen=True)
class WhichFleet:
    """The fleet that flags and ``TERCET_URL`` name; a port on the command line counts more than the variable."""

    url: Url = None
    port: RouterPort = None

    @property
    def named(self) -> str | None:
        """The given URL; None if a port, or nothing, is given."""
        if self.url is None:
            return None
        # The variable may be set for a whole session; a port is written for this command.
        if self.port is not None:
            if self.url != os.environ.get(URL_VARIABLE):
                raise BadRequest("--port: cannot be combined with --url", "--port")
            return None
        require_url(self.url, "--url", HERE)
        return self.url

    @property
    def is_given(self) -> bool:
        """True if a flag names the fleet, whatever ``TERCET_URL`` is."""
        return self.port is not None or self.url not in (None, os.environ.get(URL_VARIABLE))

    def router_url(self) -> str:
        """Return the URL of the router, which need not run; raise if several fleets run and none is named."""
        from tercet.cluster.detached_fleets import running_fleets

        if (url := self.named) is not None:
            return url
        found = self.among(running_fleets())
        if found:
            return the_one(found).url
        return HERE if self.port is None else f"http://127.0.0.1:{self.port}"

    def among(self, fleets: Sequence[DetachedFleet]) -> list[DetachedFleet]:
        """Return those of ``fleets`` that may be meant: all, if none is named."""
        url = self.named
        if url is not None:
            return [fleet for fleet in fleets if is_at(fleet, url)]
        return [fleet for fleet in fleets if self.port in (None, fleet.port)]

    def in_words(self) -> str:
        """Return the place that is named, as the end of "no fleet runs here"; empty if none is."""
        if (url := self.named) is not None:
            return f" at {url}"
        return "" if self.port is None else f" at port {self.port}"


def the_one(found: Sequence[DetachedFleet], flag: str = "--port", other: str = "") -> DetachedFleet:
    """Return the only fleet of ``found``; raise :class:`~tercet.protocol.BadRequest` that lists several.

    ``other`` is a flag that is an alternative.
    """
    if len(found) == 1:
        return found[0]
    ports = [str(fleet.port) for fleet in found]
    # Two fleets at one port, at different addresses: only URLs tell them apart.
    if len(set(ports)) < len(ports):
        urls = _listed([fleet.url for fleet in found])
        raise BadRequest(f"{flag}: fleets run at {urls}; give one of them as --url{other}", flag)
    raise BadRequest(f"{flag}: fleets run at the ports {_listed(ports)}; give one of them{other}", flag)


def url_of(given: str, flag: str) -> str:
    """Return the URL of a flag that takes a URL, or the port of a router on this machine."""
    if given.isdecimal() and 1 <= int(given) <= LAST_PORT:
        return WhichFleet(None, int(given)).router_url()
    require_url(given, flag, HERE)
    return given


def is_at(fleet: DetachedFleet, url: str) -> bool:
    """Return whether the router of a fleet of this machine is the one with this URL."""
    at, its = urlsplit(url), urlsplit(fleet.url)
    if (at.port or {"http": 80, "https": 443}.get(at.scheme)) != fleet.port or at.hostname is None:
        return False
    if at.hostname == its.hostname or at.hostname in _LOOPBACK:
        return True
    try:
        places = socket.getaddrinfo(at.hostname, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in places:  # only an address of this machine can be bound
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
        except OSError:
            continue
        return True
    return False


def others_in_words(url: str) -> str:
    """Return how to name the fleets that run here, after the news that no router answers at ``url``."""
    from tercet.cluster.detached_fleets import running_fleets

    fleets = [fleet for fleet in running_fleets() if fleet.url.rstrip("/") != url.rstrip("/")]
    if not fleets:
        return f"; start a fleet with `tercet up`, or give --url or {URL_VARIABLE}" if url == HERE else ""
    ports = [fleet.port for fleet in fleets]
    flags = [f"--port {fleet.port}" if ports.count(fleet.port) == 1 else f"--url {fleet.url}" for fleet in fleets]
    return f"; {'a fleet runs' if len(fleets) == 1 else 'fleets run'} here: give {_listed(flags, ' or ')}"


def _listed(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}{len(words) - LISTED} more" if len(words) > LISTED else ""
    return between.join(words[:LISTED]) + more


def but_at(fleets: Sequence[DetachedFleet]) -> str:
    """Return where fleets run, as the end of "no fleet runs here at port 1"; empty without fleets."""
    return f", but at {_listed([str(fleet.port) for fleet in fleets])}" if fleets else ""
