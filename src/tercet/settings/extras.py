"""What extras of Tercet install: packages of this repository, found by entry points, and libraries of others.

A router and an engine run without them. A package of this repository adds commands, settings and parts; nothing in
``tercet`` imports it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from tercet.protocol import BadRequest
from tercet.protocol.entry_points import entry_points

Extra = Literal["gateway", "lab", "otel", "ray"]
EXTRAS: Mapping[Extra, Mapping[str, str]] = {
    "gateway": {"grpc": "grpcio", "grpc_health": "grpcio-health-checking", "google": "protobuf"},
    "lab": {"matplotlib": "matplotlib", "scipy": "scipy"},
    "otel": {"opentelemetry": "opentelemetry-sdk", "opentelemetry.exporter": "opentelemetry-exporter-otlp"},
}
"""The libraries of each extra, by the module that each library provides."""


def provided(group: str, name: str, extra: str, user: str) -> Any:
    """Import and return what a package declares as ``name`` in ``group``, for a flag or command ``user``.

    Raises :class:`~tercet.protocol.BadRequest` with the installation command if the package, which ``extra`` installs,
    is missing.
    """
    module, _, attribute = entry_points(group).get(name, "").partition(":")
    try:
        found = import_module(module) if module else None
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        found = None  # it was removed without its metadata
    if found is None:
        raise BadRequest(f"{user}: tercet-{extra} is not installed; {remedy(extra)}", user)
    return getattr(found, attribute) if attribute else found


def remedy(extra: str) -> str:
    """Return the advice to install ``extra``."""
    return f"install it with: pip install 'tercet[{extra}]'"


def require_extra(extra: Extra, user: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest`, with the remedy, if the command ``user`` lacks a library."""
    for module in EXTRAS[extra]:
        import_extra(module, user)


def import_extra(name: str, user: str) -> Any:
    """Import and return a module of an extra's library, such as ``matplotlib.figure``, for a flag or command ``user``.

    Raises :class:`~tercet.protocol.BadRequest` with the installation command if the library is missing.
    """
    try:
        return import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        of: Extra = next(extra for extra, packages in EXTRAS.items() if module in packages)
        raise BadRequest(f"{user}: {EXTRAS[of][module]} is not installed; {remedy(of)}", user) from error
