"""The parts of an OpenAI request's headers and body that an endpoint picker needs."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from struct import unpack_from
from typing import Annotated, Any, Protocol, cast

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.headers import CHAT, COMPLETIONS, GENERATING, PREFILLED_BELOW, RESPONSES, path_of
from tercet.protocol.json_text import UNREADABLE, in_utf8, read_json
from tercet.protocol.names import kept_name
from tercet.protocol.wire import Salt, field_of

MOST_READ = 1024 * 1024
"""Largest body, in bytes, that is parsed; the beginning of a longer one stands for its prompt.

Parsing delays other requests.
"""
MOST_NESTED = 20_000
"""Most lists and objects in a body that is parsed: parsing one takes a hundred times as long as parsing a letter."""
Text = str | Sequence[Any] | None
READ_STRICTLY = frozenset({COMPLETIONS, CHAT, RESPONSES})
"""Routes whose bodies have the fields of :class:`OpenAIBody`; bodies of other routes are read as far as possible."""
OBJECTIVE_HEADERS = "x-llm-d-inference-objective", "x-gateway-inference-objective"
FAIRNESS_HEADERS = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"


class OpenAIBody(msgspec.Struct, frozen=True):
    """The fields of completions, chat and responses that the picker needs; the engine reads the others."""

    model: str | None = None
    prompt: Text = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Any] | None = None
    input: Text = None
    instructions: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Salt | None = None
    user: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class _OtherBody(msgspec.Struct, frozen=True):
    """The possible fields in bodies of other routes; only an engine knows which are valid."""

    model: Any = None
    prompt: Any = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    token_ids: Any = None
    max_tokens: Any = None
    sampling_params: Any = None
    priority: Any = None
    cache_salt: Any = None
    user: Any = None


NOTHING = OpenAIBody()
_kinds: Mapping[str, Any] = {each.name: each.type for each in msgspec.structs.fields(OpenAIBody)}
# This is an escape that may be half of a surrogate pair.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_decode = msgspec.json.Decoder(OpenAIBody, strict=False).decode


class OpenAICall(msgspec.Struct, frozen=True):
    """One request: ``path`` without its query, ``headers`` in lower case, and fields of its body; ``size`` in bytes.

    ``opening`` is the beginning of a body that is too long to parse.
    """

    path: str
    headers: Mapping[str, str]
    body: OpenAIBody = NOTHING
    size: int = 0
    opening: bytes = b""

    @property
    def generates(self) -> bool:
        """True if an engine has to compute something for the call."""
        return self.path in GENERATING

    @property
    def may_split(self) -> bool:
        """True if an engine lets another engine prefill the call's prompt when the request names one."""
        return self.path.startswith(PREFILLED_BELOW)

    @property
    def max_tokens(self) -> int | None:
        """The limit of output tokens; None without one."""
        body = self.body
        return body.max_tokens or body.max_completion_tokens or body.max_output_tokens

    @property
    def objective(self) -> str | None:
        """The name of the request's objective, which has a priority; None without one."""
        return self._header(OBJECTIVE_HEADERS)

    def fairness_id(self, others: Sequence[str] = ()) -> str:
        """Return the flow of the request, for turns between waiting requests; empty without one.

        ``others`` are headers that name the flow if the usual headers do not.
        """
        return kept_name(self._header((*FAIRNESS_HEADERS, *others)) or "")

    def _header(self, names: Sequence[str]) -> str | None:
        return next((value for name in names if (value := self.headers.get(name))), None)


def call_of(headers: Mapping[str, str], body: bytes | None) -> OpenAICall:
    """Return the call; ``body`` is None if the proxy does not show it.

    Raises :class:`~tercet.protocol.BadRequest` for a body that no engine would accept.
    """
    path = asked_path(headers)
    if body is None or path not in GENERATING or headers.get(":method") != "POST":
        return OpenAICall(path, headers, size=0 if body is None else len(body))
    text = in_utf8(body)
    if text.count(b"[") + text.count(b"{") > MOST_NESTED:
        return call_unread(headers, [text], len(body))
    if path not in READ_STRICTLY:
        return _other_call(path, headers, text, len(body))
    try:
        if not text.isascii():
            text.decode("utf-8")
        if _ESCAPED_HALF.search(text):
            read_json(text)  # names the field of invalid text, also in fields that only the engine reads
        return OpenAICall(path, headers, _decode(text), len(body))
    except UNREADABLE as error:
        read_json(text)  # explains invalid JSON, or names the field of invalid text
        field = field_of(error)
        where = f"{field}: " if field else ""
        raise BadRequest(f"{where}the request's body is not one of {path}: {error}", field) from error


def _other_call(path: str, headers: Mapping[str, str], text: bytes, size: int) -> OpenAICall:
    """Return a call in another form: its engine checks it, and its text stands for its prompt."""
    try:
        said = msgspec.json.decode(text, type=_OtherBody)
    except UNREADABLE:
        return OpenAICall(path, headers, size=size, opening=text)
    limits = cast("dict[str, Any]", said.sampling_params) if isinstance(said.sampling_params, dict) else {}
    messages = said.messages
    if said.system and isinstance(messages, list):  # Anthropic's API has the system prompt in a separate field
        messages = [{"role": "system", "content": said.system}, *cast("list[Any]", messages)]
    read: dict[str, Any] = {
        "model": said.model,
        "messages": messages,
        "prompt": said.prompt if said.token_ids is None else said.token_ids,
        "tools": said.tools,
        "max_tokens": said.max_tokens if said.max_tokens is not None else limits.get("max_tokens"),
        "priority": said.priority,
        "cache_salt": said.cache_salt,
        "user": said.user,
    }
    known: dict[str, Any] = {}
    for name, value in read.items():
        try:
            known |= {} if value is None else {name: msgspec.convert(value, _kinds[name], strict=False)}
        except msgspec.ValidationError:
            continue
    has_prompt = known.get("messages") or known.get("prompt")
    return OpenAICall(path, headers, OpenAIBody(**known), size, b"" if has_prompt else text)


def call_unread(headers: Mapping[str, str], chunks: Sequence[bytes], size: int) -> OpenAICall:
    """Return a call whose body, of ``size`` bytes, is too long to parse."""
    opening, missing = list[bytes](), MOST_READ
    for chunk in chunks:
        if missing <= 0:
            break
        opening.append(chunk[:missing])
        missing -= len(chunk)
    return OpenAICall(asked_path(headers), headers, size=size, opening=b"".join(opening))


def asked_path(headers: Mapping[str, str]) -> str:
    """Return the requested path: decoded, and without its query."""
    return path_of(headers.get(":path", ""))


CHARACTERS_PER_TOKEN = 4
MOST_COMPARED, MOST_TOKENS = 131_072, 262_144
"""Most tokens of a prompt that are compared, and most that are counted."""
MOST_PARTS = 4096
"""Most messages and parts of messages that are read for an estimate."""
Tokens = tuple[int, ...]


class Renderer(Protocol):
    """A maker of calls' tokens. It must not wait for anything else, nor block other requests for more than moments."""

    async def tokens(self, call: OpenAICall) -> Tokens:
        """Return the prompt's tokens, or about as many stand-ins; empty if the call has no prompt."""
        ...

    def close(self) -> None:
        """Release resources; no more calls may follow."""
        ...


class ByCharacters:
    """A renderer without a model: each four bytes of text are a token, and its number.

    Equal prompts have equal tokens, and lengths are about right. Such tokens match nothing that engines report, only
    prompts that were routed before.
    """

    async def tokens(self, call: OpenAICall) -> Tokens:
        return estimated(call)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def estimated(call: OpenAICall) -> Tokens:
    """Return a call's token ids if it has them; otherwise stand-ins for its text."""
    if call.opening:
        return stand_ins(call.opening, call.size)
    body = call.body
    given = body.prompt if body.prompt is not None else body.input
    said = token_ids(given) if body.messages is None else None
    return stand_ins(plain_text(call).encode("utf-8", "surrogatepass")) if said is None else said


def stand_ins(data: bytes, size: int | None = None) -> Tokens:
    """Return stand-ins for the tokens of a text; ``data`` is its beginning if the text has ``size`` bytes."""
    compared = min(len(data) // CHARACTERS_PER_TOKEN, MOST_COMPARED)
    counted = min((len(data) if size is None else size) // CHARACTERS_PER_TOKEN, MOST_TOKENS)
    return unpack_from(f"<{compared}I", data) + (0,) * (counted - compared)


def token_ids(given: object) -> Tokens | None:
    """Return the tokens of a prompt that is given as token ids; None for another prompt."""
    if not isinstance(given, list) or not given or type(cast("list[Any]", given)[0]) is not int:
        return None
    items = cast("list[Any]", given)
    try:
        compared = array("I", items[:MOST_COMPARED])
    except (TypeError, OverflowError):
        return None
    return tuple(compared) + (0,) * (min(len(items), MOST_TOKENS) - len(compared))


def plain_text(call: OpenAICall) -> str:
    """Return a call's text, in order."""
    body = call.body
    if body.messages is not None:
        return "\n".join(_texts(body.messages))
    given = body.prompt if body.prompt is not None else body.input
    return "\n".join(_texts([body.instructions, given]))


def _texts(content: object) -> Iterator[str]:
    """Yield the strings in nested strings, parts, messages and lists of these; other types are ignored."""
    left, stack = MOST_PARTS, [content]
    while stack and left:
        left -= 1
        part = stack.pop()
        if part is None:
            continue
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            fields = cast("Mapping[str, Any]", part)
            if isinstance(role := fields.get("role"), str):
                yield f"{role}:"
            stack.append(fields.get("text", fields.get("content")))
        elif isinstance(part, Sequence):
            stack.extend(reversed(cast("Sequence[object]", part)[:left]))
