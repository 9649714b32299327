"""What ``tercet model-router`` can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import Seconds, Setting, Settings, key_values
from tercet.settings.process_settings import (
    MAX_REQUEST_BYTES,
    AdminKey,
    LeastLogged,
    LogLines,
    MostRequestBytes,
    TLSCertificate,
    TLSKey,
    require_pair,
)
from tercet.settings.router_config import Port
from tercet.settings.urls import require_engine_url
from tercet.settings.variables import API_KEY_VARIABLE

Weight = Annotated[float, Meta(ge=0, le=1_000_000)]


class ModelBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router, and its share of the requests for its models."""

    url: str
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        require_engine_url(self.url, "url")


def backend_fields(given: Any, _index: int) -> Any:
    """A :class:`ModelBackend` as a mapping, out of one or of ``URL[,weight=W]``."""
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
    """Raise :class:`~tercet.protocol.BadRequest` for none, and for one that is there twice."""
    if not backends:
        raise BadRequest(f"{name}: at least one is needed", name)
    urls = [each.url.rstrip("/") for each in backends]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise BadRequest(f"{name}: {twice} is there twice", name)


class ModelRouterConfig(Settings, frozen=True, kw_only=True):
    """One model router, before the routers of several models."""

    routers: Annotated[
        tuple[ModelBackend, ...],
        Setting(
            "A router, and its share of the requests for its models next to others that serve the same names. "
            "Repeatable.",
            flag="--router", metavar="URL[,weight=W]", read=backend_fields,
        ),
    ] = ()  # fmt: skip
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Setting("Port of its HTTP server; 0 is any free one.", env="TERCET_HTTP_PORT")] = 8000
    poll_s: Annotated[
        Seconds, Setting("Interval at which each router is asked for its models.", unit="seconds")
    ] = msgspec.field(default=1.0, name="poll-interval")  # fmt: skip
    max_request_bytes: MostRequestBytes = MAX_REQUEST_BYTES
    shutdown_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000_000)],
        Setting("Longest time that running requests may continue after a signal to stop.", unit="seconds"),
    ] = msgspec.field(default=25.0, name="shutdown-timeout")
    router_key: Annotated[
        str,
        Setting(
            "The key by which it asks routers for their models; clients' keys are passed on. Best given as a variable.",
            flag="", env=API_KEY_VARIABLE, default="none", is_key=True,
        ),
    ] = ""  # fmt: skip
    admin_key: AdminKey = ""
    tls_cert: TLSCertificate = None
    tls_key: TLSKey = None
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_backends(self.routers, "routers")
        require_pair(self.tls_cert, self.tls_key)
