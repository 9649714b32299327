"""What `tercet up` shall start: validated once, from flags and a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import yaml

from tercet.fleet import Role
from tercet.protocol import BadRequest

Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class UpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A local fleet: ``prefill``, ``decode`` and ``both`` engines and one front door.

    ``engine-args`` go to every vLLM engine, ``router-args`` to the front door's vLLM layer, as on their command lines.
    ``kv-cache-gib`` is the KV memory of each CPU engine. ``port`` is the front door's, 0 picks a free one.
    """

    model: str = "smollm2"
    served_model_name: str | None = None
    prefill: Count = 1
    decode: Count = 1
    both: Count = 0
    host: str = "127.0.0.1"
    port: Port = 8000
    program: str = "disaggregated"
    program_args: Mapping[str, str] = {}
    dtype: str = "bfloat16"
    kv_cache_gib: Annotated[int, msgspec.Meta(ge=1)] = 1
    log_dir: str | None = None
    engine_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prefill + self.decode + self.both == 0:
            raise BadRequest("prefill, decode and both are all 0: there is no engine to start", "prefill")
        if self.engine_args and not self.engine_args[0].startswith("-"):
            raise BadRequest(
                f"{self.engine_args[0]}: vLLM's own flags come after --, and begin with one", "engine-args"
            )

    @property
    def public_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.served_model_name or self.model

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """Name and role of every engine."""
        counts: list[tuple[Role, int]] = [("prefill", self.prefill), ("decode", self.decode), ("both", self.both)]
        return [
            (f"{role if role != 'both' else 'engine'}-{index}", role)
            for role, count in counts
            for index in range(count)
        ]


def load_up_config(file: Path | None, flags: Mapping[str, Any]) -> UpConfig:
    """The configuration of a YAML file with ``flags`` over it.

    Raises :class:`~tercet.protocol.BadRequest` that names the file, the key, or the flag.
    """
    given = {**_read(file), **flags} if file is not None else dict(flags)
    try:
        return msgspec.convert(given, UpConfig, strict=False)
    except msgspec.ValidationError as error:
        where = f"{file}: " if file is not None else ""
        raise BadRequest(f"{where}{error}") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadRequest(f"config: {file}: {error}", "config") from error
    if not isinstance(content, dict):
        raise BadRequest(f"config: {file} is not a mapping of keys to values", "config")
    return {str(key): value for key, value in cast("dict[Any, Any]", content).items()}
