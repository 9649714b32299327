"""A worker's end of its supervisor's line, and the middleware that takes what concerns all workers there."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import make_asgi_app

from tercet.protocol import EngineError, RequestTooLarge
from tercet.protocol.wire import PREFIX
from tercet.router import engine_metrics
from tercet.router.body import App, Message, Receive, Scope, Send
from tercet.router.entrance import refuse
from tercet.router.workers.messages import (
    Call,
    Granted,
    Open,
    Perform,
    Performed,
    Reply,
    Serving,
    ToWorker,
    Wish,
    messages_of,
    write,
)

ENGINES, METRICS = f"{PREFIX}/engines", ("/metrics", "/metrics/")
# What a PUT, POST or DELETE of these changes is every worker's; other calls are work for one of them.
COMMON = re.compile(rf"{PREFIX}/(program|scheduling|engines)(/|$)")
LONGEST_BODY = 1024 * 1024
_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class SupervisorLine:
    """Use as an async context manager; ``lost`` is called when the supervisor is gone."""

    def __init__(self, sock: socket.socket, lost: Callable[[], None]) -> None:
        self._sock = sock
        self._lost = lost
        self._numbers = itertools.count()
        self._wishes: dict[int, asyncio.Future[list[Reply]]] = {}
        self._opened = asyncio.Event()
        self._answer: Callable[[Call], Awaitable[Reply]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SupervisorLine:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        self._spawn(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._writer.close()

    async def serve(self, answer: Callable[[Call], Awaitable[Reply]]) -> None:
        """Answer calls with ``answer`` from now on; returns once this worker knows of every change there was."""
        self._answer = answer
        write(self._writer, Serving())
        await self._opened.wait()

    async def settle(self, call: Call) -> list[Reply]:
        """Have all workers answer a call; this one's reply comes first."""
        number = next(self._numbers)
        self._wishes[number] = asyncio.get_running_loop().create_future()
        try:
            write(self._writer, Wish(number, call))
            return await self._wishes[number]
        finally:
            del self._wishes[number]

    async def _listen(self) -> None:
        async for message in messages_of(self._reader, _decoder):
            match message:
                case Open():
                    self._opened.set()
                case Granted(number, replies):
                    waiting = self._wishes.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(replies)
                case Perform(number, call):
                    self._spawn(self._perform(number, call))
        self._lost()

    async def _perform(self, number: int, call: Call) -> None:
        if self._answer is not None:
            write(self._writer, Performed(number, await self._answer(call)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class Shared:
    """What a worker has in common with others: the line, the port, and each one's number of connections.

    ``replaces`` says that the fleet was served before: an engine that does not answer now is no reason to wait.
    """

    line: SupervisorLine
    listening: socket.socket
    loads: memoryview[int]
    index: int
    replaces: bool


class Sharing:
    """ASGI middleware: changes of programs, schedulings and engines are made by all workers, or by none.

    The list of engines is everybody's, too: sequences in flight are those of all workers. So are the metrics.
    """

    def __init__(self, app: App, line: SupervisorLine) -> None:
        self._app = app
        self._line = line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] in METRICS and scope["method"] == "GET":
            await make_asgi_app(engine_metrics.of_all_workers())(scope, receive, send)
            return
        if scope["type"] != "http" or not concerns_all(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            await refuse(RequestTooLarge(f"the body is longer than {LONGEST_BODY} bytes"), send)
            return
        replies = await self._line.settle(Call(scope["method"], scope["path"], body))
        reply = together(replies) if scope["method"] == "GET" else replies[0]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reply.body)).encode())]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})


def concerns_all(method: str, path: str) -> bool:
    """Whether a request is to be answered by all workers."""
    return COMMON.match(path) is not None and (Call(method, path).changes or (method == "GET" and path == ENGINES))


async def _read(receive: Receive) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            return None
        if not message.get("more_body"):
            return body


def together(replies: list[Reply]) -> Reply:
    """Lists of engines as one, with the sequences of all; an engine is reachable if some worker reaches it."""
    own, *others = (msgspec.json.decode(reply.body) for reply in replies)
    if replies[0].is_error:
        return replies[0]
    for other in others:
        by_name = {engine["name"]: engine for engine in other}
        for engine in own:
            found = by_name.get(engine["name"], {})
            engine["in_flight"] += found.get("in_flight", 0)
            engine["reachable"] |= found.get("reachable", False)
    return Reply(replies[0].status, msgspec.json.encode(own))


def answering(app: App, state: Any) -> Callable[[Call], Awaitable[Reply]]:
    """What ``app`` answers to a call, past the entrance: whoever asked has passed one already."""

    async def answer(call: Call) -> Reply:
        status, body = 500, b""

        async def send(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        async def receive() -> Message:
            return {"type": "http.request", "body": call.body, "more_body": False}

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(call.body)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": call.method, "scheme": "http", "path": call.path, "raw_path": call.path.encode(),
            "query_string": b"", "root_path": "", "headers": headers, "client": None, "server": None, "state": {},
            "app": state,
        }  # fmt: skip
        try:
            await app(scope, receive, send)
        except Exception as error:
            failure = EngineError(f"the front door failed: {type(error).__name__}: {error}")
            return Reply(failure.status, msgspec.json.encode(failure.to_wire()))
        return Reply(status, body)

    return answer
