"""What `tercet up` shall start: validated once, from flags and a YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import yaml

from tercet.cluster.vllm_flags import check_flags
from tercet.protocol import BadRequest, Role

Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
# Fields that are flags of `tercet router`.
DOOR_FIELDS = (
    "scheduling", "retries", "retry_within", "max_in_flight", "max_in_flight_per_engine", "max_in_flight_tokens",
    "max_in_flight_tokens_per_engine", "max_queued", "queue_timeout", "request_timeout", "max_request_bytes",
    "workers",
)  # fmt: skip


class UpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A local fleet: ``prefill``, ``decode`` and ``both`` engines and one front door.

    ``engine-args`` go to every vLLM engine, ``router-args`` to the front door's vLLM layer, as on their command lines.
    ``kv-cache-gib`` is the KV memory of each CPU engine. ``port`` is the front door's, 0 picks a free one. With
    ``dev``, a program or the ``scheduling`` file is loaded anew when it changes. The fields from ``scheduling`` to
    ``workers`` are flags of ``tercet router``. With ``simulate``, a profile, engines compute nothing at
    its pace; ``options`` are theirs.
    """

    model: str = "smollm2"
    served_model_name: str | None = None
    model_aliases: tuple[str, ...] = ()
    prefill: Count = 1
    decode: Count = 1
    both: Count = 0
    host: str = "127.0.0.1"
    port: Port = 8000
    program: str = "disaggregated"
    program_args: Mapping[str, str] = {}
    dev: bool = False
    scheduling: str | None = None
    retries: Annotated[int, msgspec.Meta(ge=0)] | None = None
    retry_within: Seconds | None = None
    max_in_flight: AtLeastOne | None = None
    max_in_flight_per_engine: AtLeastOne | None = None
    max_in_flight_tokens: AtLeastOne | None = None
    max_in_flight_tokens_per_engine: AtLeastOne | None = None
    max_queued: Annotated[int, msgspec.Meta(ge=0)] | None = None
    queue_timeout: Seconds | None = None
    request_timeout: Seconds | None = None
    max_request_bytes: AtLeastOne | None = None
    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    dtype: str | None = None
    kv_cache_gib: Annotated[int, msgspec.Meta(ge=1)] = 1
    log_dir: str | None = None
    simulate: str | None = None
    options: Mapping[str, str] = {}
    engine_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prefill + self.decode + self.both == 0:
            raise BadRequest("--prefill, --decode and --both are all 0: there is no engine to start", "prefill")
        if self.options and self.simulate is None:
            raise BadRequest("options: go with simulate", "options")
        if self.engine_args and self.simulate is not None:
            raise BadRequest("engine-args: with simulate there is no vLLM engine that they could go to", "engine-args")
        check_flags(self.engine_args, "engine-args")
        check_flags(self.router_args, "router-args")

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
    where = "" if file is None else f"--config {file}: "
    given = {} if file is None else _read(file)
    try:
        _require_known(given)
        return msgspec.convert({**given, **flags}, UpConfig, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}{_complaint(error)}", "config") from error
    except BadRequest as error:
        raise BadRequest(f"{where}{error.message}", error.param) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"--config {file}: {error.strerror}", "config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequest(f"--config {file}: it is not YAML: {' '.join(str(error).split())}", "config") from error
    if not isinstance(content, dict):
        raise BadRequest(f"--config {file}: it is not a mapping of keys to values", "config")
    keys = cast("dict[Any, Any]", content)
    return {str(key): _with_text_inside(value) for key, value in keys.items()}


def _with_text_inside(value: Any) -> Any:
    """``program-args`` and ``engine-args`` are text, however YAML reads ``{min_send: 64}`` and ``[--seed, 1]``."""
    if isinstance(value, dict):
        return {str(key): _as_text(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_as_text(item) for item in cast("list[Any]", value)]
    return value


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _require_known(given: Mapping[str, Any]) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(UpConfig)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise BadRequest(f"unknown key {key}; {hint}", key)


def _complaint(error: msgspec.ValidationError) -> str:
    """``prefill: expected ...`` out of msgspec's ``Expected ... - at `$.prefill```."""
    text, _, path = str(error).partition(" - at ")
    key = re.sub(r"[`$]", "", path).lstrip(".")
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else text
