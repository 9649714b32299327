"""Unknown fields of a state, which a later version of Tercet wrote: they are separated, named and kept.

No I/O. A state is decoded JSON; msgspec's types define its known fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from msgspec import inspect


def known_part(value: Any, kind: inspect.Type) -> Any:
    """Return ``value`` without the fields that the structs of ``kind`` do not have."""
    fields = _fields(kind)
    if fields is not None and isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return {name: known_part(part, fields[name]) for name, part in named.items() if name in fields}
    item = _item(kind)
    if item is not None and isinstance(value, list):
        return [known_part(part, item) for part in cast("list[Any]", value)]
    return value


def unknown_names(value: Any, kind: inspect.Type, at: str = "") -> Iterator[str]:
    """Yield the paths of fields that the structs of ``kind`` do not have, such as ``members[0].address.zone``."""
    fields, item = _fields(kind), _item(kind)
    if fields is not None and isinstance(value, dict):
        for name, part in cast("dict[str, Any]", value).items():
            where = f"{at}.{name}" if at else name
            if name in fields:
                yield from unknown_names(part, fields[name], where)
            else:
                yield where
    elif item is not None and isinstance(value, list):
        for place, part in enumerate(cast("list[Any]", value)):
            yield from unknown_names(part, item, f"{at}[{place}]")


def with_unknown(after: Any, before: Any, kind: inspect.Type) -> Any:
    """Return ``after``, which has only known fields, with the unknown fields of the same records in ``before``.

    Two records are the same if they have the same name or number; records without either, if they are equal.
    """
    fields, item = _fields(kind), _item(kind)
    if fields is not None and isinstance(after, dict) and isinstance(before, dict):
        new, old = cast("dict[str, Any]", after), cast("dict[str, Any]", before)
        if new.get("number") != old.get("number"):
            return new
        kept = {name: part for name, part in old.items() if name not in fields}
        return kept | {name: with_unknown(part, old.get(name), fields[name]) for name, part in new.items()}
    if item is not None and isinstance(after, list) and isinstance(before, list):
        olds = [(known_part(old, item), old) for old in cast("list[Any]", before)]
        return [_with_unknown_of_one(part, olds, item) for part in cast("list[Any]", after)]
    return cast("Any", after)


def _with_unknown_of_one(part: Any, olds: list[tuple[Any, Any]], kind: inspect.Type) -> Any:
    name = _name(part)
    for known, old in olds:
        if known == part or (name is not None and _name(known) == name):
            return with_unknown(part, old, kind)
    return part


def _name(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    named = cast("dict[str, Any]", part)
    return named.get("name") or _name(named.get("address"))


def _fields(kind: inspect.Type) -> Mapping[str, inspect.Type] | None:
    """Return the fields of a struct, or of the struct in an optional type; None for other types."""
    if isinstance(kind, inspect.UnionType):
        return next((found for each in kind.types if (found := _fields(each)) is not None), None)
    if isinstance(kind, inspect.StructType):
        return {field.encode_name: field.type for field in kind.fields}
    return None


def _item(kind: inspect.Type) -> inspect.Type | None:
    """Return the type of a list's items; None for other types."""
    return kind.item_type if isinstance(kind, (inspect.VarTupleType, inspect.ListType)) else None
