"""What an endpoint picker needs of an OpenAI request, out of its headers and its body."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.json_text import UNREADABLE, in_utf8, read_json
from tercet.protocol.openai_routes import CHAT, COMPLETIONS, GENERATING, PREFILLED_BELOW, RESPONSES, path_of
from tercet.protocol.wire import field_of

MOST_READ = 1024 * 1024
"""Bytes of a body that is read; of a longer one the beginning stands for its prompt. While it is read others wait."""
MOST_NESTED = 20_000
"""Lists and objects in a body that is read: each takes a hundred times as long as a letter."""
Text = str | Sequence[Any] | None
READ_STRICTLY = frozenset({COMPLETIONS, CHAT, RESPONSES})
"""Routes whose bodies have the fields of :class:`OpenAIBody`; of others, what is found of them."""
OBJECTIVE_HEADERS = "x-llm-d-inference-objective", "x-gateway-inference-objective"
FAIRNESS_HEADERS = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"


class OpenAIBody(msgspec.Struct, frozen=True):
    """The fields of completions, chat and responses that say what is to be served; the others are the engine's."""

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
    cache_salt: str | None = None
    user: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class _OtherBody(msgspec.Struct, frozen=True):
    """What bodies of other routes may say; only an engine knows whether it may."""

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
# What may be half of a surrogate pair, as JSON escapes it.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_decode = msgspec.json.Decoder(OpenAIBody, strict=False).decode


class OpenAICall(msgspec.Struct, frozen=True):
    """One request: ``path`` without its query, ``headers`` in lower case, and what its body says; ``size`` in bytes.

    ``opening`` is the beginning of a body that was not read since it is too long.
    """

    path: str
    headers: Mapping[str, str]
    body: OpenAIBody = NOTHING
    size: int = 0
    opening: bytes = b""

    @property
    def generates(self) -> bool:
        """Whether an engine has to compute something for it."""
        return self.path in GENERATING

    @property
    def may_split(self) -> bool:
        """Whether an engine has its prompt prefilled by another one when it is asked to."""
        return self.path.startswith(PREFILLED_BELOW)

    @property
    def max_tokens(self) -> int | None:
        """The limit of its answer."""
        body = self.body
        return body.max_tokens or body.max_completion_tokens or body.max_output_tokens

    @property
    def objective(self) -> str | None:
        """The name of what it is served for, which has a priority."""
        return self._header(OBJECTIVE_HEADERS)

    def fairness_id(self, others: Sequence[str] = ()) -> str:
        """Whom it shares its turns with while requests wait; empty for nobody in particular.

        ``others`` are headers that say it where the usual ones do not.
        """
        return self._header((*FAIRNESS_HEADERS, *others)) or ""

    def _header(self, names: Sequence[str]) -> str | None:
        return next((value for name in names if (value := self.headers.get(name))), None)


def call_of(headers: Mapping[str, str], body: bytes | None) -> OpenAICall:
    """The call; ``body`` is None where it is not shown.

    Raises :class:`~tercet.protocol.BadRequest` for a body that no engine would take.
    """
    path = asked_path(headers)
    if body is None or path not in GENERATING or headers.get(":method") != "POST":
        return OpenAICall(path, headers, size=0 if body is None else len(body))
    text = in_utf8(body)
    if text.count(b"[") + text.count(b"{") > MOST_NESTED:
        return call_unread(headers, [text], len(body))
    if path not in READ_STRICTLY:
        return _other_call(path, headers, text, len(body))
    if not (text.isascii() or _is_utf8(text)) or _ESCAPED_HALF.search(text):
        read_json(text)  # fields that are not read here are the engine's, for which text that is none is no text either
    try:
        return OpenAICall(path, headers, _decode(text), len(body))
    except UNREADABLE as error:
        read_json(text)  # it says what is wrong with what is no JSON, or names the field of text that is none
        field = field_of(error)
        where = f"{field}: " if field else ""
        raise BadRequest(f"{where}the request's body is not one of {path}: {error}", field) from error


def _other_call(path: str, headers: Mapping[str, str], text: bytes, size: int) -> OpenAICall:
    """A call in a form of its own: its engine says what is wrong with it, and its text stands for its prompt."""
    try:
        said = msgspec.json.decode(text, type=_OtherBody)
    except UNREADABLE:
        return OpenAICall(path, headers, size=size, opening=text)
    limits = cast("dict[str, Any]", said.sampling_params) if isinstance(said.sampling_params, dict) else {}
    read: dict[str, Any] = {
        "model": said.model,
        "messages": _with_system(said.messages, said.system),
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


def _with_system(messages: Any, system: Any) -> Any:
    """The messages with what Anthropic's API says apart from them."""
    if not system or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *cast("list[Any]", messages)]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def call_unread(headers: Mapping[str, str], chunks: Sequence[bytes], size: int) -> OpenAICall:
    """A call whose body, of ``size`` bytes, is longer than what is read."""
    opening, missing = list[bytes](), MOST_READ
    for chunk in chunks:
        if missing <= 0:
            break
        opening.append(chunk[:missing])
        missing -= len(chunk)
    return OpenAICall(asked_path(headers), headers, size=size, opening=b"".join(opening))


def asked_path(headers: Mapping[str, str]) -> str:
    """What is asked for: decoded, and without its query."""
    return path_of(headers.get(":path", ""))
