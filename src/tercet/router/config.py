"""The front door's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from tercet.protocol import BadRequest, Role
from tercet.router.admission import Limits
from tercet.router.recovery import RetryBudget

# Prompts of a million tokens are a few megabytes of JSON.
MAX_REQUEST_BYTES = 64 * 1024 * 1024


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of the fleet: its name, its server's base URL, and the role that the router gives it.

    ``labels`` are its operator's words about it, which scheduling plugins may go by.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[^/\s]+$", max_length=256)]
    url: str
    role: Role = "both"
    labels: Mapping[Annotated[str, msgspec.Meta(min_length=1)], str] = {}

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise BadRequest(f"url: {self.url!r} is not a URL such as http://127.0.0.1:8001", "url")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``tercet router`` needs.

    ``model`` gives the tokenizer and the chat template; the engines must serve the same one. ``program`` is a
    built-in name or ``file.py:function``, ``program_args`` its keyword parameters as text. ``vllm_args`` go to vLLM's
    OpenAI server (``--chat-template``, ``--enable-auto-tool-choice``, ...). ``model_aliases`` are further names for
    the model. After ``return_after`` failures of a program in a row the one before it is used again; 0 means never.
    ``dev`` loads a program, or the scheduling file, anew when its file changes; ``scheduling`` is that file's path.

    ``retries`` is what is done for a sequence whose engine fails, ``limits`` how much may be under way. A request that
    has not ended ``request_timeout`` seconds after it was let in is ended with an error (None: never); one of more than
    ``max_request_bytes`` bytes is refused. ``workers`` processes share the port; limits are each one's own. Engines
    connect their token streams to ``stream_port`` of this machine, to the next ones for further workers; 0 is any.
    """

    model: str
    served_model_name: str
    model_aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    engines: tuple[EngineAddress, ...]
    program: str = "disaggregated"
    program_args: Mapping[str, str] = {}
    return_after: Annotated[int, msgspec.Meta(ge=0)] = 5
    dev: bool = False
    scheduling: str | None = None
    retries: RetryBudget = RetryBudget()
    limits: Limits = Limits()
    request_timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_request_bytes: Annotated[int, msgspec.Meta(ge=1)] = MAX_REQUEST_BYTES
    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    stream_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    log_level: str = "info"
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.engines:
            raise BadRequest("engine: at least one is needed", "engine")
        if self.stream_port and self.stream_port + self.workers - 1 > 65535:
            raise BadRequest(f"stream_port: {self.workers} workers need as many ports from it on", "stream_port")
        names = [engine.name for engine in self.engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadRequest(f"engine: two engines are called {twice}; give them names", "engine")
