"""Size limit of structured outputs. Those that would occupy an engine's core for many seconds are refused.

One unit is about a millisecond of xgrammar with a vocabulary of 50,000 tokens, measured on one core of this machine: a
class of characters costs 1, a class with most of Unicode in it (``.``, ``[^a]``) 4, an object or a property of a
schema 3, a letter 0.1. Counted repetitions (``x{1000}``, ``minLength``) cost no more than one, up to a limit; counts in
counts are multiplied, since each token is then compared with all combinations of them.

These are estimates, made where a structure enters, before anything is compiled or parsed: in a router for bodies
of clients, and at an engine's edge for callers of verbs, which it does not believe. An engine's core estimates nothing:
it measures (:mod:`tercet.vllm_plugin.core.grammar_time`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest

MOST_UNITS = 4000.0
MOST_REPEATED = 100_000
# Limits for products of nested counts. In a schema, brackets and quotes tell where each repetition ends.
MOST_NESTED, MOST_NESTED_IN_SCHEMA = 20_000, 10_000_000
MOST_CHOICES = 5000
LONGEST_COUNT = 18
LITERAL, CLASS, WIDE, NODE, CHOICE = 0.1, 1.0, 4.0, 3.0, 0.05
# Cost of each character of a schema that is sent as text: most characters are not compiled.
SCHEMA_LETTER = 0.02
# A class without an end is one part, up to the end of the text: searching its end from each "[" takes quadratic time.
_PARTS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*+\]?|\{(\d+)?,?(\d+)?\}|[^\\\[{|.()?*+]++|[()?*+]++|.", re.DOTALL)
_CLASSES, _WIDE_CLASSES = frozenset("wds"), frozenset("WDSpP")
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_CHOICES = frozenset({"enum", "anyOf", "oneOf", "allOf"})
# Fields of schemas and structural tags: values that are compiled letter by letter; expressions and grammars.
_VALUES = frozenset({"const", "enum", "begin", "end", "value", "triggers", "excludes", "separator"})
_TEXTS = frozenset({"pattern", "regex", "grammar"})


def require_small(structured: Mapping[str, Any], param: str = "structured_outputs") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a structured output that takes too long to compile.

    ``structured`` are vLLM's fields, one of which has the structure; vLLM refuses malformed ones.
    """
    for field, units in _units(structured, param):
        total = 0.0
        for each in units:
            total += each
            if total > MOST_UNITS:
                why = "takes too long to compile; use fewer classes of characters, `.`, properties and choices"
                raise _refused(f"{field}: {why}")


def _units(structured: Mapping[str, Any], param: str) -> Iterator[tuple[str, Iterator[float]]]:
    """Yield each field that is compiled, with the costs of its parts, which raise ``BadRequest``."""
    for name in ("regex", "grammar", "whitespace_pattern"):
        if isinstance(text := structured.get(name), str):
            yield f"{param}.{name}", _of_text(text, f"{param}.{name}")
    if isinstance(choices := structured.get("choice"), list):
        yield f"{param}.choice", _of_choices(cast("list[Any]", choices), f"{param}.choice")
    for name in ("json", "structural_tag"):
        if (schema := structured.get(name)) is not None:
            yield f"{param}.{name}", _of_schema(schema, f"{param}.{name}")


def _of_text(text: str, param: str) -> Iterator[float]:
    """Yield the cost of each part of a regular expression or grammar."""
    if len(text) * LITERAL > MOST_UNITS:
        yield MOST_UNITS + 1
    alternatives = 0
    groups, last = [1], 1  # how often the groups that are open, and the last part, repeat what is in them
    # Not a parser: it must be fast for any text, and may count a little too much.
    for found in _PARTS.finditer(text):
        part = found[0]
        if counts := [_count(each) for each in found.groups() if each]:
            _require_count(max(counts), param)
            if last > 1:
                _require_nested(last * max(counts), MOST_NESTED, param)
            last *= max(1, *counts)
            groups[-1] = max(groups[-1], last)
        elif part[0] in "()?*+":
            for letter in part:
                if letter == "(":
                    groups.append(1)
                elif letter == ")" and len(groups) > 1:
                    last = groups.pop()
                    groups[-1] = max(groups[-1], last)
        elif not part.isspace():
            last = 1
        alternatives += part == "|"
        if alternatives > MOST_CHOICES:
            raise _refused(f"{param}: has more than {MOST_CHOICES} alternatives")
        yield _of_part(part)


def _of_part(part: str) -> float:
    if part == "." or (part.startswith("[^") and part.endswith("]")):
        return WIDE
    if part.startswith("\\"):
        return WIDE if part[1:] in _WIDE_CLASSES else CLASS if part[1:] in _CLASSES else LITERAL
    if part.startswith("[") and part.endswith("]"):
        return WIDE if any(f"\\{letter}" in part for letter in _WIDE_CLASSES) else CLASS
    return LITERAL * len(part)


def _of_choices(choices: Sequence[Any], param: str) -> Iterator[float]:
    if len(choices) > MOST_CHOICES:
        raise _refused(f"{param}: has {len(choices)} choices; at most {MOST_CHOICES} are accepted")
    for choice in choices:
        yield CHOICE + LITERAL * len(choice) if isinstance(choice, str) else CHOICE


def _of_value(value: Any) -> Iterator[float]:
    """Yield the cost of a value that is compiled letter by letter."""
    left = [value]
    while left:
        found = left.pop()
        yield CHOICE + LITERAL * len(found) if isinstance(found, str) else CHOICE
        if isinstance(found, dict):
            for name, inner in cast("dict[str, Any]", found).items():
                left += (name, inner)
        elif isinstance(found, list):
            left += cast("list[Any]", found)


def _of_schema(schema: Any, param: str) -> Iterator[float]:
    """Yield the cost of each node of a JSON schema, of an object with schemas, or of a structural tag.

    Patterns in it are regular expressions, and a structural tag may contain grammars.
    """
    if isinstance(schema, str):
        if len(schema) * SCHEMA_LETTER > MOST_UNITS:
            yield MOST_UNITS + 1
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, RecursionError):
            return
    left: list[tuple[Any, int]] = [(schema, 1)] if isinstance(schema, (dict, list)) else []
    while left:
        node, times = left.pop()
        if isinstance(node, list):
            left += [(each, times) for each in cast("list[Any]", node) if isinstance(each, (dict, list))]
            continue
        yield NODE
        fields = cast("dict[str, Any]", node)
        counts = {name: value for name in _COUNTS if isinstance(value := fields.get(name), (int, float))}
        for name, count in counts.items():
            _require_count(count, f"{param}: {name}")
        times *= max([1, *map(int, counts.values())])
        _require_nested(times, MOST_NESTED_IN_SCHEMA, param)
        for name, value in fields.items():
            yield LITERAL * len(name)
            if name in _TEXTS and isinstance(value, str):
                yield from _of_text(value, param)
            elif name == "patternProperties" and isinstance(value, dict):
                for pattern in cast("dict[str, Any]", value):
                    yield from _of_text(pattern, param)
            if name in _CHOICES and isinstance(value, list):
                yield from _of_choices(cast("list[Any]", value), f"{param}: {name}")
            if name in _VALUES and (name == "const" or isinstance(value, (str, list))):
                yield from _of_value(value)
            if isinstance(value, dict) or (isinstance(value, list) and name not in _VALUES):
                # An object under ``const`` may be the schema of a property with that name.
                left.append((cast("Any", value), times))


def _count(digits: str) -> int:
    return int(digits[:LONGEST_COUNT])  # Python refuses to read thousands of digits


def _require_count(count: float, what: str) -> None:
    if not count <= MOST_REPEATED:  # also not a number
        raise _refused(f"{what}: repeats {count:g} times; at most {MOST_REPEATED} are accepted")


def _require_nested(times: int, most: int, param: str) -> None:
    if times > most:
        raise _refused(f"{param}: counts in counts repeat {times:.3g} times; at most {most} are accepted")


def _refused(why: str) -> BadRequest:
    return BadRequest(why, why.partition(":")[0])
