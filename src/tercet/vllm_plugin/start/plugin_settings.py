"""The plugin's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.protocol.access import key_of
from tercet.protocol.names import AllowedPrefillers, port_range
from tercet.settings import SECRET_VARIABLE, Setting, Settings, Source, decode_settings
from tercet.settings.declaration import AtLeastOne
from tercet.settings.process_settings import (
    PREFILL_HOSTS_VARIABLE,
    STUCK_AFTER_S,
    TIMEOUT_S,
    ClientTraces,
    PrefillHosts,
    PrefillStuckAfter,
    PrefillTimeout,
)
from tercet.transport import AUTO, MAX_STREAMS, TRANSPORTS, TransportSettings
from tercet.transport.sockets import LOOPBACK
from tercet.wire.serving.server_access import SET_A_SECRET

ORIGIN = "kv_connector_extra_config: "
# A message of the token stream to an engine has at most 64 MiB, and images are a third longer in JSON.
MAX_REQUEST_BYTES = 128 * 1024 * 1024
MAX_CPUS = 8192  # the kernel's largest build setting
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0)]


class PluginSettings(Settings, frozen=True, rename=lambda name: name):
    """Settings of one engine's Tercet plugin; those of the transport are in the form that users write.

    Cores share the path to memory. Give ``agent_cpus`` CPUs that do not compute, and set a ``receive_limit``, to keep
    decode steps fast while KV arrives.
    """

    lease_ttl: Annotated[Seconds, Setting("Seconds after which an unused reservation ends.", unit="seconds")] = 60.0
    # Seconds that a reservation waits for blocks; then the caller picks another engine.
    reserve_wait: Seconds = 1.0
    max_lease_share: Annotated[
        Share, Setting("Share of the block pool that reservations, which cannot be preempted, may pin together.")
    ] = 0.8
    transport: Annotated[str, Setting("Transport of KV: auto, or the name of a required one.")] = AUTO
    kv_memory: Annotated[
        Literal["auto", "staged"],
        Setting("Access to KV: auto (directly if possible) or staged (only through buffers in host memory)."),
    ] = "auto"
    host: Annotated[
        str,
        Setting("IP addresses on which the KV transport listens, separated by commas; streams are spread over them."),
    ] = LOOPBACK
    port: Annotated[str, Setting("First port to try, or a range first-last; 0 picks free ports.")] = "0"
    streams: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_STREAMS)],
        Setting("Connections per peer, for transports that use connections."),
    ] = 2
    secret: Annotated[
        str, Setting("Secret that all engines of the fleet share.", env=SECRET_VARIABLE, default="none", is_key=True)
    ] = ""
    # Seconds without progress after which a push fails.
    send_timeout: Seconds = 30.0
    agent_cpus: Annotated[
        str, Setting("CPUs of the process that moves KV, such as 3 or 0-1,6.", default="all of the engine's")
    ] = ""
    receive_limit: Annotated[
        Annotated[float, Meta(ge=0)],
        Setting(
            "Most bytes that each rank receives per second; 0 for no limit.", unit="10^9 bytes per second", default="0"
        ),
    ] = 0.0

    stop_grace: Annotated[
        Annotated[float, Meta(ge=0)],
        Setting("Seconds after SIGTERM until an engine that is not empty stops; 0 stops it at once.", unit="seconds"),
    ] = 30.0
    max_request_bytes: Annotated[
        AtLeastOne,
        Setting(
            "Largest body of a verb, in bytes, including tensors of images; a larger one is refused with 413.",
            unit="bytes",
            default="128 MiB",
        ),
    ] = MAX_REQUEST_BYTES
    beside: Annotated[
        tuple[dict[str, Any], ...],
        Setting("Other KV connectors of this engine, each a config as in vLLM's MultiConnector.", metavar="LIST"),
    ] = ()
    prefill_hosts: PrefillHosts = ""
    client_traces: ClientTraces = False
    prefill_timeout: PrefillTimeout = TIMEOUT_S
    prefill_stuck_after: PrefillStuckAfter = STUCK_AFTER_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport not in TRANSPORTS:
            raise _wrong("transport", self.transport, f"must be one of {', '.join(TRANSPORTS)}")
        if self.kv_memory == "staged" and self.transport not in (AUTO, "tcp"):
            raise _wrong("transport", self.transport, f"must be {AUTO} or tcp with kv_memory staged")
        _hosts(self.host)
        port_range(self.port, "port")
        self.cpus()
        self.allowed_prefillers()

    def is_staged(self, device: str) -> bool:
        return self.kv_memory == "staged" or device != "cpu"

    def cpus(self) -> frozenset[int]:
        """Return the numbers of ``agent_cpus``; empty means all CPUs that the engine may use."""
        found: set[int] = set()
        for item in filter(None, self.agent_cpus.split(",")):
            first, dash, last = item.strip().partition("-")
            bounds = first, last if dash else first
            numbers = [int(bound) for bound in bounds if bound.isascii() and bound.isdecimal()]
            if len(numbers) < 2 or not numbers[0] <= numbers[1] < MAX_CPUS:
                rule = "must be numbers of CPUs and ranges of them, such as 0-1,6"
                raise _wrong("agent_cpus", self.agent_cpus, rule)
            found.update(range(numbers[0], numbers[1] + 1))
        return frozenset(found)

    @property
    def fleet_secret(self) -> str:
        """The secret that all engines of the fleet share; empty if none is set. Raises for a blank one."""
        return key_of(self.secret, "secret") or key_of(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)

    def allowed_prefillers(self) -> AllowedPrefillers:
        """Return the engines that a header may name for prefill. Raises :class:`~tercet.protocol.BadRequest`."""
        if self.prefill_hosts:
            return AllowedPrefillers(self.prefill_hosts, "prefill_hosts")
        return AllowedPrefillers(os.environ.get(PREFILL_HOSTS_VARIABLE, ""), PREFILL_HOSTS_VARIABLE)

    def require_secret_beyond_loopback(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if other machines could push or read KV without a secret."""
        if self.fleet_secret:
            return
        for host in _hosts(self.host):
            if not ipaddress.ip_address(host).is_loopback:
                raise _wrong("host", self.host, f"other machines can reach {host}, so {SET_A_SECRET}")

    def inner_host(self, machines: int) -> str:
        """Return the address at which the processes of one engine reach each other.

        Raises :class:`~tercet.protocol.BadRequest` for an engine on several ``machines`` with a loopback address.
        """
        first = _hosts(self.host)[0]
        if machines == 1:
            return LOOPBACK
        if ipaddress.ip_address(first) == ipaddress.ip_address(LOOPBACK):
            raise _wrong("host", self.host, "must be this machine's address, as the engine has ranks on other machines")
        return first

    def transport_settings(self) -> TransportSettings:
        hosts, ports = _hosts(self.host), port_range(self.port, "port")
        return TransportSettings(
            self.transport, hosts, ports, self.streams, self.fleet_secret, self.send_timeout, self.receive_limit * 1e9
        )  # fmt: skip


def parse_settings(extra: Mapping[str, Any]) -> PluginSettings:
    """Validate ``kv_connector_extra_config``; raises :class:`~tercet.protocol.BadRequest` naming the key."""
    return decode_settings(PluginSettings, Source(extra, ORIGIN))


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    for host in hosts:
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            raise _wrong("host", text, "must be IP addresses of this machine, separated by commas") from None
        if unspecified:
            raise _wrong("host", text, f"must be addresses that peers can connect to; {host} is not such an address")
    return hosts


def _wrong(name: str, value: str, rule: str) -> BadRequest:
    return BadRequest(f"{name}: {rule}, is {value!r}", name)
