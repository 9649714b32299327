"""Which structured outputs are refused before any engine compiles them: those that would take many seconds."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from tercet.protocol import BadRequest
from tercet.protocol.grammar_bounds import MOST_CHOICES, MOST_REPEATED, require_small

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 100, "pattern": r"^\w[\w .-]*$"} for name in "abcdefgh"},
    "required": list("abcdefgh"),
}
FINE: list[dict[str, Any]] = [
    {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})"},
    {"regex": "(a|b){1000}.*[^x]+"},
    {"regex": "x" * 30_000},
    {"regex": r"(.{1,200}\n){1,100}"},
    {"regex": "a{1000} b{1000} (c|d{50}){100}"},
    {"grammar": 'root ::= "(" [a-z]{1,500} ")" ([0-9]{1,500})?'},
    {"json": {"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 1000}}},
    {"json": {"properties": {"end": {"const": "x" * 1000}, "minItems": {"enum": ["a", 1, None, [2]]}}}},
    {"json": {"type": "string", "description": "x" * 100_000, "default": "y" * 100_000}},
    {"regex": "("},
    {"regex": "a\\"},
    {"choice": [f"label {number}" for number in range(2000)]},
    {"json": ADDRESS},
    {"json": json.dumps({"type": "array", "items": ADDRESS, "minItems": 1, "maxItems": 50})},
    {"json": "{"},
    {"json": "[" * 100_000},
    {"grammar": 'root ::= "SELECT " [a-z]+ " FROM " [a-z]+ (" WHERE " [a-z]+ " = " [0-9]+)?'},
    {"json_object": True},
    {"structural_tag": json.dumps({"structures": [{"begin": "<f>", "schema": ADDRESS, "end": "</f>"}]})},
    {"regex": None, "json": None, "choice": None},
    {"regex": 7, "choice": "a", "json": 7, "grammar": []},
]
RULES = "root ::= r0\n" + "\n".join(f'r{n} ::= "a{n}" [a-z]+ r{n + 1}' for n in range(20_000))


def _tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


POISON: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-z]" * 6000}, "regex"),
    ({"regex": "." * 2000}, "regex"),
    ({"regex": r"[^a]x" * 2000}, "regex"),
    ({"regex": r"\W" * 2000}, "regex"),
    ({"regex": "x" * 1_000_000}, "regex"),
    ({"regex": "([^a]{0,1000}b){0,1000}"}, "regex"),
    ({"regex": "(([^a]{0,50}b){0,50}c|d){0,50}"}, "regex"),
    ({"regex": "(?:(x|[^a]{0,200}b)+c)*(y(z{200}){200})?"}, "regex"),
    ({"regex": "(a{200}){2}{200}"}, "regex"),
    ({"grammar": 'root ::= "a" ([^a]{0,1000} "b") {0,1000}'}, "grammar"),
    ({"json": {"const": "ab c" * 100_000}}, "json"),
    ({"json": {"const": {"a": ["ab c" * 100_000]}}}, "json"),
    ({"json": {"const": {"ab c" * 100_000: 1}}}, "json"),
    ({"json": {"const": [1] * 100_000}}, "json"),
    ({"json": {"enum": [{"a": "ab c" * 100_000}]}}, "json"),
    ({"json": {"enum": ["ab c" * 100_000]}}, "json"),
    ({"json": {"properties": {"x": {"items": [{"const": "ab c" * 100_000}]}}}}, "json"),
    ({"json": {"maxItems": 1000, "items": {"minItems": 1000, "items": {"maxLength": 1000}}}}, "json"),
    ({"json": {"pattern": "([^a]{0,1000}b){0,1000}"}}, "json"),
    ({"regex": f"a{{{MOST_REPEATED + 1}}}"}, "regex"),
    ({"regex": f"a{{1,{10**30}}}"}, "regex"),
    ({"regex": f"a{{{'9' * 10_000}}}"}, "regex"),
    ({"regex": "|".join("ab" for _ in range(MOST_CHOICES + 2))}, "regex"),
    ({"choice": [f"{number}" for number in range(100_000)]}, "choice"),
    ({"choice": ["x" * 1_000_000]}, "choice"),
    ({"json": {"type": "string", "minLength": 10**8}}, "json"),
    ({"json": {"type": "string", "maxLength": 1e300}}, "json"),
    ({"json": {"anyOf": [{"items": {"minItems": 10**9}}]}}, "json"),
    ({"json": {"properties": {f"p{n}": {"type": "string"} for n in range(5000)}}}, "json"),
    ({"json": {"enum": list(range(100_000))}}, "json"),
    ({"json": {"type": "string", "pattern": "[a-z]" * 6000}}, "json"),
    ({"json": {"patternProperties": {"." * 2000: {}}}}, "json"),
    ({"json": json.dumps({"type": "string", "minLength": 10**8})}, "json"),
    ({"grammar": "root ::= " + " ".join("[a-z]" for _ in range(6000))}, "grammar"),
    ({"grammar": f'root ::= "a"{{{10**8}}}'}, "grammar"),
    ({"grammar": "root ::= " + " | ".join('"a"' for _ in range(20_000))}, "grammar"),
    ({"structural_tag": json.dumps({"structures": [{"schema": {"minLength": 10**8}}]})}, "structural_tag"),
    ({"structural_tag": _tag({"type": "grammar", "grammar": RULES})}, "structural_tag"),
    (
        {"structural_tag": _tag({"type": "sequence", "elements": [{"type": "grammar", "grammar": RULES}]})},
        "structural_tag",
    ),
    ({"structural_tag": _tag({"type": "regex", "pattern": "([^a]{0,1000}b){0,1000}"})}, "structural_tag"),
    ({"structural_tag": _tag({"type": "const_string", "value": "ab c" * 100_000})}, "structural_tag"),
    ({"structural_tag": _tag({"type": "tag", "begin": "ab c" * 100_000, "end": ""})}, "structural_tag"),
    ({"json": {"a": 1}, "whitespace_pattern": "." * 2000}, "whitespace_pattern"),
]


@pytest.mark.parametrize("structured", FINE)
def test_what_applications_ask_for_is_taken(structured: dict[str, Any]) -> None:
    require_small(structured)


@pytest.mark.parametrize(("structured", "field"), POISON)
def test_what_takes_long_is_refused_by_its_field(structured: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        require_small(structured, "sampling_params.structured_outputs")
    assert refused.value.param == f"sampling_params.structured_outputs.{field}"
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "text", ["[a" * 19_000, "[^" * 19_000, "[\\" * 19_000, "x" * 39_000, "()" * 19_000, "\\a" * 19_000, "{1" * 19_000]
)
@pytest.mark.parametrize("field", ["regex", "grammar"])
def test_looking_at_a_text_takes_no_longer_than_its_length(text: str, field: str) -> None:
    """A class without its end was looked for from each of its beginnings: minutes, on the router's event loop."""
    began = time.process_time()
    with suppress(BadRequest):
        require_small({field: text})
    assert time.process_time() - began < 0.5


def test_a_property_named_const_hides_no_schema() -> None:
    poison = {"type": "string", "pattern": "([^a]{0,1000}b){0,1000}"}
    with pytest.raises(BadRequest, match="counts in counts"):
        require_small({"json": {"type": "object", "properties": {"const": poison}}})
