"""Settings of ``tercet sidecar``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tercet.protocol.hosts import AllowedPrefillers
from tercet.settings.declaration import Port, Seconds, Setting, Settings
from tercet.settings.prefill_settings import (
    STUCK_AFTER_S,
    TIMEOUT_S,
    PrefillBudget,
    PrefillHosts,
    PrefillStuckAfter,
    PrefillTimeout,
)
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    ClientTraces,
    EngineSecret,
    EngineTLS,
    LeastLogged,
    LogLines,
    MostRequestBytes,
    TLSCertificate,
    TLSKey,
    require_pair,
)
from tercet.settings.urls import require_engine_url

Connector = Literal["tercet", "nixl"]


class SidecarConfig(Settings, frozen=True, kw_only=True):
    """Settings of one sidecar, which stands before one engine; ``engine_tls`` is a group."""

    engine: Annotated[
        str, Setting("URL of the engine that decodes; requests to the sidecar are forwarded to it.", metavar="URL")
    ]
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Setting("Port of the HTTP server; 0 means any free port.")] = 8000
    connector: Annotated[
        Connector,
        Setting(
            "Protocol that brings KV to the engine: `tercet` uses the verbs, `nixl` uses vLLM's `kv_transfer_params`, "
            "for engines with NixlConnector or a similar connector."
        ),
    ] = "tercet"
    prefill_hosts: PrefillHosts = ""
    prefill_timeout: PrefillTimeout = TIMEOUT_S
    prefill_stuck_after: PrefillStuckAfter = STUCK_AFTER_S
    stuck_after_s: Annotated[
        Seconds,
        Setting("Time without a heartbeat of the engine after which waiting requests fail.", unit="seconds"),
    ] = msgspec.field(default=10.0, name="stuck-after")
    idle_timeout_s: Annotated[
        Seconds, Setting("Longest gap in the answer of an engine that sends heartbeats.", unit="seconds")
    ] = msgspec.field(default=300.0, name="idle-timeout")
    max_request_bytes: MostRequestBytes = MAX_REQUEST_BYTES
    client_traces: ClientTraces = False
    tls_cert: TLSCertificate = None
    tls_key: TLSKey = None
    secret: EngineSecret = ""
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_engine_url(self.engine, "engine")
        require_pair(self.tls_cert, self.tls_key)
        self.allowed_prefillers()

    def allowed_prefillers(self) -> AllowedPrefillers:
        """Return the engines that a header may name to prefill; raise :class:`~tercet.protocol.BadRequest`."""
        return AllowedPrefillers(self.prefill_hosts, "prefill-hosts")

    @property
    def prefill_budget(self) -> PrefillBudget:
        """The limits, in seconds, of prefill by other engines."""
        return PrefillBudget(self.prefill_timeout, self.prefill_stuck_after)
