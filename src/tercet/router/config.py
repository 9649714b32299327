"""The front door's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from tercet.fleet import Role
from tercet.protocol import BadRequest


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of the fleet: its name, its server's base URL, and the role that the router gives it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[^/\s]+$", max_length=256)]
    url: str
    role: Role = "both"

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise BadRequest(f"url: {self.url!r} is not a URL such as http://127.0.0.1:8001", "url")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``tercet router`` needs.

    ``model`` gives the tokenizer and the chat template; the engines must serve the same one. ``program`` is a
    built-in name or ``file.py:function``, ``program_args`` its keyword parameters as text. ``vllm_args`` go to vLLM's
    OpenAI server (``--chat-template``, ``--enable-auto-tool-choice``, ...). ``model_aliases`` are further names for
    the model. After ``return_after`` failures of a program in a row the one before it is used again; 0 means never.
    ``dev`` loads a program anew when its file changes.
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
    log_level: str = "info"
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.engines:
            raise BadRequest("engine: at least one is needed", "engine")
        names = [engine.name for engine in self.engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadRequest(f"engine: two engines are called {twice}; give them names", "engine")
