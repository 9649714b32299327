"""Settings of the router that ``tercet router`` and ``tercet up`` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, WithoutRole
from tercet.protocol.hosts import LAST_PORT
from tercet.protocol.names import require_adapter_name, require_text
from tercet.settings.declaration import AtLeastOne, NotNegative, Port, Seconds, Setting, Settings
from tercet.settings.limit_settings import Limits
from tercet.settings.move_settings import MoveSettings, RescheduleSettings
from tercet.settings.panels import ACCESS, FAILURES, LIMITS, MODEL, PLACEMENT, SERVER
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    AccessLog,
    AdminKey,
    AdminKeyFile,
    APIKeyFile,
    ClientTraces,
    EngineSecret,
    LogLines,
    OpenToAll,
    TraceRequests,
)
from tercet.settings.retry_settings import RetryBudget
from tercet.settings.role_settings import Objectives, RolesBy, require_objectives
from tercet.settings.session_settings import SessionSettings
from tercet.settings.urls import require_url
from tercet.settings.variables import POOLING_KEY_VARIABLE


class RouterSettings(Settings, frozen=True):
    """Settings that ``tercet router`` and ``tercet up`` share.

    ``retries``, ``limits``, ``moves``, ``reschedule``, ``objectives`` and ``sessions`` are groups; limits apply to each
    worker separately. ``model`` has the tokenizer and the chat template; the engines must serve the same model.
    """

    model: Annotated[
        str,
        Setting("Model: `smollm2`, a checkpoint's directory, or a hub id; `smollm2` is built in.", panel=MODEL),
    ] = "smollm2"
    served_model_name: Annotated[
        str | None, Setting("Name of the model in the OpenAI API.", default="the value of --model", panel=MODEL)
    ] = None  # fmt: skip
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
    wait_for_engine_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting(
            "Longest wait of a sequence for an engine when none answers; after it the sequence is retried.",
            unit="seconds",
            in_file=True,
            panel=FAILURES,
        ),
    ] = msgspec.field(default=30.0, name="wait-for-engine")
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
        Setting(
            "Time to finish running requests after a signal to stop.",
            unit="seconds",
            panel=SERVER,
        ),
    ] = msgspec.field(default=25.0, name="shutdown-timeout")
    max_request_bytes: Annotated[
        AtLeastOne,
        Setting("Largest request body; a larger one gets 413.", unit="bytes", default="64 MiB", panel=LIMITS),
    ] = MAX_REQUEST_BYTES
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=256)], Setting("Number of router processes that share the port.", panel=SERVER)
    ] = 1  # fmt: skip
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
