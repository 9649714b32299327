"""Optional packages, which extras of Tercet install: a router and an engine run without them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from tercet.protocol import BadRequest

Extra = Literal["gateway", "lab", "otel"]
EXTRAS: Mapping[Extra, Mapping[str, str]] = {
    "gateway": {"grpc": "grpcio", "grpc_health": "grpcio-health-checking", "google": "protobuf"},
    "lab": {"matplotlib": "matplotlib", "scipy": "scipy"},
    "otel": {"opentelemetry": "opentelemetry-sdk", "opentelemetry.exporter": "opentelemetry-exporter-otlp"},
}
"""The packages of each extra, by the module that each package provides."""


def require_extra(extra: Extra, user: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest`, with the remedy, if the command ``user`` lacks a package."""
    for module in EXTRAS[extra]:
        import_extra(module, user)


def import_extra(name: str, user: str) -> Any:
    """Import and return a module of an extra's package, such as ``matplotlib.figure``, for a flag or command ``user``.

    Raises :class:`~tercet.protocol.BadRequest` with the installation command if the package is missing.
    """
    try:
        return import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        of: Extra = next(extra for extra, packages in EXTRAS.items() if module in packages)
        raise _lacking(of, module, user) from error


def _lacking(extra: Extra, module: str, user: str) -> BadRequest:
    return BadRequest(
        f"{user}: {EXTRAS[extra][module]} is not installed; install it with: pip install 'tercet[{extra}]'", user
    )
