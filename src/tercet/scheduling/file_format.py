"""The scheduling file: YAML in the form of llm-d's ``EndpointPickerConfig``, read strictly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import complaint
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
        place, _, reason = complaint(at, to, content, error).message.partition(": ")
        if unknown := re.fullmatch("unknown key (.*?); (.*)", reason):
            place, reason = f"{place}.{unknown[1]}", f"there is no such field here; {unknown[2]}"
        place = place.lstrip(".") or "scheduling"
        raise BadRequest(f"{place}: {reason}", place) from error
