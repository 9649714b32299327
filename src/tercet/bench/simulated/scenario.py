"""The description of a simulated fleet: a line for the command line, or a YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tercet.protocol import BadRequest, Role
from tercet.settings.declaration import complaint
from tercet.settings.decoding import load_yaml

SHORT = re.compile(r"(\d+)P(\d+)D(@[^,=@]+)?")
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


class EngineGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal engines; ``profile`` (a shipped name or a JSON file) and ``options`` go before the run's own.

    Engines with the same ``host`` share a machine: they slow one another while they compute, as their profiles say.
    Without one, each has a machine to itself.
    """

    role: Role
    count: int = 1
    host: str | None = None
    profile: str | None = None
    options: Mapping[str, Any] = {}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engine ``engine`` dies at second ``at`` and comes back, empty, ``down`` seconds later (``None``: never)."""

    engine: str
    at: float
    down: float | None = None


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet; engines are called by their role and number, ``prefill-0``, ``decode-0``, ``both-0``, ..."""

    engines: tuple[EngineGroup, ...]
    faults: tuple[Fault, ...] = ()


def parse_fleet(given: str) -> FleetSpec:
    """``ROLE=COUNT[@HOST][,...]``, ``2P6D[@HOST]`` or the path of a YAML file.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    short = SHORT.fullmatch(given)
    if short:
        host = short[3] or ""
        given = f"prefill={short[1]}{host},decode={short[2]}{host}"
    spec = FleetSpec(engines=tuple(_group(part) for part in given.split(","))) if "=" in given else _from_file(given)
    return _checked(spec)


def _group(part: str) -> EngineGroup:
    role, _, rest = part.partition("=")
    count, at, host = rest.partition("@")
    if role not in ROLES:
        raise BadRequest(f"fleet: {role!r} is no role; choose {', '.join(ROLES)}", "fleet")
    if not count.isdecimal() or bool(at) != bool(host):
        raise BadRequest(f"fleet: {part!r} is not ROLE=COUNT[@HOST]", "fleet")
    return EngineGroup(role=role, count=int(count), host=host or None)


def _from_file(path: str) -> FleetSpec:
    file = Path(path).expanduser()
    if not file.is_file():
        raise BadRequest(f"fleet: {path!r} is neither ROLE=COUNT[@HOST][,...] nor such as 2P6D nor a file", "fleet")
    content = load_yaml(file, f"fleet: {path}", "fleet")
    try:
        return msgspec.convert(content, FleetSpec)
    except msgspec.ValidationError as error:
        raise complaint(f"fleet: {path}: $", FleetSpec, content, error, "fleet") from error


def _checked(spec: FleetSpec) -> FleetSpec:
    if not spec.engines or any(group.count < 1 for group in spec.engines):
        raise BadRequest("fleet: every group needs at least one engine", "fleet")
    names = set(names_of(spec))
    for fault in spec.faults:
        if fault.engine not in names:
            raise BadRequest(f"fleet: faults: there is no engine {fault.engine!r}", "fleet")
        if fault.at < 0 or (fault.down is not None and fault.down <= 0):
            raise BadRequest(f"fleet: faults: {fault.engine}: at and down are seconds from now on", "fleet")
    return spec


def names_of(spec: FleetSpec) -> list[str]:
    """The names of a fleet's engines, in order."""
    return [f"{group.role}-{index}" for group, index in members_of(spec)]


def members_of(spec: FleetSpec) -> list[tuple[EngineGroup, int]]:
    """Each engine as its group and its number among those of its role."""
    seen: dict[str, int] = {}
    found: list[tuple[EngineGroup, int]] = []
    for group in spec.engines:
        for _ in range(group.count):
            index = seen[group.role] = seen.get(group.role, -1) + 1
            found.append((group, index))
    return found
