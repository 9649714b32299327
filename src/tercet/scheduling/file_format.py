"""The scheduling file: YAML in the form of llm-d's ``EndpointPickerConfig``, read strictly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.decoding import load_yaml

T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class PluginEntry(_Strict, frozen=True):
    """One plugin: its type, what profiles call it (its type, if not said), and its parameters."""

    type: Name
    name: Name | None = None
    parameters: dict[str, Any] | None = None


class PluginUse(_Strict, frozen=True):
    """A plugin in a profile; ``weight`` is for scorers, 1 if not said."""

    plugin_ref: Name
    weight: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None


class ProfileConfig(_Strict, frozen=True):
    """A profile: filters run in the order in which they stand here."""

    name: Name
    plugins: tuple[PluginUse, ...] = ()


class SchedulingConfig(_Strict, frozen=True):
    """The whole file. ``api_version`` and ``kind`` may be there and change nothing."""

    plugins: tuple[PluginEntry, ...]
    scheduling_profiles: Annotated[tuple[ProfileConfig, ...], Meta(min_length=1)]
    api_version: str | None = None
    kind: Literal["EndpointPickerConfig"] | None = None


def read_config(path: Path) -> SchedulingConfig:
    """The file's content. Raises :class:`~tercet.protocol.BadRequest`, which names the field that is wrong."""
    content = load_yaml(path, f"scheduling: {path}", "scheduling")
    return convert(content, SchedulingConfig, "")


def convert(content: object, to: type[T], at: str) -> T:
    """``content`` as a record; ``at`` is its place in the file. Raises :class:`~tercet.protocol.BadRequest`."""
    try:
        return msgspec.convert(content, to)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        place = f"{at}{where.rstrip('`')}"
        unknown = re.search(r"unknown field `(.*)`", reason)
        if unknown:
            place, reason = f"{place}.{unknown[1]}", f"there is no such field here; {_known(to, where)}"
        place = place.lstrip(".") or "scheduling"
        raise BadRequest(f"{place}: {reason}", place) from error


def _known(top: type[Any], where: str) -> str:
    """The names of the fields at a path such as ``.plugins[...]``."""
    found: msgspec.inspect.Type = msgspec.inspect.type_info(top)
    for step in re.findall(r"\.(\w+)|\[", where):
        found = _inner(found, step)
    names = [field.encode_name for field in found.fields] if isinstance(found, msgspec.inspect.StructType) else []
    return f"known are {', '.join(names)}" if names else "it takes none"


def _inner(outer: msgspec.inspect.Type, step: str) -> msgspec.inspect.Type:
    """The type of a field, or of an item if ``step`` is empty."""
    if isinstance(outer, msgspec.inspect.UnionType):
        outer = next(kind for kind in outer.types if not isinstance(kind, msgspec.inspect.NoneType))
    if isinstance(outer, msgspec.inspect.StructType):
        return next(field.type for field in outer.fields if field.encode_name == step)
    if isinstance(outer, msgspec.inspect.VarTupleType):
        return outer.item_type
    return outer
