"""What belongs to one HTTP request: found out once, when it comes in, and passed on from there.

The handlers of vLLM call its engine client without this context, in the request's task or in tasks that they start.
:func:`current` is for them alone.
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

if TYPE_CHECKING:
    from tercet.protocol import TercetError
    from tercet.wire.serving.client_connection import ClientConnection


class InPortions(Protocol):
    """Lets the sequences of one request in, some at a time."""

    def one(self) -> AbstractAsyncContextManager[None]:
        """While entered, one more of them runs."""
        ...


class Preparation(Protocol):
    """The turn of a long body to be prepared."""

    @property
    def has_ended(self) -> bool:
        """True if others of the client may have theirs."""
        ...

    def end(self) -> None:
        """Let others of the client have theirs; calls after the first one do nothing."""
        ...


class FastStream(Protocol):
    """The fast path's stream of a request."""

    def begin(self, outputs: Any) -> None:
        """Stream these outputs: vLLM has added the sequence."""
        ...

    @property
    def calls_tool(self) -> bool:
        """True if what was streamed calls a tool."""
        ...


class Asked(msgspec.Struct, frozen=True):
    """What the router itself goes by; the rest is vLLM's. Empty where the body is not what vLLM would take.

    ``session_name`` is a session that the body names by fields that vLLM does not read.
    """

    model: str | None = ""
    priority: int = 0
    user: str | None = None
    stream: Any = None
    session_name: str | None = None


NOTHING = Asked()
CONTEXT = "tercet.context"
"""The key of an ASGI scope that has the request's context."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request. ``headers`` have names in lower case; ``fields`` is its body, if that is a JSON object.

    ``began`` is when it came, in seconds of :func:`time.monotonic`. ``traces`` has one entry per sequence that it
    started (``n``, or several prompts), and so have ``sequences``, which say what was generated; ``wants_trace``: its
    client gets them. ``client_left``: before it came in. ``failed`` is the error that has ended the first of them that
    failed, or the refusal.
    """

    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: dict[str, Any] | None = None
    asked: Asked = NOTHING
    began: float = field(default_factory=time.monotonic)
    connection: ClientConnection | None = None
    traces: list[Any] = field(default_factory=list[Any])
    sequences: list[Any] = field(default_factory=list[Any])
    wants_trace: bool = False
    failed: TercetError | None = None
    client_left: bool = False
    # What vLLM said of an error in the chat stream of which it makes the answer, in OpenAI's words.
    stream_error: Mapping[str, Any] | None = None
    # The tasks of sequences by vLLM's ids, prompts begun, how many sequences there may be, and by what they come in.
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    generations: int = 0
    most_sequences: int | None = None
    portions: InPortions | None = None
    preparation: Preparation | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    # On the fast path: what adds its sequence to vLLM, once vLLM has prepared it, and then the stream that serves it.
    add_request: Callable[[], Awaitable[Any]] | None = None
    stream: FastStream | None = None
    has_ended: bool = False
    # Whether the answer calls a tool, and who is told when it has ended.
    calls_tool: bool = False
    when_ended: list[Callable[[RequestContext], object]] = field(
        default_factory=list["Callable[[RequestContext], object]"]
    )

    def prepared(self) -> None:
        """Its first sequence runs, or none will: if its body is long, the client's next long body may begin."""
        if self.preparation is not None:
            self.preparation.end()

    def end(self) -> None:
        """The answer is sent, or its client has left: no sequence goes on, and none begins.

        vLLM aborts what it has added. It forgets a request whose task is cancelled while it is being added.
        """
        self.has_ended = True
        for tell in self.when_ended:
            tell(self)
        for task in [*self.running.values()]:
            task.cancel()


_current: ContextVar[RequestContext | None] = ContextVar("tercet_request", default=None)


def current() -> RequestContext:
    """Return the context of the HTTP request being served; an empty one outside of any."""
    return _current.get() or RequestContext()


@contextmanager
def serving(context: RequestContext) -> Generator[None]:
    """While entered, this is the HTTP request being served; it ends here."""
    token = _current.set(context)
    try:
        yield
    finally:
        context.end()
        _current.reset(token)
