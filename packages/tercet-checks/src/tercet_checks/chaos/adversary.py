"""A hostile client, which plays tricks over raw connections and checks that the router ends each of them.

The tricks and their times are computed from a seed. Each kind of body could let one client stop all others: the router
must refuse, answer or cut off each trick within a time limit. The arena's other checks cover the effects on other
clients.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from tercet.aio.tasks import TaskSet
from tercet.protocol import BadRequest

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
                mappings = [cast("dict[str, Any]", each) for each in examples if isinstance(each, dict)]
                only_tags = ({tag: each[tag] for tag in TAGS if tag in each} for each in mappings)
                yield ListField(route, spot.field, spot.filled, (*SHAPES, *only_tags), examples)


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
            yield _Spot("", list, schema["items"])
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


def _in_list(filled: Fill, items: list[Any]) -> Any:
    return [filled(items)]


def _in_object(around: Mapping[str, Any], name: str, filled: Fill, items: list[Any]) -> Any:
    return {**around, name: filled(items)}


def _named(items: list[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}


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


TrickKind = Literal[
    "many_sequences", "long_bodies", "wrong_items", "odd_text", "odd_labels", "poisonous_grammars", "unfinished_bodies",
    "unfinished_heads", "long_heads", "long_names", "silence", "slow_reading", "leaving",
]  # fmt: skip
"""
- ``many_sequences``: one request with thousands of prompts or choices.
- ``long_bodies``: tens of thousands of items of one kind: messages, parts, tools, choices, stop strings, token ids,
  letters.
- ``wrong_items``: many small bodies at once, each with hundreds of wrong items in one list.
- ``odd_text``: invalid JSON, half of a surrogate pair, numbers that are not in JSON, deeply nested lists.
- ``odd_labels``: long bodies under encodings and types that they do not have, and under two types that disagree.
- ``poisonous_grammars``: structures that take an engine's core seconds to compile, or that are infinite.
- ``unfinished_bodies``: several large bodies at the same time that do not end, at the router or at a model router.
- ``unfinished_heads``: request heads that do not end.
- ``long_heads``: request heads of a megabyte.
- ``long_names``: ids, sessions, users and salts of half a megabyte.
- ``silence``: connections that send nothing.
- ``slow_reading``: a stream that its client does not read.
- ``leaving``: a client that leaves in the middle of its head, its body, the wait for the answer, or the answer.
"""
TRICKS: tuple[TrickKind, ...] = get_args(TrickKind)
NO_TRICKS = "none"


class PlannedTrick(msgspec.Struct, frozen=True):
    """A trick that begins at second ``at``. The run's seed and ``number`` determine its bodies."""

    at: float
    kind: TrickKind
    number: int

    def __str__(self) -> str:
        return f"{self.at:9.3f} s  {self.kind}"


class PlayedTrick(msgspec.Struct, frozen=True, kw_only=True):
    """A trick and its result. ``statuses`` are those of its answers, 0 for a connection that was closed without one.

    ``wrong`` describes the router's error; it is empty if the router behaved correctly.
    """

    planned: PlannedTrick
    began: float
    ended: float
    statuses: tuple[int, ...] = ()
    wrong: str = ""


def plan_tricks(seed: int, seconds: float, per_minute: float, kinds: Sequence[TrickKind]) -> tuple[PlannedTrick, ...]:
    """Return tricks at random times, with all kinds equally often. Equal seeds give equal tricks."""
    chance, now, found = random.Random(f"{seed} tricks"), 0.0, list[PlannedTrick]()
    turn: list[TrickKind] = []
    while kinds and (now := now + chance.expovariate(per_minute / 60)) < seconds:
        turn = turn or chance.sample(list(kinds), len(kinds))
        found.append(PlannedTrick(round(now, 6), turn.pop(), len(found)))
    return tuple(found)


def parse_tricks(given: str) -> tuple[TrickKind, ...]:
    """Return the kinds of a text ``KIND[,KIND...]`` or ``none``. Raise ``BadRequest`` for an unknown kind."""
    names = [name.strip().replace("-", "_") for name in given.split(",")]
    if names == [NO_TRICKS]:
        return ()
    if wrong := [name for name in names if name not in TRICKS]:
        raise BadRequest(
            f"--adversary: {wrong[0]!r} is not a trick; choose from {', '.join(TRICKS)}, or none", "adversary"
        )
    return tuple(kind for kind in TRICKS if kind in names)


REFUSED_SECONDS = 30.0
"""Time limit, in seconds, for refusing a request, or for closing a connection that sends too little."""
ANSWERED_SECONDS = 180.0
"""Time limit, in seconds, for the answer to a long body, which may be served."""
LONG_HEAD = 2**20
LONG_NAME_IN_HEAD = 30_000
WRONG_IN_A_BODY, WRONG_AT_ONCE = 250, 20
WRITTEN_AT_ONCE = 64 * 1024
DRIP_SECONDS = 1.0
# Size, in bytes, of the buffers of a slow reader.
LITTLE = 1024


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of tricks: ``items`` of a long body; ``bodies`` unfinished bodies of ``body`` bytes at one time."""

    items: int
    body: int
    bodies: int = 6


class RawConnection:
    """A connection for raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send bytes, until all are sent or the router closes the connection."""
        try:
            for begin in range(0, len(data), WRITTEN_AT_ONCE):
                self._writer.write(data[begin : begin + WRITTEN_AT_ONCE])
                await self._writer.drain()
        except ConnectionError:
            return  # the router may have answered before

    async def status(self) -> int:
        """Read the complete answer. Return its status, or 0 if the connection ends without an answer."""
        try:
            line = await self._reader.readline()
            while await self._reader.read(WRITTEN_AT_ONCE):
                pass
        except ConnectionError:
            line = b""
        words = line.split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    async def ended(self, seconds: float) -> bool:
        """Return True if the router closes the connection, or answers, within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._reader.read(1)
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def leave(self) -> None:
        self._writer.transport.abort()


class Adversary:
    """A client that plays tricks on the router at ``host`` and ``port``. ``played`` has the finished tricks.

    ``others`` are the addresses of other servers that buffer bodies, such as a model router.
    """

    def __init__(
        self, host: str, port: int, model: str, seed: int, sizes: Sizes, clock: Callable[[], float],
        others: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        self.played: list[PlayedTrick] = []
        self._doors = ((host, port), *others)
        self._model = model
        self._seed = seed
        self._sizes = sizes
        self._clock = clock
        self._tasks = TaskSet()

    async def run(self, planned: Iterable[PlannedTrick], sleep_until: Callable[[float], Awaitable[object]]) -> None:
        """Play each trick at its time; return when the last one has begun."""
        for trick in planned:
            await sleep_until(trick.at)
            self._tasks.spawn(self.play(trick))

    async def settle(self) -> None:
        """Return when all tricks have ended; each has a time limit."""
        await self._tasks.wait(ANSWERED_SECONDS + REFUSED_SECONDS)

    async def play(self, planned: PlannedTrick) -> None:
        """Play one trick, and add its result to ``played``."""
        trick = Trick(self._doors, self._model, random.Random(f"{self._seed} trick {planned.number}"), self._sizes)
        began, wrong = self._clock(), ""
        play, right = PLAYS[planned.kind]
        limit = ANSWERED_SECONDS if planned.kind == "long_bodies" else REFUSED_SECONDS
        try:
            async with asyncio.timeout(limit):
                await play(trick)
            if others := [status for status in trick.statuses if status not in right]:
                wrong = f"{trick.what}: answered with {others[0]}"
        except TimeoutError:
            wrong = f"{trick.what}: the router neither answered nor closed the connection within {limit:g} s"
        except OSError as error:
            wrong = f"{trick.what}: cannot connect to the router: {error!r}"
        finally:
            trick.leave()
        statuses = tuple(trick.statuses)
        self.played.append(
            PlayedTrick(planned=planned, began=began, ended=self._clock(), statuses=statuses, wrong=wrong)
        )


class Trick:
    """A trick that is being played at ``door``. ``what`` describes its variant, ``name`` is the id of its requests."""

    def __init__(self, doors: Sequence[tuple[str, int]], model: str, chance: random.Random, sizes: Sizes) -> None:
        self.statuses: list[int] = []
        self.what = ""
        self.chance = chance
        self.sizes = sizes
        self.doors = doors
        self.door = doors[0]
        self._model = model
        self.name = f"adversary-{chance.getrandbits(64):x}"
        self._open: list[RawConnection] = []

    async def connect(self, limit: int = 64 * 1024) -> RawConnection:
        """Open one more connection, with a read buffer of about ``limit`` bytes."""
        connection = RawConnection(*await asyncio.open_connection(*self.door, limit=limit))
        self._open.append(connection)
        return connection

    def leave(self) -> None:
        for connection in self._open:
            connection.leave()

    def head(self, path: str, length: int, labels: Sequence[str] = (_JSON,)) -> bytes:
        """Return the head of a request with a body of ``length`` bytes; ``labels`` are fields that describe it."""
        named = [f"x-request-id: {self.name}"] if self.name else []
        fields = ["host: router", *labels, "connection: close", *named, f"content-length: {length}"]
        return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "\r\n"]).encode()

    def encoded(self, fields: Mapping[str, Any]) -> bytes:
        """Return a body as JSON, with the model's name."""
        return msgspec.json.encode({"model": self._model, **fields})

    async def ask(self, path: str, body: bytes, labels: Sequence[str] = (_JSON,)) -> None:
        """Send a complete request, and record the status of its answer."""
        await self.send(self.head(path, len(body), labels) + body)

    async def send(self, data: bytes) -> None:
        """Send bytes over a new connection, and record the status of the answer, or 0 without an answer."""
        connection = await self.connect()
        await connection.send(data)
        self.statuses.append(await connection.status())

    def stream(self) -> bytes:
        """Return a body that requests a stream of 16 to 64 tokens."""
        return self.encoded({"prompt": "the same again", "max_tokens": self.chance.randint(16, 64), "stream": True})


# ---- the tricks ----------------------------------------------------------------------------------------------


async def _many_sequences(trick: Trick) -> None:
    trick.what, path, fields = trick.chance.choice(FULL_OF_SEQUENCES)
    await trick.ask(path, trick.encoded(fields))


async def _long_bodies(trick: Trick) -> None:
    trick.what, path, fields = trick.chance.choice(LONG)
    body = trick.encoded(fields(round(trick.sizes.items * trick.chance.uniform(0.2, 1.0))))
    await trick.ask(path, body)
    trick.what += f" ({len(body)} bytes)"


async def _wrong_items(trick: Trick) -> None:
    what, path, fields = trick.chance.choice(WRONG_ITEMS)
    item = trick.chance.choice(WRONG)
    trick.what, body = f"{what} that are {item!r}", trick.encoded(fields([item] * WRONG_IN_A_BODY))
    async with asyncio.TaskGroup() as group:
        for _ in range(WRONG_AT_ONCE):
            group.create_task(trick.ask(path, body))


async def _odd_text(trick: Trick) -> None:
    trick.what, body = trick.chance.choice(ODD)
    await trick.ask(COMPLETIONS, body)


async def _odd_labels(trick: Trick) -> None:
    labels = trick.chance.choice(LABELS)
    what, path, fields = trick.chance.choice(LONG)
    trick.what, body = f"{what} under {'; '.join(labels)}", trick.encoded(fields(trick.sizes.items))
    await trick.ask(path, body, labels)


async def _poisonous_grammars(trick: Trick) -> None:
    trick.what, structure = trick.chance.choice(POISONOUS)
    await trick.ask(COMPLETIONS, trick.encoded({"prompt": "x", "max_tokens": 4, "structured_outputs": structure}))


async def _unfinished_bodies(trick: Trick) -> None:
    trick.what, size = "a body that does not end", trick.sizes.body
    trick.door = trick.chance.choice(trick.doors)
    async with asyncio.TaskGroup() as group:
        for _ in range(trick.sizes.bodies):
            group.create_task(trick.send(trick.head(COMPLETIONS, size + 1) + b" " * size))


async def _unfinished_heads(trick: Trick) -> None:
    trick.what, connection = "a head that does not end", await trick.connect()
    await connection.send(b"POST /v1/completions HTTP/1.1\r\nx-a: ")
    while not await connection.ended(DRIP_SECONDS):
        await connection.send(b"a")
    trick.statuses.append(408)


async def _long_heads(trick: Trick) -> None:
    trick.what = "a head of a megabyte"
    name = trick.chance.choice((b"x-a: ", b"x-request-id: ", b"authorization: Bearer ", b"cookie: "))
    await trick.send(b"GET /v1/models HTTP/1.1\r\n" + name + b"a" * LONG_HEAD + b"\r\n\r\n")


async def _long_names(trick: Trick) -> None:
    what, fields = trick.chance.choice(NAMES)
    name = trick.name.ljust(trick.sizes.body // 2, "n")
    # An id in a body counts only without one in the head.
    trick.name = "" if what == "request_id" else name[:LONG_NAME_IN_HEAD]
    trick.what = f"{what} of {len(name)} characters"
    await trick.ask(COMPLETIONS, trick.encoded({"prompt": "x", **LAST, **fields(name)}))


async def _silence(trick: Trick) -> None:
    trick.what = "a connection that says nothing"
    await trick.send(b"")


async def _slow_reading(trick: Trick) -> None:
    trick.what, body = "a stream that is not read", trick.stream()
    connection = await trick.connect(LITTLE)
    await connection.send(trick.head(COMPLETIONS, len(body)) + body)
    await asyncio.sleep(trick.chance.uniform(1.0, REFUSED_SECONDS / 2))


async def _leaving(trick: Trick) -> None:
    body = trick.stream()
    head = trick.head(COMPLETIONS, len(body))
    part = trick.chance.choice(("head", "body", "wait", "answer"))
    trick.what, connection = f"a client that leaves in the {part}", await trick.connect()
    await connection.send({"head": head[:40], "body": head + body[:20]}.get(part, head + body))
    if part == "answer":
        await connection.ended(REFUSED_SECONDS)
    await asyncio.sleep(trick.chance.uniform(0.0, 0.2))


PLAYS: Mapping[TrickKind, tuple[Callable[[Trick], Awaitable[None]], Container[int]]] = {
    "many_sequences": (_many_sequences, {400}),
    "long_bodies": (_long_bodies, range(1, 500)),
    "wrong_items": (_wrong_items, {400, 404, 429}),
    "odd_text": (_odd_text, {400}),
    "odd_labels": (_odd_labels, {400, 413, 415}),
    "poisonous_grammars": (_poisonous_grammars, {400, 413}),
    "unfinished_bodies": (_unfinished_bodies, {0, 408, 413, 429}),
    "unfinished_heads": (_unfinished_heads, {408}),
    "long_heads": (_long_heads, {0, 431}),
    "long_names": (_long_names, {200, 400, 404}),
    "silence": (_silence, range(1000)),
    "slow_reading": (_slow_reading, ()),
    "leaving": (_leaving, ()),
}
"""How each trick is played, and the statuses with which the router may answer it."""
