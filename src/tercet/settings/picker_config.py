"""What ``tercet epp`` can be told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, WithoutRole
from tercet.settings.declaration import AtLeastOne, NotNegative, Seconds, Setting, Settings
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    EngineSecret,
    EngineTLS,
    LeastLogged,
    LogLines,
    MostRequestBytes,
    TLSCertificate,
    TLSKey,
    require_pair,
)
from tercet.settings.router_config import EngineAddress, Port, engine_fields, require_unlike

FLOW = "Flow control"


class PickerConfig(Settings, frozen=True, kw_only=True):
    """One endpoint picker; ``discovery`` and ``engine_tls`` are groups."""

    engines: Annotated[
        tuple[EngineAddress, ...],
        Setting(
            "An engine, whose URL's host and port are an endpoint of Envoy's; repeatable.", flag="--engine",
            metavar="URL[,role=R][,name=N][,label.KEY=V]", read=engine_fields,
        ),
    ] = ()  # fmt: skip
    discovery: DiscoverySettings = DiscoverySettings()
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Setting("Port of the gRPC service; 0 is any free one.", env="TERCET_GRPC_PORT")] = 9002
    grpc_health_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Setting("A port for gRPC health alone, without TLS, as kubelets need it.", default="that of the service only"),
    ] = None
    stream_port: Annotated[
        Port, Setting("Port to which engines connect to report their load.", default="any free one")
    ] = 0
    metrics_port: Annotated[Port, Setting("Port of /metrics; 0 is any free one.")] = 9090
    scheduling: Annotated[
        str | None,
        Setting("A scheduling file, such as an EndpointPickerConfig of llm-d.", metavar="FILE", default="built in"),
    ] = None
    render_model: Annotated[
        str | None,
        Setting(
            "Model whose tokenizer and chat template tokenize prompts: `smollm2`, or a checkpoint's directory.",
            default="none: four bytes of text count as a token",
        ),
    ] = None
    render_budget: Annotated[
        AtLeastOne,
        Setting("Most characters of one request that are tokenized if they are not cached; the rest is estimated."),
    ] = 8_192
    render_cache_bytes: Annotated[
        AtLeastOne,
        Setting("Memory for parts of prompts that were tokenized, at most.", unit="bytes", default="128 MiB"),
    ] = msgspec.field(default=128 * 2**20, name="render-cache")
    split_by: Annotated[
        Literal["decider", "cost"],
        Setting(
            "Whether another engine prefills: by the file's `decider`, or by the `cost` that was learned, as in `auto`."
        ),
    ] = "decider"
    load_from: Annotated[
        Literal["reports", "metrics"],
        Setting("Engines with Tercet's plugin push `reports`; of others vLLM's own `metrics` page is read."),
    ] = "reports"
    metrics_interval_s: Annotated[Seconds, Setting("Between two readings of an engine's /metrics.", unit="seconds")] = (
        msgspec.field(default=0.2, name="metrics-interval")
    )
    kv_events_port: Annotated[
        Port | None,
        Setting("With `--load-from metrics`: where each engine publishes KV events, on its own host.", default="none"),
    ] = None
    fallbacks: Annotated[
        Annotated[int, Meta(ge=0, le=16)], Setting("Further endpoints that Envoy may try when the first one fails.")
    ] = 2
    objectives: Annotated[
        Mapping[str, str],
        Setting(
            "NAME=PRIORITY of an inference objective: higher comes in first, below 0 is dropped; repeatable.",
            flag="--objective", panel=FLOW,
        ),
    ] = {}  # fmt: skip
    max_waiting_per_engine: Annotated[
        AtLeastOne, Setting("Requests waiting on an engine from which on it has no room.", panel=FLOW)
    ] = 5
    max_kv_usage: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("Share of its KV cache in use from which on it has none.", panel=FLOW),
    ] = 0.8
    max_queued: Annotated[NotNegative, Setting("Requests that may wait for room; more get 429.", panel=FLOW)] = 1000
    queue_timeout_s: Annotated[
        Seconds, Setting("Longest wait of a request for a place; then it gets 429.", unit="seconds", panel=FLOW)
    ] = msgspec.field(default=30.0, name="queue-timeout")
    without_role: Annotated[
        WithoutRole,
        Setting("While no engine that decodes can be picked: `serve` on those that are left, or `refuse` (503)."),
    ] = "serve"
    stuck_after_s: Annotated[
        Seconds, Setting("Time without progress after which an engine is not picked.", unit="seconds")
    ] = msgspec.field(default=5.0, name="stuck-after")  # fmt: skip
    max_request_bytes: MostRequestBytes = MAX_REQUEST_BYTES
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting("Time that it continues to pick, not ready, after a signal to stop.", unit="seconds"),
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
            raise BadRequest("split-by: costs are learned from reports, and /metrics says too little", "split-by")
        if self.kv_events_port is not None and self.load_from != "metrics":
            raise BadRequest(
                "kv-events-port: engines that push reports say by themselves where they publish", "kv-events-port"
            )
        for name, priority in self.objectives.items():
            if not re.fullmatch("-?[0-9]{1,9}", priority):
                raise BadRequest(
                    f"objectives: the priority of {name} is {priority!r}, not a whole number", "objectives"
                )
        require_pair(self.tls_cert, self.tls_key)
