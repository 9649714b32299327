"""Wrong items for every list of every route, by a server's OpenAPI document.

A body is valid except for the items of one list: objects without a type, or with an unknown one; objects that have the
type and nothing else; numbers, texts and lists in place of objects. Servers must refuse the first such item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

Schema = Mapping[str, Any]
Fill = Callable[[list[Any]], Any]
EMPTY: Schema = {}
NONE: list[Any] = []
SHAPES: tuple[Any, ...] = (
    EMPTY, {"type": "zzz"}, {"role": "zzz"}, {"type": 1, "role": NONE}, {"type": "message"}, {"role": "user"},
    {"role": "user", "content": [EMPTY, EMPTY]}, {"role": "assistant", "content": [{"type": "zzz"}, 1]},
    {"type": "function"}, {"type": "function_call"}, None, True, 1, -1.5, "x", NONE, [EMPTY], [1, "x"], [["x"]],
)  # fmt: skip
"""Items that few lists accept."""
JSON = "application/json"
ALTERNATIVES = "anyOf", "oneOf", "allOf"
TAGS = "type", "role"
DEEPEST = 12


class ListField(NamedTuple):
    """A list of a route's body, or an object with any names: ``filled`` returns a body with this content.

    ``wrong`` are items that it refuses, with few exceptions; it accepts most of ``examples``.
    """

    route: str
    field: str
    filled: Fill
    wrong: tuple[Any, ...]
    examples: tuple[Any, ...]


class _Spot(NamedTuple):
    field: str
    filled: Fill
    items: Schema


def list_fields(openapi: Schema) -> Iterator[ListField]:
    """Yield the lists of the bodies of all POST routes of an OpenAPI document; each field's name once for a route."""
    schemas = _Schemas(openapi)
    for route, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if JSON not in content:
            continue
        seen = set[tuple[Any, ...]]()
        for spot in schemas.spots(content[JSON]["schema"]):
            examples = tuple(schemas.examples(spot.items))
            if (key := (spot.field, repr(examples))) not in seen:
                seen.add(key)
                wrong = SHAPES + tuple(_only_tags(examples))
                yield ListField(route, spot.field, spot.filled, wrong, examples)


class _Schemas:
    """JSON schemas of one document, with its references."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def spots(self, schema: Schema, refs: frozenset[str] = frozenset()) -> Iterator[_Spot]:
        """Yield the places of lists in values of a schema; a schema that contains itself is entered once."""
        name: str = schema.get("$ref", "")
        if name in refs or len(refs) > DEEPEST:
            return
        refs = refs | {name} if name else refs
        schema = self._found(schema)
        for each in _alternatives(schema):
            yield from self.spots(each, refs)
        if "items" in schema:
            yield _Spot("", _as_list, schema["items"])
            for spot in self.spots(schema["items"], refs):
                yield _Spot(spot.field, partial(_in_list, spot.filled), spot.items)
        if isinstance(schema.get("additionalProperties"), dict) and "properties" not in schema:
            yield _Spot("", _named, schema["additionalProperties"])
        around: dict[str, Any] = self.example(schema) if "properties" in schema else {}
        for name, part in schema.get("properties", {}).items():
            for spot in self.spots(part, refs):
                field = f"{name}.{spot.field}" if spot.field else name
                yield _Spot(field, partial(_in_object, around, name, spot.filled), spot.items)

    def examples(self, schema: Schema, depth: int = 0) -> Iterator[Any]:
        """Yield a value for each alternative of a schema, and for each of its types and roles."""
        schema = self._found(schema)
        alternatives = _alternatives(schema) if depth < DEEPEST else ()
        for each in alternatives:
            yield from self.examples(each, depth + 1)
        if alternatives:
            return
        example = self.example(schema, depth)
        yield example
        for tag in TAGS:
            for value in _constants(schema.get("properties", {}).get(tag, {})):
                yield {**example, tag: value}

    def example(self, schema: Schema, depth: int = 0) -> Any:
        """Return a short value of a schema, of which pydantic accepts most."""
        schema = self._found(schema)
        if constants := _constants(schema):
            return constants[0]
        if (alternatives := _alternatives(schema)) and depth < DEEPEST:
            return self.example(alternatives[0], depth + 1)
        if "properties" in schema:
            needed = {
                *schema.get("required", ()),
                *(tag for tag in TAGS if _constants(schema["properties"].get(tag, {}))),
            }
            return {
                name: self.example(part, depth + 1)
                for name, part in schema["properties"].items()
                if name in needed and depth < DEEPEST
            }
        match schema.get("type"):
            case "array":
                return [self.example(schema.get("items", {}), depth + 1)] * schema.get("minItems", 0)
            case "object":
                return {}
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return "x"

    def _found(self, schema: Schema) -> Schema:
        while name := schema.get("$ref"):
            found: Any = self._document
            for part in name.removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema


def _alternatives(schema: Schema) -> Sequence[Schema]:
    return [each for word in ALTERNATIVES for each in cast("list[Schema]", schema.get(word, []))]


def _constants(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _only_tags(examples: Sequence[Any]) -> Iterator[Any]:
    for each in examples:
        if isinstance(each, dict):
            yield {tag: cast("dict[str, Any]", each)[tag] for tag in TAGS if tag in each}


def _as_list(items: list[Any]) -> Any:
    return items


def _in_list(filled: Fill, items: list[Any]) -> Any:
    return [filled(items)]


def _in_object(around: Mapping[str, Any], name: str, filled: Fill, items: list[Any]) -> Any:
    return {**around, name: filled(items)}


def _named(items: list[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}
