"""Settings of ``tercet router``, which ``tercet up`` shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, WithoutRole
from tercet.protocol.names import LAST_PORT, require_adapter_name, require_text
from tercet.settings.declaration import (
    ACCESS,
    ENGINES,
    FAILURES,
    LIMITS,
    MODEL,
    PLACEMENT,
    SERVER,
    AtLeastOne,
    FixedPort,
    NotNegative,
    Port,
    Seconds,
    Setting,
    Settings,
)
from tercet.settings.engine_addresses import (
    AdminAddress,
    DiscoverySettings,
    EngineAddress,
    engine_fields,
    require_unlike,
    require_url,
)
from tercet.settings.fleet_settings import (
    BatchSettings,
    MoveSettings,
    Objectives,
    RescheduleSettings,
    RolesBy,
    SessionSettings,
    require_objectives,
)
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    POOLING_KEY_VARIABLE,
    AccessLog,
    AdminKey,
    AdminKeyFile,
    APIKeyFile,
    ClientTraces,
    EngineSecret,
    EngineTLS,
    LeastLogged,
    LogLines,
    OpenToAll,
    SupervisorKey,
    TraceRequests,
)


class Limits(Settings, frozen=True):
    """Limits of the running work of one process. A request is admitted while every count is below its limit.

    ``in_flight`` counts sequences; a request has one for each prompt and choice, and at least one. ``tokens`` counts
    the prompt tokens of sequences on engines, separately for each engine. The limits ``per_engine`` are multiplied by
    the number of decode engines that can be picked. ``sequences``, ``at_once`` and ``items`` limit one request and
    ``long_queued`` limits one client: they do not make a fleet full.
    """

    panel: ClassVar[str] = LIMITS
    in_flight: Annotated[
        AtLeastOne | None,
        Setting(
            "Most running sequences; further requests wait. A request has one sequence for each prompt and choice.",
            default="no limit",
        ),
    ] = msgspec.field(default=None, name="max-in-flight")
    in_flight_per_engine: Annotated[
        AtLeastOne | None,
        Setting("Most running sequences for each decode engine; further requests wait.", default="no limit"),
    ] = msgspec.field(default=None, name="max-in-flight-per-engine")
    tokens: Annotated[
        AtLeastOne | None, Setting("Number of prompt tokens on engines at which requests wait.", default="no limit")
    ] = msgspec.field(default=None, name="max-in-flight-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting("Number of prompt tokens per decode engine at which requests wait.", default="no limit"),
    ] = msgspec.field(default=None, name="max-in-flight-tokens-per-engine")
    queued: Annotated[NotNegative, Setting("Most requests that may wait; further ones get 429.")] = msgspec.field(
        default=1000, name="max-queued"
    )
    queue_timeout_s: Annotated[
        Seconds, Setting("Longest wait of a request; after it the request gets 429.", unit="seconds")
    ] = msgspec.field(default=30.0, name="queue-timeout")

    sequences: Annotated[
        AtLeastOne,
        Setting("Most sequences of one request (prompts times `n`); a request with more gets 400.", in_file=True),
    ] = msgspec.field(default=512, name="max-sequences")
    # Sequences of one request that run at once; the others start when these end, so one client cannot fill engines.
    at_once: AtLeastOne = 128

    items: Annotated[
        AtLeastOne,
        Setting(
            "Most lists and objects in a request's body, such as messages and tools; a request with more gets 400.",
            in_file=True,
        ),
    ] = msgspec.field(default=4096, name="max-request-items")
    long_queued: Annotated[
        NotNegative,
        Setting(
            "Most requests with long bodies of one client that wait to be prepared; further ones get 429.", in_file=True
        ),
    ] = msgspec.field(default=64, name="max-long-queued")

    @property
    def any(self) -> bool:
        """True if a limit of the fleet is set."""
        return any((self.in_flight, self.in_flight_per_engine, self.tokens, self.tokens_per_engine))


class RetryBudget(Settings, frozen=True):
    """Limits of the retries of one sequence; after them its client gets the error."""

    retries: Annotated[
        NotNegative, Setting("Most retries of a failed sequence in a row without a new token.", panel=FAILURES)
    ] = 2
    # Longest time for retries after the last token that the client got: clients wait no longer than ten minutes.
    within_s: Seconds = 600.0


class RouterSettings(Settings, frozen=True):
    """Settings that ``tercet router`` and ``tercet up`` share.

    ``retries``, ``limits``, ``moves``, ``reschedule``, ``objectives``, ``sessions`` and ``batches`` are groups; limits
    apply to each worker separately. ``model`` has the tokenizer and the chat template; the engines must serve the same
    model.
    """

    model: Annotated[
        str, Setting("Model: `smollm2`, a checkpoint's directory, or a hub id; `smollm2` is built in.", panel=MODEL)
    ] = "smollm2"
    served_model_name: Annotated[
        str | None, Setting("Name of the model in the OpenAI API.", default="the value of --model", panel=MODEL)
    ] = None
    model_aliases: Annotated[
        tuple[str, ...],
        Setting(
            "Another name of the model, which rules may match. Repeatable.",
            flag="--model-alias",
            in_file=True,
            panel=MODEL,
        ),
    ] = ()
    host: Annotated[str, Setting("Address to listen on.", panel=SERVER)] = "127.0.0.1"
    program: Annotated[
        str,
        Setting("Program: a built-in one (such as `data_parallel`), or your own: `file.py:function`.", panel=PLACEMENT),
    ] = "disaggregated"
    program_args: Annotated[
        Mapping[str, str], Setting("Parameter of the program. Repeatable.", flag="--program-arg", panel=PLACEMENT)
    ] = {}
    return_after: Annotated[
        NotNegative,
        Setting(
            "Number of failures of a new program in a row after which the previous program is used again; 0: never.",
            in_file=True,
            panel=PLACEMENT,
        ),
    ] = 5
    dev: Annotated[
        bool,
        Setting(
            "Reload the program or the scheduling file when its file changes; traces show what a program raised.",
            default="off",
            panel=PLACEMENT,
        ),
    ] = False
    fast_path: Annotated[
        Literal["on", "off"],
        Setting("Fast path for streams; with `off` vLLM's code writes them, at a higher cost per token.", panel=SERVER),
    ] = "on"
    log_format: LogLines = "text"
    access_log: AccessLog = False
    trace_requests: TraceRequests = 1000
    scheduling: Annotated[
        str | None,
        Setting(
            "Scheduling file (YAML); programs pick engines by its profiles.",
            metavar="FILE",
            default="none",
            panel=PLACEMENT,
        ),
    ] = None
    lora_modules: Annotated[
        Mapping[str, str],
        Setting(
            "LoRA adapter that engines must have, with its path on them. Repeatable.",
            flag="--lora-modules",
            metavar="NAME=PATH",
            panel=MODEL,
        ),
    ] = {}
    missing_adapters: Annotated[
        Literal["load", "leave"],
        Setting(
            "Action if an engine lacks an adapter: `load` it there, or `leave` the engine out of its requests.",
            in_file=True,
            panel=MODEL,
        ),
    ] = "load"
    retries: RetryBudget = RetryBudget()
    stuck_after_s: Annotated[
        Seconds,
        Setting(
            "Time without progress after which an engine's sequences continue on other engines; set it above the "
            "longest step.",
            unit="seconds",
            panel=FAILURES,
        ),
    ] = msgspec.field(default=5.0, name="stuck-after")
    warm_start_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting(
            "Longest time in which an engine that starts gets the most wanted contexts before it is picked, and in "
            "which one that leaves passes them on; 0: never.",
            unit="seconds",
            panel=PLACEMENT,
        ),
    ] = msgspec.field(default=5.0, name="warm-start")
    # Longest wait of a sequence for an engine when none answers; then it is retried. An engine restarts within it.
    wait_for_engine_s: Annotated[float, Meta(ge=0, le=1_000_000_000)] = 30.0
    without_role: Annotated[
        WithoutRole,
        Setting(
            "Action while no engine of a role can be picked: `serve` on the other engines, or `refuse` requests (503).",
            in_file=True,
            panel=PLACEMENT,
        ),
    ] = "serve"
    limits: Limits = Limits()
    moves: MoveSettings = MoveSettings()
    reschedule: RescheduleSettings = RescheduleSettings()
    objectives: Objectives = Objectives()
    sessions: SessionSettings = SessionSettings()
    batches: BatchSettings = BatchSettings()
    roles_by: RolesBy = msgspec.field(default="fixed", name="roles")
    request_timeout_s: Annotated[
        Seconds | None,
        Setting(
            "Longest duration of a request; after it the request gets 504.",
            unit="seconds",
            default="no limit",
            panel=LIMITS,
        ),
    ] = msgspec.field(default=None, name="request-timeout")
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting("Time to finish running requests after a signal to stop.", unit="seconds", panel=SERVER),
    ] = msgspec.field(default=25.0, name="shutdown-timeout")
    max_request_bytes: Annotated[
        AtLeastOne,
        Setting("Largest request body; a larger one gets 413.", unit="bytes", default="64 MiB", panel=LIMITS),
    ] = MAX_REQUEST_BYTES
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=256)], Setting("Number of router processes that share the port.", panel=SERVER)
    ] = 1
    stream_port: Annotated[
        Port,
        Setting(
            "Port to which engines connect their token streams; each further worker uses the next port.",
            default="any free port",
            panel=SERVER,
        ),
    ] = 0
    pooling_servers: Annotated[
        tuple[str, ...],
        Setting(
            "URL of a vLLM server for embeddings, scores and reranking. Repeatable.",
            flag="--pooling-server", metavar="URL", panel=MODEL,
        ),
    ] = ()  # fmt: skip
    pooling_key: Annotated[
        str,
        Setting(
            "API key of pooling servers. Give it as a variable.", flag="", env=POOLING_KEY_VARIABLE,
            default="none", is_key=True,
        ),
    ] = ""  # fmt: skip
    secret: EngineSecret = ""
    openai_layer: Annotated[
        Literal["auto", "vllm", "small"],
        Setting(
            "OpenAI API: `vllm`, or `small` without vLLM and torch; `small` has completions and chat as text. `auto`: "
            "`small` with `tercet up --simulate`, otherwise `vllm`.",
            panel=MODEL,
        ),
    ] = "auto"
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    api_key_file: APIKeyFile = None
    open_to_all: OpenToAll = False
    client_traces: ClientTraces = False
    admin_folders: Annotated[
        tuple[str, ...],
        Setting(
            "Folder of files that `/tercet/v1` may load: programs, scheduling files, plugins. Repeatable.",
            flag="--admin-folder", metavar="DIR", panel=ACCESS,
        ),
    ] = ()  # fmt: skip
    vllm_args: Annotated[
        tuple[str, ...],
        Setting(
            "Flags of vLLM's API server in the router; with `tercet router` they follow `--`.", flag="", panel=MODEL
        ),
    ] = msgspec.field(default=(), name="router-args")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_port + self.workers - 1 > LAST_PORT:
            raise BadRequest(
                f"stream-port: {self.workers} workers need {self.workers} consecutive ports; {LAST_PORT} is the last",
                "stream-port",
            )
        for name, path in self.lora_modules.items():
            require_adapter_name(name, "lora-modules")
            require_text(path, "lora-modules")
        require_objectives(self.roles_by, self.objectives)
        for url in self.pooling_servers:
            require_url(url, "pooling-servers")
        if len({url.rstrip("/") for url in self.pooling_servers}) < len(self.pooling_servers):
            raise BadRequest("pooling-servers: a URL is given twice; remove one", "pooling-servers")

    def require_stream_ports_without(self, port: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if a stream port is the ``port`` for clients."""
        if self.stream_port and self.stream_port <= port < self.stream_port + self.workers:
            raise BadRequest(f"stream-port: clients use the port {port}; choose another one", "stream-port")

    @property
    def serves_without_vllm(self) -> bool:
        """True if the OpenAI API is the small one, without vLLM."""
        return self.openai_layer == "small"

    @property
    def public_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.served_model_name or self.model


_KUBERNETES_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_CONFIGMAP = rf"^({_KUBERNETES_NAME}/)?{_KUBERNETES_NAME}\Z"
_RAY_RECORD = rf"^([^\s/]+:[0-9]{{1,5}}/)?{_KUBERNETES_NAME}\Z"


class RouterConfig(RouterSettings, frozen=True, kw_only=True):
    """Settings of ``tercet router``; ``discovery`` and ``engine_tls`` are groups."""

    engines: Annotated[
        tuple[EngineAddress, ...],
        Setting(
            "URL of an engine; role: prefill, decode, both or store, labels: for scheduling. Repeatable.",
            flag="--engine", metavar="URL[,role=R][,name=N][,label.KEY=V]", read=engine_fields, panel=ENGINES,
        ),
    ] = ()  # fmt: skip
    discovery: DiscoverySettings = DiscoverySettings()
    # Kubernetes sets TERCET_PORT to a URL if a service is called tercet.
    port: Annotated[FixedPort, Setting("Port of the OpenAI API.", env="TERCET_HTTP_PORT", panel=SERVER)] = 8000
    state: Annotated[
        str | None,
        Setting(
            "File that keeps engines, programs and scheduling; routers with the same file share them.",
            metavar="FILE", default="a private file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_configmap: Annotated[
        Annotated[str, Meta(pattern=_CONFIGMAP)] | None,
        Setting(
            "ConfigMap for this state, for routers on several machines.",
            metavar="[NAMESPACE/]NAME", default="a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_ray: Annotated[
        Annotated[str, Meta(pattern=_RAY_RECORD)] | None,
        Setting(
            "Record in Ray's head for this state; for routers on several machines.",
            metavar="[HOST:PORT/]NAME", default="a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    admin_listen: Annotated[
        str | None,
        Setting(
            "Address at which `/tercet/v1` is served instead of the clients' port.",
            metavar="ADDRESS",
            default="off",
            panel=ACCESS,
        ),
    ] = None
    await_engines: Annotated[
        bool, Setting("Start without an engine, and answer 503 until one joins.", default="off", panel=ENGINES)
    ] = False
    supervisor_key: SupervisorKey = ""
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unlike(self.engines, self.discovery, self.await_engines)
        if self.state_ray is not None and self.state_configmap is not None:
            raise BadRequest("state-ray: cannot be combined with state-configmap; remove one", "state-ray")
        self.require_stream_ports_without(self.port)
        address = self.admin_address
        if address is not None and address.port == self.port:
            raise BadRequest(f"admin-listen: clients use the port {self.port}; choose another one", "admin-listen")
        if address is not None and self.stream_port and 0 <= address.port - self.stream_port < self.workers:
            raise BadRequest("admin-listen: token streams use this port; choose another one", "admin-listen")

    @property
    def admin_address(self) -> AdminAddress | None:
        """The address of admin routes; None if they are served at the port for clients."""
        return None if self.admin_listen is None else AdminAddress.of(self.admin_listen)
