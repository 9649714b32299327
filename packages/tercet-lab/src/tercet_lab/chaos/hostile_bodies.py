"""The request bodies of a hostile client. Each kind could let one client stop all others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
Fields = Mapping[str, Any]
LAST: Fields = {"max_tokens": 2}
TURN: Fields = {"role": "user", "content": "x"}
TOOL: Fields = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Fields = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _words(count: int) -> list[str]:
    return [f"a{number}" for number in range(count)]


def _nested(count: int) -> Fields:
    found: Fields = {"type": "string"}
    for _ in range(min(count, 200)):
        found = {"type": "object", "properties": {"a": found}}
    return found


def _tag_with_rules(count: int) -> str:
    rules = "\n".join(f'r{number} ::= "a{number}" [a-z]+ r{number + 1}' for number in range(count))
    return json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": f"root ::= r0\n{rules}"}})


FULL_OF_SEQUENCES: tuple[tuple[str, str, Fields], ...] = (
    ("1,024 prompts with n 16,384", COMPLETIONS, {"prompt": ["x"] * 1024, "n": 16_384, **LAST}),
    ("n 16,384", COMPLETIONS, {"prompt": "x", "n": 16_384, "temperature": 1, **LAST}),
    ("n 10,000 of a chat", CHAT, {"messages": [TURN], "n": 10_000, **LAST}),
    ("n as text", COMPLETIONS, {"prompt": "x", "n": "10000", **LAST}),
    ("4,096 prompts", COMPLETIONS, {"prompt": ["x"] * 4096, **LAST}),
    ("4,096 prompts of token ids", COMPLETIONS, {"prompt": [[5]] * 4096, **LAST}),
)
"""Bodies with too many sequences: name, route and body."""

LONG: tuple[tuple[str, str, Callable[[int], Fields]], ...] = (
    ("token ids", COMPLETIONS, lambda count: {"prompt": [5] * count, **LAST}),
    ("letters", COMPLETIONS, lambda count: {"prompt": "a b " * count, **LAST}),
    ("stop strings", COMPLETIONS, lambda count: {"prompt": "x", "stop": _words(count), **LAST}),
    ("logit_bias", COMPLETIONS, lambda count: {"prompt": "x", "logit_bias": dict.fromkeys(_words(count), 1), **LAST}),
    ("choices", COMPLETIONS, lambda count: {"prompt": "x", "structured_outputs": {"choice": _words(count)}, **LAST}),
    ("messages", CHAT, lambda count: {"messages": [TURN] * count, **LAST}),
    ("parts", CHAT, lambda count: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]}),
    ("tools", CHAT, lambda count: {"messages": [TURN], "tools": [TOOL] * (count // 3), **LAST}),
    ("tool_calls", CHAT, lambda count: {"messages": [{"role": "assistant", "tool_calls": [CALL] * (count // 2)}]}),
    ("a deep schema", CHAT, lambda count: {"messages": [TURN], "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": _nested(count)}}, **LAST}),
    ("messages of Anthropic's form", MESSAGES, lambda count: {"messages": [TURN] * count, **LAST}),
    ("items of /v1/responses", RESPONSES, lambda count: {"input": [TURN] * count, "max_output_tokens": 2}),
    ("text to tokenize", TOKENIZE, lambda count: {"prompt": "a b " * count}),
    ("fields that have no meaning", COMPLETIONS, lambda count: {"prompt": "x", **dict.fromkeys(_words(count), 1)}),
)  # fmt: skip
"""Bodies with long fields: name of the items, route, and a function that returns the body for a number of items."""

NAMES: tuple[tuple[str, Callable[[str], Fields]], ...] = (
    ("request_id", lambda name: {"request_id": name}),
    ("session_id", lambda name: {"session_id": name}),
    ("vllm_xargs.session_id", lambda name: {"vllm_xargs": {"session_id": name}}),
    ("a trajectory of Dynamo", lambda name: {"nvext": {"agent_context": {"trajectory_id": name}}}),
    ("a session that ends", lambda name: {"nvext": {"session_control": {"session_id": name, "action": "close"}}}),
    ("program_id", lambda name: {"program_id": name}),
    ("user", lambda name: {"user": name}),
    ("cache_salt", lambda name: {"cache_salt": name}),
    ("model", lambda name: {"model": name}),
)
"""Fields that name something: what it is, and a function that returns the field for a name."""

WRONG_ITEMS: tuple[tuple[str, str, Callable[[list[Any]], Fields]], ...] = (
    ("items of /v1/responses", RESPONSES, lambda items: {"input": items}),
    ("parts of /v1/responses", RESPONSES, lambda items: {"input": [{"role": "user", "content": items}]}),
    ("tools of /v1/responses", RESPONSES, lambda items: {"input": "x", "tools": items}),
    ("messages", CHAT, lambda items: {"messages": items}),
    ("parts", CHAT, lambda items: {"messages": [{"role": "user", "content": items}]}),
    ("tools", CHAT, lambda items: {"messages": [TURN], "tools": items}),
    ("messages of Anthropic's form", MESSAGES, lambda items: {"messages": items, **LAST}),
    ("parts of Anthropic's form", MESSAGES, lambda items: {"messages": [{"role": "user", "content": items}], **LAST}),
    ("prompts", COMPLETIONS, lambda items: {"prompt": items}),
    ("messages to tokenize", TOKENIZE, lambda items: {"messages": items}),
)  # fmt: skip
"""Small bodies with wrong items: name of the items, route, and a function that returns the body for these items."""
WRONG: tuple[Any, ...] = ({"type": "zzz"}, {"type": 1}, {"role": 1}, {"type": "function"}, 1.5, [[1.5]])
"""Items that no list accepts."""

ODD: tuple[tuple[str, bytes], ...] = (
    ("half of a surrogate pair as request_id", rb'{"prompt": "x", "request_id": "\ud83d"}'),
    ("half of a surrogate pair in a prompt", rb'{"prompt": "\udc00"}'),
    ("half of a surrogate pair as a name", rb'{"prompt": "x", "\ud83d": 1}'),
    ("a number that is not in JSON", b'{"prompt": "x", "temperature": NaN}'),
    ("incomplete JSON", b'{"prompt": "x"'),
    ("bytes that are not text", b'{"prompt": "\xff\xfe"}'),
    ("lists in lists", b'{"prompt": "x", "stop": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
)
"""Invalid bodies: name and body."""

_JSON = "content-type: application/json"
LABELS: tuple[tuple[str, ...], ...] = (
    (_JSON, "content-encoding: deflate"),
    (_JSON, "Content-Encoding: identity, GZIP"),
    (_JSON, "content-encoding: identity", "content-encoding: br"),
    (_JSON, "content-encoding: no-such-encoding"),
    (_JSON, "content-type: text/plain"),
    ("content-type: text/plain", _JSON),
    ("content-type: application/json, text/plain",),
    ("content-type: multipart/form-data; boundary=a", _JSON),
    ("content-type: text/plain",),
    ("content-type: application/x+json",),
)
"""Header fields that do not say, or do not agree, that a body is JSON."""

POISONOUS: tuple[tuple[str, Fields], ...] = (
    ("a regex of 30,000 characters", {"regex": "(a|b.c)*" * 3750}),
    ("a billion repetitions", {"regex": "(a{1,1000000000}){1,1000000000}"}),
    ("minLength 1e8", {"json": {"type": "string", "minLength": 100_000_000}}),
    ("100,000 choices", {"choice": _words(100_000)}),
    ("a rule that begins with itself", {"grammar": 'root ::= root "a"'}),
    ("rules that begin with each other", {"grammar": 'root ::= x\nx ::= y "b"\ny ::= x'}),
    ("an unknown rule", {"grammar": "root ::= other"}),
    ("a regex without an end", {"regex": "(a"}),
    ("counts in counts", {"regex": "([^a]{0,1000}b){0,1000}"}),
    ("counts in counts of a grammar", {"grammar": 'root ::= ([^a]{0,1000} "b"){0,1000}'}),
    ("a const of 400 KB", {"json": {"const": "ab c" * 100_000}}),
    ("an enum of 400 KB", {"json": {"enum": [{"a": "ab c" * 100_000}]}}),
    ("a structural tag with 20,000 rules", {"structural_tag": _tag_with_rules(20_000)}),
)
"""Structures that are expensive or invalid: name, and the value of ``structured_outputs``."""
