"""The plugin's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from tercet.protocol import BadRequest
from tercet.transport import AUTO, MAX_STREAMS, TRANSPORTS, TransportSettings

SECRET_VARIABLE = "TERCET_SECRET"
MAX_PORT = 65535
MAX_CPUS = 8192  # what Linux can be built for
# With one port given, the ranks of this machine take the next ones; so many are tried.
PORTS_TRIED = 64
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PluginSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one engine's Tercet plugin.

    ``lease_ttl``: seconds until an unused reservation ends by itself. ``max_lease_share``: share of the block pool
    that reservations may pin together, since they cannot be preempted.

    The transport: ``transport`` is how KV travels, ``auto`` or the name of one way. ``host``: addresses that it listens
    on, several separated by commas; a peer spreads its connections over them. ``port``: the first port that it tries,
    or a range ``first-last``; 0 picks free ones. ``streams``: connections per peer when KV travels through them.
    ``secret``, or better the environment variable ``TERCET_SECRET``: what every engine of the fleet knows, so that no
    other process can push. ``send_timeout``: seconds without progress after which a push fails.

    ``agent_cpus``: CPUs on which the process that moves KV runs, such as ``3`` or ``0-1,6``; empty lets it use all that
    the engine may. Give it one that does not compute, and decode steps do not share a core with what is received.
    ``receive_limit``: 10^9 bytes per second that each rank takes in at most, 0 for any number. Cores share the way to
    memory; a limit keeps decode steps even where that is narrow.
    """

    lease_ttl: Seconds = 60.0
    max_lease_share: Share = 0.8
    transport: str = AUTO
    host: str = "127.0.0.1"
    port: str | int = 0
    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 2
    secret: str = ""
    send_timeout: Seconds = 30.0
    agent_cpus: str | int = ""
    receive_limit: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def cpus(self) -> frozenset[int]:
        """``agent_cpus`` as numbers; raises ``ValueError`` for what is no list of CPUs."""
        return _cpus(str(self.agent_cpus))

    def transport_settings(self) -> TransportSettings:
        """These settings as the transport takes them; raises ``ValueError`` naming the one that is wrong."""
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}; choose {', '.join(TRANSPORTS)}")
        secret = self.secret or os.environ.get(SECRET_VARIABLE, "")
        hosts, ports = _hosts(self.host), _ports(str(self.port))
        return TransportSettings(
            self.transport, hosts, ports, self.streams, secret, self.send_timeout, self.receive_limit * 1e9
        )  # fmt: skip


def parse_settings(extra: Mapping[str, Any]) -> PluginSettings:
    """Validate ``kv_connector_extra_config``; raises :class:`~tercet.protocol.BadRequest` naming the key."""
    try:
        config = msgspec.convert(dict(extra), PluginSettings, strict=False)
        config.transport_settings()
        config.cpus()
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRequest(f"kv_connector_extra_config: {error}", "kv_connector_extra_config") from error
    return config


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    for host in hosts:
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            raise ValueError(f"host is {text!r}; give IP addresses of this machine, separated by commas") from None
        if unspecified:
            raise ValueError(f"host is {text!r}; give addresses that peers can connect to, not {host}")
    return hosts


def _ports(text: str) -> tuple[int, ...]:
    first, dash, last = text.partition("-")
    if text == "0":
        return ()
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise ValueError(f"port is {text!r}; give a port, or a range first-last")
    begin = int(first)
    end = int(last) + 1 if dash else min(begin + PORTS_TRIED, MAX_PORT + 1)
    if not 1 <= begin < end <= MAX_PORT + 1:
        raise ValueError(f"port is {text!r}; give one from 1 to {MAX_PORT}, or a range first-last of these")
    return tuple(range(begin, end))


def _cpus(text: str) -> frozenset[int]:
    found: set[int] = set()
    for item in filter(None, text.split(",")):
        first, dash, last = item.strip().partition("-")
        bounds = first, last if dash else first
        numbers = [int(bound) for bound in bounds if bound.isascii() and bound.isdecimal()]
        if len(numbers) < 2 or not numbers[0] <= numbers[1] < MAX_CPUS:
            raise ValueError(f"agent_cpus is {text!r}; give numbers of CPUs and ranges, such as 0-1,6")
        found.update(range(numbers[0], numbers[1] + 1))
    return frozenset(found)
