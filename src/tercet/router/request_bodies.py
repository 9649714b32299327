"""Clients' bodies on their way into a router: read with limits, checked once, held, and prepared in turns.

What a body may contain is decided here, where it enters: its size, its text, its items, its sequences. vLLM processes
each item of a body on the event loop: a message, a part of its content, a tool, a property of a schema takes some
microseconds, in which no stream gets a token. Numbers in lists (prompts of token ids) take a hundredth of that;
characters take almost no time, and only the limit of bytes applies to them. Structured outputs are checked here since
vLLM parses them on the event loop, and since an engine could refuse them only after a stream's head, with status 200,
was sent. Sequences are prompts times choices; invalid values are not counted, since vLLM refuses them.

Buffered bodies are those of requests that are not admitted or passed on yet. A client may begin many bodies of the
largest accepted size and end none. When the buffered bodies of one process exceed their limit, the largest one is
dropped, with HTTP status 429, so that small requests of other clients still pass. Requests that run are not ended for
others: a request whose body would exceed the limit for theirs is refused, also with 429.

The work for a body before its first sequence runs (parsing, validation, templates, tokenization) grows with the body,
and most of it runs on the event loop. The long bodies of one client are prepared one after the other, in order; other
clients do not wait for them. Between the work for two bodies that are not short, of any clients, the loop does all
other work that is ready, such as sending tokens. Clients take turns there.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any, cast

import msgspec
from starlette.types import Message, Receive, Scope

from tercet.decisions.sessions import closes_session, session_in_body
from tercet.fleet.admission import SOON, ClientLeft
from tercet.fleet.members import CallsInFlight, UntilLost
from tercet.protocol import BadRequest, Saturated
from tercet.protocol.errors import api_of
from tercet.protocol.grammar_bounds import require_small
from tercet.protocol.headers import SESSION_FINAL_HEADER
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.names import kept_name
from tercet.protocol.request_checks import announces_body, forms_of, labelled
from tercet.settings import Limits
from tercet.wire.serving.server_access import Asked, BodyTurn, RequestContext, read_whole

# Divisors of the limit in the Responses API, where vLLM takes about ten times as long for each item, and for tools.
RESPONSES_SHARE, TOOLS_SHARE = 8, 32
# Texts in lists and entries of objects per item: each takes half as long as an item.
VALUES_PER_ITEM = 2
# Numbers in the lists of one field per item: a prompt may be as long as the model allows, and vLLM reads each of
# ``stop_token_ids`` several times.
NUMBERS_PER_ITEM, OF_PROMPTS, OF_STOPS = 32, 96, 2
NUMBERS_OF = {"prompt": OF_PROMPTS, "stop_token_ids": OF_STOPS}
# Bytes of a body from which on its structured outputs are checked in another thread.
LONG = 16 * 1024
# Fields with structured outputs in vLLM's form, and those in which the APIs have the schema of an answer.
OWN_FIELDS = (("structured_outputs",), ("sampling_params", "structured_outputs"))
FORMATS = (("response_format",), ("text", "format"), ("output_format",), ("output_config", "format"))
# Limit for commas, brackets and braces, also those in texts: it bounds the time of decoding.
MOST_SEPARATORS = 2_000_000
LARGEST_AT_ONCE = 4
"""Number of bodies of the largest accepted size that fit into the limit together."""
ADMITTED_BYTES = 1024**3
"""Most bytes of the bodies of admitted requests: 10,000 requests of 100 KB."""
RETRY_SECONDS = 10
PAGED_BYTES = 256 * 1024
"""Bytes above which a body is in its own pages."""
LONG_BYTES = 256 * 1024
"""Bytes from which on a body is long, regardless of its content: its text takes tens of milliseconds to tokenize."""
LONG_ITEMS = 256
"""Number of lists and objects from which on a shorter body is long, too; each takes about 20 us on the event loop."""
COMMAS_PER_ITEM = 16
SHORT_SHARE = 8
"""A body with less than this part of a long body's size, in each respect, is short: many of them take little time."""


# ---- reading a body --------------------------------------------------------------------------------------------------


class ReceivedBody:
    """A whole body that was read, which the application receives again."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.content = content
        self._content: bytes | None = content
        self._receive = receive
        self._next: asyncio.Future[Message] | None = None

    def replace(self, content: bytes) -> None:
        self.content = self._content = content

    async def receive(self) -> Message:
        """Return the body, then later messages: ASGI's ``receive``."""
        if self._content is not None:
            content, self._content, self.content = self._content, None, b""  # vLLM has its own copy from now on
            return {"type": "http.request", "body": content, "more_body": False}
        return await (self._receive() if self._next is None else asyncio.shield(self._next))

    def left(self) -> asyncio.Future[Message]:
        """Return a future that is done once the client has closed its connection."""
        self._next = self._next or asyncio.ensure_future(self._receive())
        return self._next

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


def nothing_from(receive: Receive) -> Receive:
    """Return an ASGI ``receive`` for a body that is ignored: an empty body, then messages that are not a body's."""
    began = False

    async def received() -> Message:
        nonlocal began
        if not began:
            began = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return received


async def receive_body(
    context: RequestContext, scope: Scope, receive: Receive, limit: int, kept: HeldBody
) -> ReceivedBody:
    """Decide what the body of a request is, read it, and return it; ``kept`` counts its bytes.

    The application gets only the header fields of that decision. Raises the errors of
    :func:`~tercet.protocol.request_checks.labelled`, :class:`~tercet.protocol.RequestTooLarge`,
    :class:`~tercet.protocol.Saturated` if all bodies together are too large, and :class:`ClientLeft` if the client
    leaves before the end of the body.
    """
    announced, taker = context.headers.get("content-length", ""), "this router (--max-request-bytes)"

    def decide() -> None:
        context.form, scope["headers"], _ = labelled(scope["headers"], forms_of(context.path))

    if announces_body(scope["headers"]):
        decide()
    # Only a body in several messages can wait for its client: the usual one needs no watch for being dropped.
    left = [await receive()]

    async def messages() -> Message:
        return left.pop() if left else await receive()

    async with kept.until_let_go() if left[0].get("more_body", False) else nullcontext():
        is_whole = await read_whole(messages, announced, limit, taker, kept)
    if not is_whole:
        raise ClientLeft
    if kept.content and not context.form:  # HTTP/2 need not announce a body
        decide()
    return ReceivedBody(kept.content, receive)


async def read_body(context: RequestContext, body: ReceivedBody, most_items: int) -> None:
    """Read the fields of a JSON body into ``context``, and convert the body to UTF-8.

    Raises :class:`~tercet.protocol.BadRequest` for content that is not valid JSON, and for JSON with too many items.
    """
    # JSON may also be UTF-16 or UTF-32. The application gets UTF-8, so that both read the same fields.
    content = in_utf8(body.content)
    if content is not body.content:
        body.replace(content)
    require_readable(content)  # before decoding, which is one call on the event loop
    found = read_json(content)
    if isinstance(found, (dict, list)):
        await require_few_items(context.path, content, found, most_items)
    if isinstance(found, dict):
        context.fields = cast("dict[str, Any]", found)
        await require_small_structures(content, context.fields)
        context.asked = asked_by(context.fields)
        if closes_session(context.fields):
            context.headers = {**context.headers, SESSION_FINAL_HEADER: "true"}


def asked_by(fields: dict[str, Any]) -> Asked:
    """Return the fields of a body that the router uses; skip a field of a wrong type, which vLLM refuses or ignores."""
    given = {name: fields[name] for name in _ASKED if name in fields}
    try:
        asked = msgspec.convert(given, Asked, strict=False)
    except msgspec.ValidationError:
        for name, value in tuple(given.items()):
            try:
                msgspec.convert({name: value}, Asked, strict=False)
            except msgspec.ValidationError:
                del given[name]
        asked = msgspec.convert(given, Asked, strict=False)
    user = None if asked.user is None else kept_name(asked.user)
    session, parameters = session_in_body(fields), parameters_of(fields)
    if user is None and session is None and not parameters:
        return asked
    return msgspec.structs.replace(asked, user=user, session_name=session, parameters=parameters)


def parameters_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a body from which vLLM derives sampling parameters of other names, by parameter."""
    if _DERIVING.isdisjoint(fields):
        return {}
    derived: dict[str, str] = {}
    for parameter, names in _DERIVED.items():
        for name in names:
            # vLLM derives nothing from a value that is the same as none, so the next field decides.
            if (value := _at(fields, name.split("."))) is not None and value not in _WITHOUT_EFFECT.get(name, ()):
                derived[parameter] = name
                break
    return derived


_ASKED = tuple(name for name in Asked.__struct_fields__ if name not in ("session_name", "parameters"))
# Fields of the APIs, by the sampling parameter that vLLM derives from them; of several, the first one decides.
_DERIVED = {
    "structured_outputs": (
        "sampling_params.structured_outputs", "structured_outputs", "tool_choice", "response_format", "text.format",
        "output_config.format", "output_format", "parallel_tool_calls", "tools",
    ),
    "logprobs": ("sampling_params.logprobs", "logprobs", "top_logprobs", "include"),
    "prompt_logprobs": ("sampling_params.prompt_logprobs", "prompt_logprobs", "echo"),
    "max_tokens": ("sampling_params.max_tokens", "max_completion_tokens", "max_output_tokens"),
}  # fmt: skip
_DERIVING = frozenset(name.partition(".")[0] for names in _DERIVED.values() for name in names)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},), "text.format": ({"type": "text"},),
    "parallel_tool_calls": (True,), "tools": ([],), "echo": (False,), "logprobs": (False,),
}  # fmt: skip


# ---- items and structures --------------------------------------------------------------------------------------------


def require_readable(content: bytes) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for JSON with too many values."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_SEPARATORS:
        raise BadRequest(f"the request's body has more than {MOST_SEPARATORS} values, which is the limit")


async def require_few_items(path: str, content: bytes, value: Any, most: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the JSON ``value`` of ``content`` has more than ``most`` items."""
    if api_of(path) == "responses":
        tools: Any = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else None
        most_tools = most // TOOLS_SHARE or 1
        if isinstance(tools, list) and len(cast("list[Any]", tools)) > most_tools:
            raise _too_many("tools", "tools", most_tools)
        most = most // RESPONSES_SHARE or 1
    # Counts of bytes are cheap and never too low: most bodies need no other.
    may_be_many = content.count(b"[") + content.count(b"{") > most or content.count(b",") > most * OF_STOPS
    if may_be_many or content.count(b'"') + content.count(b":") > most * VALUES_PER_ITEM:
        # Texts may contain these characters, too, so count exactly: in a thread, and no further than the limit.
        await asyncio.to_thread(_count, value, most)


async def require_small_structures(content: bytes, fields: Mapping[str, Any]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a structured output that takes too long to compile."""
    for path in (*OWN_FIELDS, *FORMATS):
        found = _at(fields, path)
        if not isinstance(found, dict):
            continue
        # Each API's field is brought into the form of vLLM's structured_outputs.
        field, given = ".".join(path), cast("dict[str, Any]", found)
        structured: Mapping[str, Any] = given if path in OWN_FIELDS else {"json": given}
        if len(content) > LONG:
            await asyncio.to_thread(_require_small, structured, field)
        else:
            _require_small(structured, field)


def _require_small(structured: Mapping[str, Any], field: str) -> None:
    try:
        require_small(structured, field)
    except BadRequest as error:
        if field.endswith("structured_outputs"):
            raise
        raise BadRequest(error.message.replace(f"{field}.json", field, 1), field) from error


def _at(fields: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path of names; None where an object on the way, or the name, is missing."""
    found: Any = fields
    for name in path:
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found


def _count(value: Any, most: int) -> None:
    items = values = 0
    numbers = Counter[str]()
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        field, found = left.pop()
        if isinstance(found, dict):
            entries = cast("dict[str, Any]", found)
            values += len(entries)
            inner: list[tuple[str, Any]] = [
                (field or str(name), entry) for name, entry in entries.items() if isinstance(entry, (dict, list))
            ]
        else:
            elements = cast("list[Any]", found)
            texts = sum(isinstance(entry, str) for entry in elements)
            inner = [(field, entry) for entry in elements if isinstance(entry, (dict, list))]
            values += texts
            numbers[field] += len(elements) - texts - len(inner)
        items += len(inner)
        if items > most:
            raise _too_many(field or "the body", "lists and objects", most)
        if values > most * VALUES_PER_ITEM:
            raise _too_many(field or "the body", "texts and entries", most * VALUES_PER_ITEM)
        if numbers[field] > (most_numbers := most * NUMBERS_OF.get(field, NUMBERS_PER_ITEM)):
            raise _too_many(field or "the body", "numbers", most_numbers)
        left += inner


def _too_many(field: str, what: str, most: int) -> BadRequest:
    message = f"{field}: the request's body has more than {most} {what}, which is the limit (max-request-items)"
    return BadRequest(message, None if field == "the body" else field)


# ---- sequences -------------------------------------------------------------------------------------------------------

# Fields whose items are one sequence each, and their paths; SageMaker's path accepts the bodies of several others.
LISTS = (
    ("prompt", "/v1/completions"), ("prompt_embeds", "/v1/completions"), ("messages", "/v1/chat/completions/batch"),
    ("items", "/generative_scoring"), ("questions", "/v1/systemone"),
)  # fmt: skip
ANY = "/invocations"
_FIELDS_OF = {path: [name for name, where in LISTS if where == path] for _, path in LISTS} | {
    ANY: [name for name, _ in LISTS]
}


def require_few_sequences(path: str, fields: Mapping[str, Any] | None, most: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if a body asks for more than ``most`` sequences."""
    if fields is None:
        return
    # As vLLM multiplies them: each prompt of a list gets `n` choices.
    prompts = max([_length(fields.get(name)) for name in _FIELDS_OF.get(path, ())], default=1)
    choices = max(_choices(fields), _choices(fields.get("sampling_params")))
    if prompts * choices <= most:
        return
    field = "n" if choices > 1 else next(name for name, _ in LISTS if _length(fields.get(name)) == prompts)
    raise BadRequest(
        f"{field}: the request asks for {prompts * choices} sequences ({prompts} prompts, {choices} choices each), "
        f"and this router allows {most} per request (max-sequences); send several requests",
        field,
    )


def _length(found: Any) -> int:
    """Return the number of prompts in a field; a list of tokens or of messages is one prompt."""
    if isinstance(found, dict):
        return len(cast("dict[str, Any]", found))
    if not isinstance(found, list):
        return 1
    items = cast("list[Any]", found)
    return 1 if not items or isinstance(items[0], (int, dict)) else len(items)


def _choices(fields: Any) -> int:
    """Return the value of ``n`` in any form that vLLM accepts; 1 without a valid value."""
    if not isinstance(fields, dict) or "n" not in fields:
        return 1
    try:
        return max(1, msgspec.convert(cast("dict[str, Any]", fields)["n"], int, strict=False))
    except msgspec.ValidationError:
        return 1


# ---- bytes of bodies -------------------------------------------------------------------------------------------------


class HeldBody:
    """The buffered bytes of one body; ``size`` is their number, and ``content`` the whole body once it has arrived."""

    def __init__(self, bodies: BodiesHeld) -> None:
        self.size = 0
        self.content = b""
        self._pieces: list[bytes] = []
        self._pages: mmap | None = None
        self._written = 0
        self.calls = CallsInFlight()
        self._bodies = bodies
        self._refusal: Saturated | None = None

    def add(self, size: int) -> None:
        """Add ``size`` bytes; raise :class:`~tercet.protocol.Saturated` if this body is dropped."""
        if self._refusal is None:
            self.size += size
            self._bodies.require_room(self, size)
        if self._refusal is not None:
            raise self._refusal

    def take(self, piece: bytes) -> None:
        """Keep one more piece of the body; raise :class:`~tercet.protocol.Saturated` if this body is dropped."""
        self.add(len(piece))
        self._pieces.append(piece)
        if self.size - self._written >= (PAGED_BYTES if self._pages is None else PAGED_BYTES // 4):
            self._to_pages()

    def end(self) -> None:
        """Make ``content`` of the pieces: the body has arrived. It counts until :meth:`forget`."""
        if self._pages is not None:
            self._to_pages()
            content = self._pages[: self._written]
        else:
            content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._drop()
        self.content = content

    def _to_pages(self) -> None:
        # Pages go back to the system when they are closed, and can grow in place; memory of the heap need not.
        end = self._written + sum(map(len, self._pieces))
        if self._pages is None:
            self._pages = mmap(-1, _whole_pages(2 * end), MAP_PRIVATE | MAP_ANONYMOUS)
        elif end > len(self._pages):
            self._pages.resize(_whole_pages(2 * end))
        for piece in self._pieces:
            self._pages[self._written : self._written + len(piece)] = piece
            self._written += len(piece)
        self._pieces.clear()

    def _drop(self) -> None:
        self.content = b""
        self._pieces.clear()
        if self._pages is not None:
            self._pages.close()
        self._pages, self._written = None, 0

    def until_let_go(self) -> UntilLost:
        """Return a context inside which :class:`~tercet.protocol.Saturated` is raised when the body is dropped."""
        if self._refusal is not None:
            raise self._refusal
        return UntilLost(self.calls)

    def forget(self) -> None:
        self._drop()
        self._bodies.forget(self)

    def let_go(self, refusal: Saturated) -> None:
        """Drop the body: its reader gets ``refusal``."""
        self._refusal = refusal
        self._drop()
        self.calls.lose(refusal)


class BodiesHeld:
    """All buffered bodies of one process, with at most ``most`` bytes in total."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bodies: set[HeldBody] = set()
        self.size = 0

    def __len__(self) -> int:
        return len(self._bodies)

    @contextmanager
    def one(self) -> Generator[HeldBody]:
        """Register a body while entered; it counts once it has bytes."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.forget()

    def require_room(self, body: HeldBody, size: int) -> None:
        """Count ``size`` more bytes of ``body``; above the limit, drop the largest bodies, maybe this one."""
        self._bodies.add(body)
        # Counted before it is checked: the body that exceeds the limit may be the largest itself.
        self.size += size
        while self.size > self._most:
            # The largest and not the newest: a client with one huge body must not make others' small ones fail.
            largest = max(self._bodies, key=lambda each: each.size)
            self.forget(largest)
            largest.let_go(
                Saturated(
                    f"clients send more than {self._most} bytes of requests at once, the limit of this process, and "
                    f"this request is the largest; retry after {RETRY_SECONDS} s",
                    retry_after=RETRY_SECONDS,
                )
            )

    def forget(self, body: HeldBody) -> None:
        if body in self._bodies:
            self._bodies.discard(body)
            self.size -= body.size


class AdmittedBodies:
    """The bodies of the requests that one process serves now, with at most ``most`` bytes in total."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = 0

    @contextmanager
    def one(self, size: int) -> Generator[None]:
        """Count a body of ``size`` bytes while entered; raise :class:`~tercet.protocol.Saturated` if it does not fit.

        A body fits if no other one is there.
        """
        # Refused and not dropped: an admitted request may have sent tokens already.
        if self.size and self.size + size > self._most:
            raise Saturated(
                f"the running requests of this process have bodies of {self.size} bytes, and this one of {size} bytes "
                f"would exceed the limit of {self._most}; retry after {RETRY_SECONDS} s",
                retry_after=RETRY_SECONDS,
            )
        self.size += size
        try:
            yield
        finally:
            self.size -= size


def _whole_pages(size: int) -> int:
    return -(-size // PAGESIZE) * PAGESIZE


# ---- turns -----------------------------------------------------------------------------------------------------------


def is_long(content: bytes) -> bool:
    """True if the work for a body takes long, so that the body has to wait for its turn."""
    return _has(content, LONG_BYTES, LONG_ITEMS)


def is_short(content: bytes) -> bool:
    """True if the work for a body takes so little time that many of them may be done at once."""
    return not _has(content, LONG_BYTES // SHORT_SHARE, LONG_ITEMS // SHORT_SHARE)


def _has(content: bytes, size: int, items: int) -> bool:
    if len(content) >= size or content.count(b",") >= items * COMMAS_PER_ITEM:
        return True
    return content.count(b"{") + content.count(b"[") >= items


class LongBodies:
    """The long bodies of one process, by client; ``count_refusal`` gets the reason of each refusal.

    In ``limits``, ``long_queued`` is how many bodies of one client may wait, and ``queue_timeout_s`` is their timeout.
    """

    def __init__(self, limits: Limits, count_refusal: Callable[[str], object]) -> None:
        self._limits = limits
        self._count_refusal = count_refusal
        # The waiting bodies of each client with a body in preparation.
        self._waiting: dict[str, deque[asyncio.Future[BodyTurn]]] = {}
        self._is_worked_on = False
        # The bodies of each client that wait to be worked on; the first client is the next one.
        self._next: dict[str, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, client: str, left: Callable[[], asyncio.Future[Any]]) -> BodyTurn:
        """Wait for the client's turn to have a long body prepared, and return the turn, which the caller ends.

        ``left`` is called only if the body has to wait; its future is done once the client closed the connection.
        Raises :class:`~tercet.protocol.Saturated` and :class:`~tercet.fleet.admission.ClientLeft`.
        """
        # One body of each client at a time. A client with many long bodies waits for himself, and not others for him.
        waiting = self._waiting.get(client)
        if waiting is None:
            return self._begin(client)
        if len(waiting) >= self._limits.long_queued:
            raise self._refusal(
                "long_queue_full",
                f"{len(waiting)} long requests of this client wait to be prepared, which is the limit "
                "(max-long-queued)",
            )
        mine: asyncio.Future[BodyTurn] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        gone = left()
        seconds = self._limits.queue_timeout_s
        try:
            await asyncio.wait({mine, gone}, timeout=seconds, return_when="FIRST_COMPLETED")
            if mine.done():
                return mine.result()
            if gone.done():
                raise ClientLeft
            raise self._refusal(
                "long_queue_timeout", f"after {seconds:g} s, earlier long requests of this client were not prepared yet"
            )
        except BaseException:
            # The turn may have come in the same iteration in which the wait ended: then it is passed on, not lost.
            if mine.done():
                mine.result().end()
            else:
                waiting.remove(mine)
            raise

    async def alone(self, client: str) -> None:
        """Wait for an iteration of the event loop in which no other caller of this method returns.

        One caller of each client returns, then the next one of each.
        """
        if self._is_worked_on:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._next.setdefault(client, deque()).append(mine)
            await mine
            return
        self._work()

    def _begin(self, client: str) -> BodyTurn:
        self._waiting.setdefault(client, deque())
        return BodyTurn(lambda: self._pass_on(client))

    def _pass_on(self, client: str) -> None:
        waiting = self._waiting[client]
        if waiting:
            waiting.popleft().set_result(self._begin(client))
        else:
            del self._waiting[client]

    def _refusal(self, reason: str, why: str) -> Saturated:
        self._count_refusal(reason)
        return Saturated(f"{why}; retry after {SOON} s", retry_after=SOON)

    def _work(self) -> None:
        """Let one caller work until its next await; callbacks that are scheduled already run after that."""
        # So the tokens of other requests get out between two long bodies, however many of them have arrived.
        self._is_worked_on = True
        asyncio.get_running_loop().call_soon(self._worked)

    def _worked(self) -> None:
        self._is_worked_on = False
        while self._next:
            # Round robin: a client with more bodies goes to the end of the line.
            client, waiting = next(iter(self._next.items()))
            following = waiting.popleft()
            del self._next[client]
            if waiting:
                self._next[client] = waiting
            if not following.done():
                following.set_result(None)
                self._work()
                return
