"""The router's settings: those that ``tercet router`` and ``tercet up`` share, and the router's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, Role, WithoutRole
from tercet.settings.admin_address import AdminAddress
from tercet.settings.declaration import (
    AtLeastOne,
    NotNegative,
    Seconds,
    Setting,
    Settings,
    complaint,
    key_values,
)
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.move_settings import MoveSettings, RescheduleSettings
from tercet.settings.panels import ACCESS, ENGINES, FAILURES, LIMITS, MODEL, PLACEMENT, SERVER
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    AccessLog,
    AdminKey,
    AdminKeyFile,
    EngineSecret,
    EngineTLS,
    LeastLogged,
    LogLines,
    SupervisorKey,
    TraceRequests,
)
from tercet.settings.role_settings import Objectives, RolesBy, require_objectives
from tercet.settings.session_settings import SessionSettings
from tercet.settings.urls import require_engine_url, require_url
from tercet.settings.variables import POOLING_KEY_VARIABLE

Port = Annotated[int, Meta(ge=0, le=65535)]
LABEL = "label."
_KUBERNETES_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_CONFIGMAP = rf"^({_KUBERNETES_NAME}/)?{_KUBERNETES_NAME}$"
_RAY_RECORD = rf"^([^\s/]+:[0-9]{{1,5}}/)?{_KUBERNETES_NAME}$"
# Prompts of a million tokens are a few megabytes of JSON.


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of the fleet: its name, its server's base URL, and the role that the router gives it.

    ``labels`` are its operator's words about it, which scheduling plugins may go by.
    """

    name: Annotated[str, Meta(pattern=r"^[^/\s]+$", max_length=256)]
    url: str
    role: Role = "both"
    labels: Mapping[Annotated[str, Meta(min_length=1)], str] = {}

    def __post_init__(self) -> None:
        require_engine_url(self.url, "url")


def engine_fields(given: Any, index: int) -> Any:
    """An :class:`EngineAddress` as a mapping, out of one or of ``URL[,role=...][,name=...][,label.KEY=...]``.

    The ``index`` names an engine that has no name. Raises :class:`~tercet.protocol.BadRequest`.
    """
    unnamed = {"name": f"engine-{index}"}
    if not isinstance(given, str):
        return {**unnamed, **cast("dict[str, Any]", given)} if isinstance(given, Mapping) else given
    url, *rest = given.split(",")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not a URL such as http://127.0.0.1:8001", "url")
    told = key_values(rest, given)
    labels = {key.removeprefix(LABEL): value for key, value in told.items() if key.startswith(LABEL)}
    fields = {key: value for key, value in told.items() if not key.startswith(LABEL)}
    return {**unnamed, "url": url.rstrip("/"), "labels": labels, **fields}


def engine_address(given: str, index: int) -> EngineAddress:
    """One ``--engine`` of a command line; raises :class:`~tercet.protocol.BadRequest`."""
    try:
        return msgspec.convert(engine_fields(given, index), EngineAddress)
    except msgspec.ValidationError as error:
        raise complaint("--engine", EngineAddress, given, error) from None
    except BadRequest as error:
        raise BadRequest(f"--engine: {error.message}", "--engine") from None


class RetryBudget(Settings, frozen=True):
    """How much is done for one sequence before its client gets the error."""

    retries: Annotated[
        NotNegative, Setting("Further attempts for a sequence that engines fail, without a new token.", panel=FAILURES)
    ] = 2
    within_s: Annotated[
        Seconds,
        Setting(
            "Stop retrying this long after the last token that the client got, or after the request if it got none.",
            unit="seconds",
            in_file=True,
            panel=FAILURES,
        ),
    ] = msgspec.field(default=600.0, name="retry-within")


class Limits(Settings, frozen=True):
    """How much may be under way in one process. A request comes in while all of these are below their limits.

    ``in_flight`` counts sequences, of which a request has one for each prompt and choice, and at least one; ``tokens``
    the prompt tokens of sequences on engines, each engine's own; the ones ``per_engine`` are multiplied by the engines
    that decode and can be picked. ``sequences``, ``at_once`` and ``items`` are one request's, ``long_queued``
    one client's: no fleet is full by them.
    """

    in_flight: Annotated[
        AtLeastOne | None,
        Setting(
            "Sequences under way at once (a request has one for each prompt and choice); requests wait beyond that.",
            default="no limit",
            panel=LIMITS,
        ),
    ] = msgspec.field(default=None, name="max-in-flight")
    in_flight_per_engine: Annotated[
        AtLeastOne | None,
        Setting("The same, for each engine that decodes.", default="no limit", panel=LIMITS),
    ] = msgspec.field(default=None, name="max-in-flight-per-engine")
    tokens: Annotated[
        AtLeastOne | None,
        Setting("Prompt tokens on engines from which on requests wait.", default="no limit", panel=LIMITS),
    ] = msgspec.field(default=None, name="max-in-flight-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting("The same, for each engine that decodes.", default="no limit", panel=LIMITS),
    ] = msgspec.field(default=None, name="max-in-flight-tokens-per-engine")
    queued: Annotated[
        NotNegative, Setting("Requests that may wait; more get 429.", panel=LIMITS)
    ] = msgspec.field(default=1000, name="max-queued")  # fmt: skip
    queue_timeout_s: Annotated[
        Seconds, Setting("Longest wait of a request for a place; then it gets 429.", unit="seconds", panel=LIMITS)
    ] = msgspec.field(default=30.0, name="queue-timeout")

    sequences: Annotated[
        AtLeastOne, Setting("Sequences of one request, prompts times `n`; more get 400.", panel=LIMITS, in_file=True)
    ] = msgspec.field(default=512, name="max-sequences")
    at_once: Annotated[
        AtLeastOne,
        Setting(
            "Sequences of one request under way at once; the others follow as these end.", panel=LIMITS, in_file=True
        ),
    ] = msgspec.field(default=128, name="max-sequences-at-once")

    items: Annotated[
        AtLeastOne,
        Setting(
            "Lists and objects in a request's body, such as messages, parts and tools; more get 400.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=4096, name="max-request-items")
    long_queued: Annotated[
        NotNegative,
        Setting(
            "Long bodies of one client that wait while one of them is prepared; more get 429.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=64, name="max-long-queued")

    @property
    def any(self) -> bool:
        """Whether the fleet is full at some point."""
        return any((self.in_flight, self.in_flight_per_engine, self.tokens, self.tokens_per_engine))


class RouterSettings(Settings, frozen=True):
    """What every router can be told.

    ``retries``, ``limits``, ``moves``, ``reschedule``, ``objectives`` and ``sessions`` are groups; limits are
    one worker's own. ``model`` gives the tokenizer and the chat template; the engines must serve the same one.
    """

    model: Annotated[
        str, Setting("`smollm2` (built in), a checkpoint's directory, or any hub id that vLLM takes.", panel=MODEL)
    ] = "smollm2"
    served_model_name: Annotated[
        str | None, Setting("The model's name in the OpenAI API.", default="the model's", panel=MODEL)
    ] = None  # fmt: skip
    model_aliases: Annotated[
        tuple[str, ...],
        Setting(
            "One more name of the model, that rules may go by; repeatable.",
            flag="--model-alias",
            in_file=True,
            panel=MODEL,
        ),
    ] = ()
    host: Annotated[str, Setting("Address to listen on.", panel=SERVER)] = "127.0.0.1"
    program: Annotated[
        str, Setting("A built-in program (such as `data_parallel`), or your own: `file.py:function`.", panel=PLACEMENT)
    ] = "disaggregated"
    program_args: Annotated[
        Mapping[str, str], Setting("A parameter of the program; repeatable.", flag="--program-arg", panel=PLACEMENT)
    ] = {}
    return_after: Annotated[
        NotNegative,
        Setting(
            "Failures of a program in a row before the one before it is used again; 0: never.",
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
        Setting("`off`: vLLM's own code writes streams too, at a higher cost per token.", panel=SERVER),
    ] = "on"
    log_format: LogLines = "text"
    access_log: AccessLog = False
    trace_requests: TraceRequests = 1000
    scheduling: Annotated[
        str | None,
        Setting(
            "A scheduling file (YAML), whose profiles picks may name.", metavar="FILE", default="none", panel=PLACEMENT
        ),
    ] = None
    lora_modules: Annotated[
        Mapping[str, str],
        Setting(
            "A LoRA adapter that engines are to have, and where its files are on them; repeatable.",
            flag="--lora-modules",
            metavar="NAME=PATH",
            panel=MODEL,
        ),
    ] = {}
    missing_adapters: Annotated[
        Literal["load", "leave"],
        Setting(
            "`load` one of these on an engine that lacks it, or `leave` the engine out of requests for it.",
            in_file=True,
            panel=MODEL,
        ),
    ] = "load"
    retries: RetryBudget = RetryBudget()
    stuck_after_s: Annotated[
        Seconds,
        Setting(
            "Time without progress after which an engine's sequences continue on other engines; must exceed its "
            "longest step.",
            unit="seconds",
            panel=FAILURES,
        ),
    ] = msgspec.field(default=5.0, name="stuck-after")
    wait_for_engine_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting(
            "When no engine answers, how long a sequence waits for one before it is tried again.",
            unit="seconds",
            in_file=True,
            panel=FAILURES,
        ),
    ] = msgspec.field(default=30.0, name="wait-for-engine")
    without_role: Annotated[
        WithoutRole,
        Setting(
            "While no engine of a role can be picked: `serve` on those that are left, or `refuse` what needs it (503).",
            in_file=True,
            panel=PLACEMENT,
        ),
    ] = "serve"
    limits: Limits = Limits()
    moves: MoveSettings = MoveSettings()
    reschedule: RescheduleSettings = RescheduleSettings()
    objectives: Objectives = Objectives()
    sessions: SessionSettings = SessionSettings()
    roles_by: RolesBy = msgspec.field(default="fixed", name="roles")
    request_timeout_s: Annotated[
        Seconds | None,
        Setting("Longest duration of a request; then it gets 504.", unit="seconds", default="no limit", panel=LIMITS),
    ] = msgspec.field(default=None, name="request-timeout")
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting(
            "Longest time that running requests may continue after a signal to stop.", unit="seconds", panel=SERVER
        ),
    ] = msgspec.field(default=25.0, name="shutdown-timeout")
    max_request_bytes: Annotated[
        AtLeastOne, Setting("Size of a request's body; larger: 413.", unit="bytes", default="64 MiB", panel=LIMITS)
    ] = MAX_REQUEST_BYTES
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=256)], Setting("Router processes that share the port.", panel=SERVER)
    ] = 1  # fmt: skip
    stream_port: Annotated[
        Port,
        Setting(
            "Port to which engines connect their token streams; each further worker takes the next one.",
            default="any free one",
            panel=SERVER,
        ),
    ] = 0
    pooling_servers: Annotated[
        tuple[str, ...],
        Setting(
            "A vLLM server of a pooling model, to which embeddings, scores and reranking go. Repeatable.",
            flag="--pooling-server", metavar="URL", panel=MODEL,
        ),
    ] = ()  # fmt: skip
    pooling_key: Annotated[
        str,
        Setting(
            "The API key of pooling servers; best given as a variable.", flag="", env=POOLING_KEY_VARIABLE,
            default="none", is_key=True,
        ),
    ] = ""  # fmt: skip
    secret: EngineSecret = ""
    openai_layer: Annotated[
        Literal["auto", "vllm", "small"],
        Setting(
            "OpenAI API: vLLM's, or a small one (completions and chat as text) that needs neither vLLM nor torch; "
            "auto: small before engines of `tercet up --simulate`, else vLLM's.",
            panel=MODEL,
        ),
    ] = "auto"
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    api_key_file: Annotated[
        str | None,
        Setting(
            "A file of clients' keys, one a line, read again when it changes.", metavar="FILE", default="none",
            panel=ACCESS,
        ),
    ] = None  # fmt: skip
    open_to_all: Annotated[
        bool,
        Setting("Serve other machines though no key is asked of clients.", default="off", panel=ACCESS),
    ] = False
    admin_folders: Annotated[
        tuple[str, ...],
        Setting(
            "A folder of files that `/tercet/v1` may name: programs, scheduling files, plugins. Repeatable.",
            flag="--admin-folder", metavar="DIR", panel=ACCESS,
        ),
    ] = ()  # fmt: skip
    vllm_args: Annotated[
        tuple[str, ...],
        Setting("Flags of the router's vLLM layer; with `tercet router` after `--`.", flag="", panel=MODEL),
    ] = msgspec.field(default=(), name="router-args")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_port + self.workers - 1 > 65535:
            raise BadRequest(f"stream-port: {self.workers} workers need as many ports from it on", "stream-port")
        if self.openai_layer == "small" and self.workers > 1:
            raise BadRequest("workers: the small OpenAI layer has one process; see openai-layer", "workers")
        require_objectives(self.roles_by, self.objectives)
        for url in self.pooling_servers:
            require_url(url, "pooling-servers")
        if len({url.rstrip("/") for url in self.pooling_servers}) < len(self.pooling_servers):
            raise BadRequest("pooling-servers: one of them is there twice", "pooling-servers")

    def require_stream_ports_beside(self, port: int) -> None:
        """Raises :class:`~tercet.protocol.BadRequest` if one of them is the ``port`` for clients."""
        if self.stream_port and self.stream_port <= port < self.stream_port + self.workers:
            raise BadRequest(f"stream-port: clients come to the port {port}; choose another one", "stream-port")

    @property
    def serves_without_vllm(self) -> bool:
        """Whether the OpenAI API is the small one."""
        return self.openai_layer == "small"

    @property
    def public_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.served_model_name or self.model


class RouterConfig(RouterSettings, frozen=True, kw_only=True):
    """Everything that ``tercet router`` needs; ``discovery`` and ``engine_tls`` are groups."""

    engines: Annotated[
        tuple[EngineAddress, ...],
        Setting(
            "An engine; role is prefill, decode or both, labels are for scheduling. Repeatable.", flag="--engine",
            metavar="URL[,role=R][,name=N][,label.KEY=V]", read=engine_fields, panel=ENGINES,
        ),
    ] = ()  # fmt: skip
    discovery: DiscoverySettings = DiscoverySettings()
    # Kubernetes sets TERCET_PORT, to a URL, wherever a service is called tercet.
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], Setting("Port of the OpenAI API.", env="TERCET_HTTP_PORT", panel=SERVER)
    ] = 8000
    state: Annotated[
        str | None,
        Setting(
            "File that keeps engines, programs and scheduling; routers with the same file share them.",
            metavar="FILE", default="of this router alone", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_configmap: Annotated[
        Annotated[str, Meta(pattern=_CONFIGMAP)] | None,
        Setting(
            "The same in a ConfigMap of Kubernetes, for routers on several machines.",
            metavar="[NAMESPACE/]NAME", default="in a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_ray: Annotated[
        Annotated[str, Meta(pattern=_RAY_RECORD)] | None,
        Setting(
            "The same in the head of a Ray cluster, for routers on several machines.",
            metavar="[HOST:PORT/]NAME", default="in a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    admin_listen: Annotated[
        str | None,
        Setting(
            "Serve `/tercet/v1` here alone, not at the clients' port.", metavar="ADDRESS", default="off", panel=ACCESS
        ),
    ] = None
    await_engines: Annotated[
        bool,
        Setting("Begin without an engine, and answer 503 until one joins.", default="off", panel=ENGINES),
    ] = False
    supervisor_key: SupervisorKey = ""
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unlike(self.engines, self.discovery, self.await_engines)
        if self.state_ray is not None and self.state_configmap is not None:
            raise BadRequest("state-ray: the state is in state-configmap already; give one of them", "state-ray")
        self.require_stream_ports_beside(self.port)
        address = self.admin_address
        if address is not None and address.port == self.port:
            raise BadRequest(f"admin-listen: clients come to the port {self.port}; choose another one", "admin-listen")
        if address is not None and self.stream_port and 0 <= address.port - self.stream_port < self.workers:
            raise BadRequest("admin-listen: a token stream has this port; choose another one", "admin-listen")

    @property
    def admin_address(self) -> AdminAddress | None:
        """Where admin routes are served, if apart from the port for clients."""
        return None if self.admin_listen is None else AdminAddress.of(self.admin_listen)


def require_unlike(engines: Sequence[EngineAddress], discovery: DiscoverySettings, awaited: bool = False) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` for no engines, if none are found or ``awaited``, and for two alike.

    Engines are alike if they have one name or one URL.
    """
    if not engines and not discovery.is_wanted and not awaited:
        raise BadRequest(
            "engines: at least one is needed, or --endpoint-selector, --pool-name or --roster to find some, or "
            "--await-engines for those that join",
            "engines",
        )
    twice = [name for name, times in Counter(engine.name for engine in engines).items() if times > 1]
    if twice:
        raise BadRequest(f"engines: two engines are called {twice[0]}; give them names", "engines")
    again = [url for url, times in Counter(engine.url.rstrip("/") for engine in engines).items() if times > 1]
    if again:
        raise BadRequest(f"engines: {again[0]} is there twice", "engines")
