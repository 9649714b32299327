"""Settings of ``tercet model-router``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import Port, Seconds, Setting, Settings, key_values
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    AdminKey,
    AdminKeyFile,
    APIKeyFile,
    LeastLogged,
    LogLines,
    MostRequestBytes,
    OpenToAll,
    TLSCertificate,
    TLSKey,
    require_pair,
)
from tercet.settings.urls import require_engine_url
from tercet.settings.variables import API_KEY_VARIABLE

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
    poll_s: Annotated[
        Seconds, Setting("Interval at which each router is polled for its models.", unit="seconds")
    ] = msgspec.field(default=1.0, name="poll-interval")  # fmt: skip
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
