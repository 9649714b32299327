"""What installed packages add to Tercet, by entry points, and what extras install: packages and libraries.

Entry points are read without an import of their packages. ``importlib.metadata`` is not used: it imports forty modules,
and ``tercet --help`` needs the commands. A router and an engine run without the extras. A package of this repository
adds commands, settings and parts; nothing in ``tercet`` imports it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tercet.protocol import BadRequest

COMMANDS = "tercet.commands"
"""Commands of ``tercet``, by name."""
PARTS = "tercet.parts"
"""Functions and modules that commands use, by the names in these commands."""
SETTINGS = "tercet.settings"
"""Settings of commands, by the command's name."""


def entry_points(group: str) -> Mapping[str, str]:
    """Return the places, ``module`` or ``module:name``, that installed packages declare in ``group``, by name."""
    return _declared().get(group, {})


@cache
def _declared() -> Mapping[str, Mapping[str, str]]:
    """Return all entry points, by group: the files are read once in a process."""
    found: dict[str, dict[str, str]] = {}
    for folder in dict.fromkeys(sys.path):
        for file in sorted(Path(folder).glob("*.dist-info/entry_points.txt")):
            section = ""
            for line in file.read_text(encoding="utf-8").splitlines():
                name, equals, place = (each.strip() for each in line.partition("="))
                if line.startswith("["):
                    section = line.strip().strip("[]")
                elif equals:
                    found.setdefault(section, {}).setdefault(name, place)
    return found


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
