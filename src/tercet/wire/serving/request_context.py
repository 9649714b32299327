"""One HTTP request: its body, read with a limit, and its context, which is determined once and passed on from there.

The handlers of vLLM call its engine client without this context, in the request's task or in tasks that they start.
Only they need :func:`current`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tercet.protocol import RequestTooLarge

if TYPE_CHECKING:
    from starlette.types import Message, Receive

    from tercet.protocol import TercetError
    from tercet.wire.serving.client_connection import ClientConnection


class Concurrency(Protocol):
    """A limit that admits the sequences of one request a few at a time."""

    def one(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which one more of the sequences runs."""
        ...


class Preparation(Protocol):
    """The turn of a long body to be prepared."""

    @property
    def has_ended(self) -> bool:
        """True if other bodies of the client may have their turn."""
        ...

    def end(self) -> None:
        """End the turn, so that other bodies of the client may have theirs; calls after the first one do nothing."""
        ...


class FastStream(Protocol):
    """The fast path's stream of a request."""

    def begin(self, outputs: Any) -> None:
        """Stream these outputs: vLLM has added the sequence."""
        ...

    @property
    def calls_tool(self) -> bool:
        """True if the streamed answer calls a tool."""
        ...


class Asked(msgspec.Struct, frozen=True):
    """The fields that the router itself uses; vLLM reads the others. Empty if vLLM would not accept the body."""

    model: str | None = ""
    priority: int = 0
    user: str | None = None  # in the form that is kept, as is the session's name
    stream: Any = None
    session_name: str | None = None
    # The fields from which sampling parameters are derived, by parameter: an engine that refuses a parameter refuses
    # that field.
    parameters: Mapping[str, str] = {}


NOTHING = Asked()
CONTEXT = "tercet.context"
"""The key of the request's context in an ASGI scope."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request."""

    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    form: str = ""  # of its body, by :mod:`tercet.protocol.request_checks`; empty without a body
    fields: dict[str, Any] | None = None  # its body, if that is a JSON object
    asked: Asked = NOTHING
    began: float = field(default_factory=time.monotonic)
    connection: ClientConnection | None = None
    # One entry per sequence that it started (``n``, or several prompts): its trace, and the generated output.
    traces: list[Any] = field(default_factory=list[Any])
    sequences: list[Any] = field(default_factory=list[Any])
    wants_trace: bool = False  # its client gets the traces
    failed: TercetError | None = None  # the error that ended the first of its sequences that failed, or the refusal
    client_left: bool = False  # before it was admitted
    # The error, in OpenAI's form, in the chat stream from which vLLM makes the answer.
    stream_error: Mapping[str, Any] | None = None
    # The tasks of sequences by vLLM's ids, the number of prompts begun, the most sequences allowed, and their
    # admission.
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    generations: int = 0
    most_sequences: int | None = None
    concurrency: Concurrency | None = None
    preparation: Preparation | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    # On the fast path: the function that adds its sequence to vLLM, once vLLM has prepared it; vLLM's parser of the
    # answer, if it made one for that; and the stream that serves it.
    add_request: Callable[[], Awaitable[Any]] | None = None
    parser: Any = None
    stream: FastStream | None = None
    has_ended: bool = False
    # Whether the answer calls a tool, and the functions to call when it has ended.
    calls_tool: bool = False
    when_ended: list[Callable[[RequestContext], object]] = field(
        default_factory=list["Callable[[RequestContext], object]"]
    )

    def prepared(self) -> None:
        """Record that its first sequence runs, or that none will: the client's next long body may then be prepared."""
        if self.preparation is not None:
            self.preparation.end()

    def end(self) -> None:
        """End the request: the answer is sent, or its client has left. Its sequences end, and no more begin.

        vLLM aborts the sequences that it has added. It drops a request whose task is cancelled while it is being added.
        """
        self.has_ended = True
        for tell in self.when_ended:
            tell(self)
        for task in [*self.running.values()]:
            task.cancel()


_current: ContextVar[RequestContext | None] = ContextVar("tercet_request", default=None)


def current() -> RequestContext:
    """Return the context of the HTTP request being served; an empty one outside of any request."""
    return _current.get() or RequestContext()


@contextmanager
def serving(context: RequestContext) -> Generator[None]:
    """Make ``context`` the one of the HTTP request being served in this block; end it at the exit."""
    token = _current.set(context)
    try:
        yield
    finally:
        context.end()
        _current.reset(token)


# ---- The body --------------------------------------------------------------------------------------------------------


class BodyTaker(Protocol):
    """A buffer of one body: it takes the pieces, and has the whole ``content`` after the end."""

    content: bytes

    def take(self, piece: bytes) -> None:
        """Keep one more piece; may raise."""
        ...

    def end(self) -> None:
        """Make ``content`` of the pieces."""
        ...


class BodyPieces:
    """A buffer of one body that no limit of several bodies applies to."""

    def __init__(self) -> None:
        self.content = b""
        self._pieces: list[bytes] = []

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def end(self) -> None:
        self.content = b"".join(self._pieces)
        self._pieces.clear()


async def read_whole(receive: Receive, announced: str, limit: int, taker: str, body: BodyTaker) -> bool:
    """Read the body of an ASGI request into ``body``; return False if its client leaves before its end.

    ``announced`` is its ``content-length``, or empty. Raises :class:`~tercet.protocol.RequestTooLarge` for more than
    ``limit`` bytes, the limit of the ``taker``.
    """
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, taker)
    nothing: Message = {}
    size, more, message = 0, True, nothing
    try:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return False
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit, taker)
            body.take(message.get("body", b""))
            more = message.get("more_body", False)
        body.end()
        return True
    finally:
        message = nothing  # an exception refers to this frame, and may outlive it by far


def _too_large(limit: int, taker: str) -> RequestTooLarge:
    return RequestTooLarge(f"the request's body has more than {limit} bytes, the limit of {taker}")
