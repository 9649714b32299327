"""Validation of request bodies that ends at the first wrong item of a list.

pydantic validates all items of a list, and tries each item with every member of a union: an item of ``/v1/responses``
with an unknown ``type`` gave 237 errors, and a body of 5 KB with 250 of them took the event loop more than a second.
Here, a list or an object ends at its first wrong entry, and an item is tried only with the members of a union that
allow its ``type`` and its ``role``. The same bodies are accepted as before, with the same results.

Relies on FastAPI validating a body with the ``TypeAdapter`` of a field of its route, on pydantic keeping the validator
of a model or an adapter in an attribute, as its core schema, and on items being objects, models or plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import SchemaValidator

Schema = dict[str, Any]
# Schemas with ``fail_fast``. A generator is validated when its items are used, up to the first wrong one.
COLLECTIONS = frozenset({"list", "dict", "tuple", "set", "frozenset"})
# Fields whose literal values say which member of a union an item is.
TAGS = ("type", "role")
# Parts of a schema that are not schemas.
NOT_SCHEMAS = frozenset({"metadata", "serialization", "config", "expected", "default", "cls", "function"})
# Schemas that refuse every object.
SCALARS = frozenset({"str", "bytes", "int", "float", "bool", "none", "literal"})
# Schemas that give their inner schema the object as it is.
PASSING = frozenset({"model", "nullable", "default", "function-after"})
# Keys of the choices for items that are not objects, for items without a tag, and for those with a tag that no member
# names. vLLM leaves words in brackets out of the name of the field that an error is about.
ANY, WITHOUT, ANOTHER = "(any)", "(without)", "(another)"


# ---- the places of validators --------------------------------------------------------------------------------


class BodyAdapter(NamedTuple):
    """The adapter that validates a body of the route ``path``, and the type that the route names for it."""

    path: str
    kind: Any
    adapter: Any


def bound_routes(app: FastAPI) -> None:
    """Bound the validation of the bodies of all routes of ``app``, and of their models."""
    bounded: dict[Any, Any] = {}
    for each in body_adapters(app):
        if each.kind not in bounded:
            bounded[each.kind] = bounded_validator(each.adapter.core_schema) or each.adapter.validator
        each.adapter.validator = bounded[each.kind]
    _bound_models(bounded)


def bound_invocations(tasks: Any, model_config: Any) -> None:
    """Bound the models of SageMaker's ``/invocations``, whose adapters are made from them with the application."""
    from vllm.entrypoints.generate.factories import get_generate_invocation_types

    _bound_models(model for model, _ in get_generate_invocation_types(tasks, model_config))


def _bound_models(kinds: Iterable[Any]) -> None:
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            bounded = bounded_validator(kind.__pydantic_core_schema__)
            kind.__pydantic_validator__ = bounded or kind.__pydantic_validator__


def body_adapters(app: FastAPI) -> Iterator[BodyAdapter]:
    """Yield the adapters of the bodies of all routes of ``app``."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            for each in _body_fields(route.dependant):
                yield BodyAdapter(route.path, each.field_info.annotation, each._type_adapter)


def bounded_validator(schema: Any) -> SchemaValidator | None:
    """Return a validator that accepts the same, and else stops early; None if pydantic has not built the schema."""
    if not isinstance(schema, dict):
        return None
    whole = cast("Schema", schema)
    is_named = whole["type"] == "definitions"
    definitions: list[Schema] = whole["definitions"] if is_named else []
    conversion = _SchemaConversion({each["ref"]: each for each in definitions})
    for each in definitions:
        conversion.bounded(each)
    inner = conversion.bounded(whole["schema"] if is_named else whole)
    bounded = {"type": "definitions", "schema": inner, "definitions": list(conversion.moved.values())}
    # Prebuilt validators are those of models, which are not bounded.
    return SchemaValidator(cast("Any", bounded), _use_prebuilt=False)


def _body_fields(dependant: Any) -> Iterator[Any]:
    yield from dependant.body_params
    for each in dependant.dependencies:
        yield from _body_fields(each)


# ---- the conversion of schemas -------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A member of a union: its schema before the conversion, the union's choice after it, and the allowed tags."""

    former: Schema
    choice: Any
    allowed: _Allowed


class _Allowed(NamedTuple):
    """The objects that a schema may accept: the ``texts`` of their tag, None for any; ``absent`` if it may be absent.

    An absent tag may also be null.
    """

    texts: frozenset[str] | None = None
    absent: bool = True


@dataclass
class _SchemaConversion:
    """The conversion of one schema. ``named`` are its definitions, and ``moved`` are those of the result, by name."""

    named: Mapping[str, Schema]
    moved: dict[str, Schema] = field(default_factory=dict[str, Schema])

    def bounded(self, node: Any) -> Any:
        """Return a schema, or a part of one, after the conversion."""
        if isinstance(node, (list, tuple)):
            return type(node)(map(self.bounded, cast("Sequence[Any]", node)))
        if not isinstance(node, dict):
            return node
        schema = cast("Schema", node)
        kind = schema.get("type")
        if not isinstance(kind, str):  # schemas by the names of their fields, of which one may be ``type``
            return {name: self.bounded(value) for name, value in schema.items()}
        if "ref" in schema:  # a schema of a model may contain schemas of others, with the same names
            if schema["ref"] not in self.moved:
                self.moved[schema["ref"]] = schema
                unnamed = {name: value for name, value in schema.items() if name != "ref"}
                self.moved[schema["ref"]] = self.bounded(unnamed) | {"ref": schema["ref"]}
            return {"type": "definition-ref", "schema_ref": schema["ref"]}
        part = {name: value if name in NOT_SCHEMAS else self.bounded(value) for name, value in schema.items()}
        if kind in COLLECTIONS:
            return part | {"fail_fast": True}
        if kind == "union":
            pairs = zip(schema["choices"], part["choices"], strict=True)
            return self._by_tags(part, [(_inner(before), after) for before, after in pairs], TAGS)
        return part

    def _by_tags(self, union: Schema, members: Sequence[tuple[Schema, Any]], tags: Sequence[str]) -> Schema:
        """Return ``union`` of ``members``, in which an item is tried only with those that allow its ``tags``.

        Each member is its schema before the conversion, and the union's choice after it.
        """
        if len(members) == 1:
            return _inner(members[0][1])
        if not tags:
            return union | {"choices": [choice for _, choice in members]}
        tag, others = tags[0], tags[1:]
        tagged = [_Member(former, choice, _allowed(former, tag, self.named)) for former, choice in members]
        if sum(each.allowed.texts is not None for each in tagged) < 2:
            return self._by_tags(union, members, others)
        tagged = [each._replace(choice=self._moved(each.choice)) for each in tagged]
        texts = sorted({text for each in tagged for text in each.allowed.texts or ()})
        # A schema that accepts no object, and says which tags the union's members have.
        refusal = {
            "type": "custom-error", "schema": {"type": "none"}, "custom_error_type": f"unknown_{tag}",
            "custom_error_message": f"Input should have one of these values of '{tag}': {', '.join(texts)}",
        }, tag  # fmt: skip

        def among(group: Iterable[_Member]) -> Schema:
            return self._by_tags(union, [(each.former, each.choice) for each in group], others)

        def unclear(group: Sequence[_Member]) -> Schema:
            return union | {"auto_collapse": False, "choices": [refusal, *([among(group)] if group else [])]}

        choices: Schema = {
            f"({text})": among(each for each in tagged if text in (each.allowed.texts or (text,))) for text in texts
        }
        choices[ANY] = union | {"choices": [each.choice for each in tagged]}
        choices[WITHOUT] = unclear([each for each in tagged if each.allowed.absent])
        choices[ANOTHER] = unclear([each for each in tagged if each.allowed.texts is None])
        return {"type": "tagged-union", "choices": choices, "discriminator": _tag_reader(tag, texts)}

    def _moved(self, choice: Any) -> Any:
        """Return a reference to a member of a union, which becomes a definition, since several choices have it."""
        schema = _inner(choice)
        if schema["type"] == "definition-ref":
            return choice
        name = f"tercet-{len(self.moved)}"
        self.moved[name] = schema | {"ref": name}
        reference = {"type": "definition-ref", "schema_ref": name}
        return (reference, choice[1]) if isinstance(choice, tuple) else reference


def _inner(choice: Any) -> Schema:
    """Return the schema of a union's choice, which may have a label."""
    return choice[0] if isinstance(choice, tuple) else choice


def _tag_reader(tag: str, texts: Iterable[str]) -> Callable[[Any], str]:
    """Return the function that returns the key of the choice for an item."""
    keys = {text: f"({text})" for text in texts}

    def choose(item: Any) -> str:
        if isinstance(item, dict):
            value = cast("Schema", item).get(tag)
        elif isinstance(item, BaseModel):
            value = getattr(item, tag, None)
        else:
            return ANY
        if value is None:
            return WITHOUT
        if type(value) is str:
            return keys.get(value, ANOTHER)
        return ANY if isinstance(value, str) else ANOTHER

    return choose


def _allowed(schema: Schema, tag: str, named: Mapping[str, Schema]) -> _Allowed:
    """Return the tags that a schema allows; it may refuse some of them, but it accepts no others."""
    kind = schema["type"]
    if kind in SCALARS:
        return _Allowed(frozenset(), absent=False)
    if kind == "definition-ref":
        name = schema["schema_ref"]
        others = {other: inner for other, inner in named.items() if other != name}
        return _allowed(named[name], tag, others) if name in named else _Allowed()
    if kind in PASSING and not schema.get("custom_init") and not schema.get("root_model"):
        return _allowed(schema["schema"], tag, named)
    if kind in ("union", "tagged-union"):
        choices: Iterable[Any] = schema["choices"].values() if kind == "tagged-union" else schema["choices"]
        each = [_allowed(_inner(choice), tag, named) for choice in choices]
        texts = [inner.texts for inner in each if inner.texts is not None]
        every = frozenset[str]().union(*texts) if len(texts) == len(each) else None
        return _Allowed(every, any(inner.absent for inner in each))
    if kind in ("typed-dict", "model-fields") and tag in schema["fields"]:
        member = schema["fields"][tag]
        if "validation_alias" not in member:
            value = member["schema"]
            required = member.get("required", schema.get("total", True)) if kind == "typed-dict" else True
            return _Allowed(_literals(value), not required or value["type"] in ("default", "nullable"))
    return _Allowed()


def _literals(schema: Schema) -> frozenset[str] | None:
    """Return the texts that a field may have; None for any text."""
    if schema["type"] in ("default", "nullable"):
        return _literals(schema["schema"])
    if schema["type"] == "literal" and all(type(each) is str for each in schema["expected"]):
        return frozenset(schema["expected"])
    return None
