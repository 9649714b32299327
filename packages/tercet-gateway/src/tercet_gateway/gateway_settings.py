"""The settings of the endpoint picker, of the model router and of the sidecar: flags, variables and fields of files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, WithoutRole
from tercet.protocol.names import AllowedPrefillers
from tercet.settings.declaration import (
    ACCESS,
    AtLeastOne,
    FixedPort,
    NotNegative,
    Port,
    Seconds,
    Setting,
    Settings,
    key_values,
)
from tercet.settings.engine_addresses import (
    DiscoverySettings,
    EngineAddress,
    engine_fields,
    require_engine_url,
    require_unlike,
)
from tercet.settings.process_settings import (
    API_KEY_VARIABLE,
    MAX_REQUEST_BYTES,
    STUCK_AFTER_S,
    TIMEOUT_S,
    AdminKey,
    AdminKeyFile,
    APIKeyFile,
    ClientTraces,
    EngineSecret,
    EngineTLS,
    LeastLogged,
    LogLines,
    OpenToAll,
    PrefillBudget,
    PrefillHosts,
    PrefillStuckAfter,
    PrefillTimeout,
)

MostRequestBytes = Annotated[
    AtLeastOne, Setting("Largest request body; a larger one gets 413.", unit="bytes", default="64 MiB")
]
TLSCertificate = Annotated[
    str | None,
    Setting(
        "Certificate of this server (PEM), reloaded when it is replaced.",
        metavar="FILE",
        default="none: no TLS",
        panel=ACCESS,
    ),
]
TLSKey = Annotated[
    str | None, Setting("Private key of the certificate (PEM).", metavar="FILE", default="none", panel=ACCESS)
]


def require_pair(certificate: str | None, key: str | None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if only one of the two is given."""
    if (certificate is None) != (key is None):
        raise BadRequest("tls-key: a certificate needs its key; set both tls-cert and tls-key", "tls-key")


FLOW = "Flow control"


class PickerConfig(Settings, frozen=True, kw_only=True):
    """Settings of one endpoint picker; ``discovery`` and ``engine_tls`` are groups."""

    engines: Annotated[
        tuple[EngineAddress, ...],
        Setting(
            "URL of an engine; its host and port are an endpoint of Envoy. Repeatable.", flag="--engine",
            metavar="URL[,role=R][,name=N][,label.KEY=V]", read=engine_fields,
        ),
    ] = ()  # fmt: skip
    discovery: DiscoverySettings = DiscoverySettings()
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Setting("Port of the gRPC service; 0 means any free port.", env="TERCET_GRPC_PORT")] = 9002
    grpc_health_port: Annotated[
        FixedPort | None,
        Setting(
            "Port for gRPC health checks only, without TLS, as kubelets need it.", default="the port of the service"
        ),
    ] = None
    stream_port: Annotated[
        Port, Setting("Port to which engines connect to report their load.", default="any free port")
    ] = 0
    metrics_port: Annotated[Port, Setting("Port of /metrics; 0 means any free port.")] = 9090
    scheduling: Annotated[
        str | None,
        Setting(
            "Scheduling file (YAML), such as an EndpointPickerConfig of llm-d.", metavar="FILE", default="built in"
        ),
    ] = None
    render_model: Annotated[
        str | None,
        Setting(
            "Model whose tokenizer and chat template are used for prompts: `smollm2`, or a checkpoint's directory.",
            default="none: four bytes of text count as a token",
        ),
    ] = None
    # Most uncached characters of one request that are tokenized, the rest is estimated: about 2 ms on one core.
    render_budget: AtLeastOne = 8_192
    # Memory of the cache of tokenized parts of prompts.
    render_cache_bytes: AtLeastOne = 128 * 2**20
    split_by: Annotated[
        Literal["decider", "cost"],
        Setting(
            "Rule that decides if another engine prefills: the file's `decider`, or the learned `cost`, as in `auto`."
        ),
    ] = "decider"
    load_from: Annotated[
        Literal["reports", "metrics"],
        Setting(
            "Source of engines' load: `reports` that Tercet's plugin pushes, or vLLM's `metrics` page, which is polled."
        ),
    ] = "reports"
    metrics_interval_s: Annotated[
        Seconds, Setting("Interval between two polls of an engine's /metrics.", unit="seconds")
    ] = msgspec.field(default=0.2, name="metrics-interval")
    kv_events_port: Annotated[
        Port | None,
        Setting("Port on which each engine publishes KV events; needs `--load-from metrics`.", default="none"),
    ] = None
    fallbacks: Annotated[
        Annotated[int, Meta(ge=0, le=16)],
        Setting("Number of further endpoints that Envoy may try when the first one fails."),
    ] = 2
    objectives: Annotated[
        Mapping[str, str],
        Setting(
            "Priority of an inference objective, NAME=PRIORITY. The picker serves higher priorities first, and "
            "drops requests with a negative priority if the fleet is full. Repeatable.",
            flag="--objective", panel=FLOW,
        ),
    ] = {}  # fmt: skip
    max_waiting_per_engine: Annotated[
        AtLeastOne, Setting("Number of waiting requests at or above which an engine has no room.", panel=FLOW)
    ] = 5
    max_kv_usage: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("KV usage, from 0 to 1, at or above which an engine has no room.", panel=FLOW),
    ] = 0.8
    max_queued: Annotated[
        NotNegative, Setting("Most requests that may wait for room; further ones get 429.", panel=FLOW)
    ] = 1000
    queue_timeout_s: Annotated[
        Seconds,
        Setting("Longest wait of a request for room; after it the request gets 429.", unit="seconds", panel=FLOW),
    ] = msgspec.field(default=30.0, name="queue-timeout")
    without_role: Annotated[
        WithoutRole,
        Setting("Action while no decode engine can be picked: `serve` on the remaining engines, or `refuse` (503)."),
    ] = "serve"
    stuck_after_s: Annotated[
        Seconds, Setting("Time without progress after which an engine is not picked.", unit="seconds")
    ] = msgspec.field(default=5.0, name="stuck-after")  # fmt: skip
    max_request_bytes: MostRequestBytes = MAX_REQUEST_BYTES
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting(
            "Time for which the picker continues to pick, without being ready, after a signal to stop.", unit="seconds"
        ),
    ] = msgspec.field(default=5.0, name="shutdown-timeout")
    tls_cert: TLSCertificate = None
    tls_key: TLSKey = None
    pool: Annotated[str, Setting("Name of the pool in metrics.")] = "tercet"
    secret: EngineSecret = ""
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unlike(self.engines, self.discovery)
        if self.split_by == "cost" and self.load_from == "metrics":
            raise BadRequest(
                "split-by: cost needs --load-from reports, since /metrics lacks what costs are learned from", "split-by"
            )
        if self.kv_events_port is not None and self.load_from != "metrics":
            raise BadRequest(
                "kv-events-port: needs --load-from metrics; reports have the port already", "kv-events-port"
            )
        for name, priority in self.objectives.items():
            if not re.fullmatch("-?[0-9]{1,9}", priority):
                raise BadRequest(
                    f"objectives: the priority of {name} must be a whole number, is {priority!r}", "objectives"
                )
        require_pair(self.tls_cert, self.tls_key)


Weight = Annotated[float, Meta(ge=0, le=1_000_000)]


class ModelBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router and its ``weight``: its share of the requests for its models."""

    url: str
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        require_engine_url(self.url, "url")


def backend_fields(given: Any, _index: int) -> Any:
    """Return the fields of a :class:`ModelBackend`, given as a mapping or as ``URL[,weight=W]``."""
    if not isinstance(given, str):
        return cast("dict[str, Any]", given) if isinstance(given, Mapping) else given
    url, *rest = given.split(",")
    fields: dict[str, Any] = dict(key_values(rest, given))
    if "weight" in fields:
        try:
            fields["weight"] = float(fields["weight"])
        except ValueError:
            raise BadRequest(f"weight: {fields['weight']!r} is not a number", "weight") from None
    return {"url": url.rstrip("/"), **fields}


def require_backends(backends: tuple[ModelBackend, ...], name: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if there are no backends, or if two have the same URL."""
    if not backends:
        raise BadRequest(f"{name}: is empty; give at least one router", name)
    urls = [each.url.rstrip("/") for each in backends]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise BadRequest(f"{name}: {twice} is given twice", name)


class ModelRouterConfig(Settings, frozen=True, kw_only=True):
    """Settings of one model router, which stands before the routers of several models."""

    routers: Annotated[
        tuple[ModelBackend, ...],
        Setting(
            "URL of a router. `weight` is its share of the requests if several routers serve the same model. "
            "Repeatable.",
            flag="--router", metavar="URL[,weight=W]", read=backend_fields,
        ),
    ] = ()  # fmt: skip
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Setting("Port of the HTTP server; 0 means any free port.", env="TERCET_HTTP_PORT")] = 8000
    # Seconds between two polls of a router for its models.
    poll_s: Seconds = 1.0
    max_request_bytes: MostRequestBytes = MAX_REQUEST_BYTES
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting("Time to finish running requests after a signal to stop.", unit="seconds"),
    ] = msgspec.field(default=25.0, name="shutdown-timeout")
    api_key: Annotated[
        str,
        Setting(
            "API key that clients must send; it is forwarded to the router. Give it as a variable.",
            flag="", env=API_KEY_VARIABLE, default="none", is_key=True,
        ),
    ] = ""  # fmt: skip
    api_key_file: APIKeyFile = None
    open_to_all: OpenToAll = False
    router_key: Annotated[
        str,
        Setting(
            "API key with which routers are polled for models. Give it as a variable.",
            flag="", default="the first client key", is_key=True,
        ),
    ] = ""  # fmt: skip
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    tls_cert: TLSCertificate = None
    tls_key: TLSKey = None
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_backends(self.routers, "routers")
        require_pair(self.tls_cert, self.tls_key)


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
        Seconds, Setting("Time without a heartbeat of the engine after which waiting requests fail.", unit="seconds")
    ] = msgspec.field(default=10.0, name="stuck-after")
    # Longest gap in the answer of an engine that sends heartbeats.
    idle_timeout_s: Seconds = 300.0
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
