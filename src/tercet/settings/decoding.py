"""Decoding of settings: flags win over environment variables, variables over a file, a file over defaults."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec
import yaml

from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.protocol.access import given_key
from tercet.settings.declaration import Declared, complaint, declared, fields_of, is_group, key_values, near

S = TypeVar("S", bound=msgspec.Struct)
MOST_SETTINGS = 16 * 1024 * 1024
"""Largest file of settings, in bytes."""
# Kubernetes sets NAME_PORT to such a URL in every pod of a namespace that has a service NAME.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


@dataclass(frozen=True)
class Source:
    """Values by key from one place. An error about a value begins with ``origin``, then ``names[key]`` or the key."""

    values: Mapping[str, Any]
    origin: str = ""
    names: Mapping[str, str] | None = None

    def name_of(self, key: str) -> str:
        """Return the name of a setting in errors about this source."""
        return self.origin + (self.names or {}).get(key, key)


def decode_settings(kind: type[S], *sources: Source) -> S:
    """Return a record of ``kind``; the first source that has a setting gives its value.

    Numbers and truth values may be given as text, a list of one item as the item, and a text as a number. Raises
    :class:`~tercet.protocol.BadRequest` that names the setting as its source does; for an unknown key, it suggests the
    most similar one.
    """
    known = {each.key: each for each in declared(kind)}
    found: dict[str, tuple[Any, str]] = {}
    for source in reversed(sources):
        for key, value in source.values.items():
            if key not in known:
                raise BadRequest(f"{source.origin}unknown key {key}; {near(key, list(known))}", key)
            found[key] = value, source.name_of(key)
    values = {known[key].path: _value(known[key], value, name) for key, (value, name) in found.items()}
    for key, (value, name) in found.items():
        if known[key].setting.is_key and isinstance(value, str):
            values[known[key].path] = given_key(value, name)
    for each in known.values():
        if each.is_required and each.key not in found:
            raise BadRequest(f"{sources[0].name_of(each.key) if sources else each.key}: is required", each.key)
    try:
        return _build(kind, values, ())
    except BadRequest as error:  # two settings exclude each other
        named = found.get(error.param or "", (None, ""))[1]
        if named and error.message.startswith(f"{error.param}: "):
            raise BadRequest(named + error.message.removeprefix(error.param or ""), error.param) from None
        origin = next((source.origin for source in sources if source.origin), "")
        raise BadRequest(origin + error.message, error.param) from None


def from_environment(kind: type[msgspec.Struct], environment: Mapping[str, str] = os.environ) -> Source:
    """Return the settings of environment variables; items of a list are separated as in a shell.

    In Kubernetes ``TERCET_PORT`` is a URL if a service is called ``tercet``: such a value is ignored.
    """
    told = [each for each in declared(kind) if _says_something(each.env, environment.get(each.env, ""))]
    values = {each.key: _from_text(each, environment[each.env]) for each in told}
    return Source(values, names={each.key: each.env for each in told})


def read_yaml(file: Path, name: str = "--config") -> Source:
    """Return the settings of a YAML file. Raises :class:`~tercet.protocol.BadRequest` that names the file."""
    content = load_yaml(file, f"{name} {file}")
    if not isinstance(content, dict):
        raise BadRequest(f"{name} {file}: must be a mapping of keys to values", name)
    values = {str(key): value for key, value in cast("dict[Any, Any]", content).items()}
    return Source(values, origin=f"{name} {file}: ")


def load_yaml(file: Path, name: str, param: str | None = None) -> Any:
    """Return the content of a YAML file. Raises :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    param = param or name
    try:
        text = read_named(file, MOST_SETTINGS).decode("utf-8")
    except OSError as error:
        raise BadRequest(f"{name}: the file cannot be read: {error.strerror}", param) from error
    except ValueError as error:
        raise BadRequest(f"{name}: the file is not YAML: {error}", param) from error
    return parse_yaml(text, name, param)


def parse_yaml(text: str, name: str, param: str) -> Any:
    """Return the value of a YAML text. Raises :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    try:
        return yaml.load(text, _UniqueKeys)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # the loader does not wrap errors of dates and numbers
        raise BadRequest(f"{name}: the file is not YAML: {' '.join(str(error).split())}", param) from error


def encode_settings(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by key; decoding them gives the same record."""
    found: dict[str, Any] = {}
    for each in declared(type(settings)):
        value = attrgetter(".".join(each.path))(settings)
        if value != each.default:
            found[each.key] = msgspec.to_builtins(value)
    return found


def _build(kind: type[S], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> S:
    fields: dict[str, Any] = {}
    for field in fields_of(kind):
        here = (*path, field.name)
        if is_group(field.type):
            fields[field.name] = _build(field.type, values, here)
        elif here in values:
            fields[field.name] = values[here]
    return kind(**fields)


def _value(of: Declared, value: Any, name: str) -> Any:
    """Return one setting's value, converted and checked against its bounds."""
    prepared = value
    try:
        prepared = _prepared(of, value)
        return msgspec.convert(prepared, of.type, strict=False)
    except msgspec.ValidationError as error:
        raise complaint(name, of.type, prepared, error, of.key) from None
    except BadRequest as error:
        raise BadRequest(f"{name}: {error.message}", of.key) from error


def _prepared(of: Declared, value: Any) -> Any:
    if value is None:
        return value
    if of.is_mapping and isinstance(value, dict):
        given = cast("dict[Any, Any]", value)
        texts = get_args(of.plain)[1:] == (str,)
        return {str(key): _as_text(item) if texts else item for key, item in given.items()}
    if of.is_list:
        items: list[Any] = list(cast("Any", value)) if isinstance(value, list | tuple) else [value]
        if of.setting.read is not None:
            return [of.setting.read(item, index) for index, item in enumerate(items)]
        return [_as_text(item) for item in items] if get_args(of.plain)[0] is str else items
    return _as_text(value) if of.plain is str else value


def _says_something(name: str, text: str) -> bool:
    return bool(text) and not (name.endswith("_PORT") and _SERVICE_LINK.fullmatch(text))


def _from_text(of: Declared, text: str) -> Any:
    if not (of.is_list or of.is_mapping):
        return text
    try:
        items = shlex.split(text)
    except ValueError as error:
        raise BadRequest(f"{of.env}: {error}", of.key) from error
    return key_values(items, of.env) if of.is_mapping else items


def _as_text(value: Any) -> Any:
    """Return numbers and truth values as text, as in ``program-args: {min_send: 64}``; YAML reads them as numbers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a mapping with the same key twice; PyYAML's takes the second value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: list[object] = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)
