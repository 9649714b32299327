"""Traces of all router processes that share a state: each process answers the others over a local socket.

A question is one line of JSON; the answer has traces, or exemplars. The sockets have abstract names instead of files,
since the state may be on a file system that is slow or shared with other machines, whose processes are not asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from tercet.protocol import TercetError
from tercet.protocol.names import kept_name
from tercet.protocol.wire import UNREADABLE
from tercet.router.observe.exemplars import WORKERS_VARIABLE, Exemplars, KeptExemplar
from tercet.router.observe.request_traces import RequestTrace, RequestTraces

T = TypeVar("T")
logger = logging.getLogger("tercet.router")
ANSWER_SECONDS = 3.0
LONGEST_QUESTION = 4096
LONGEST_ANSWER = 64 * 1024 * 1024
MOST_LISTED = 100
_PEER = struct.Struct("3i")


class TraceQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question for traces: those with an ``id``, or a number of ``newest`` or ``slowest`` ones.

    ``watch`` asks for future frames of the page instead; ``exemplars`` asks for the exemplars of a worker that counts
    in that folder.
    """

    id: str = ""
    newest: int = 0
    slowest: int = 0
    watch: bool = False
    exemplars: str = ""

    def answer(self, traces: RequestTraces) -> list[RequestTrace]:
        """Return the traces of this process that match."""
        if self.id:
            return traces.called(kept_name(self.id))
        return [*traces.newest(self.newest), *traces.slowest(self.slowest)]

    def best(self, found: Sequence[RequestTrace]) -> list[RequestTrace]:
        """Return the traces that match best, of those that all processes ``found``."""
        if self.slowest:
            return sorted(found, key=lambda trace: -trace.seconds)[: self.slowest]
        newest = sorted(found, key=lambda trace: -trace.at)
        return newest if self.id else newest[: self.newest]


_traces = msgspec.json.Decoder(list[RequestTrace])
_exemplars = msgspec.json.Decoder(list[KeptExemplar])
_questions = msgspec.json.Decoder(TraceQuestion)


class SharedTraces:
    """The traces and exemplars of this process, which is called ``name``, and those of the other processes.

    ``others`` returns their names. ``frames`` yields the frames of this process's page, one per line, for another
    process that shows a page.
    """

    def __init__(
        self, traces: RequestTraces, name: str = "", others: Callable[[], Awaitable[Sequence[str]]] | None = None,
        exemplars: Exemplars | None = None,
    ) -> None:  # fmt: skip
        self.own = traces
        self._exemplars = exemplars or Exemplars()
        self._name = name
        self._others = others
        self.frames: Callable[[], AsyncGenerator[bytes]] | None = None

    @asynccontextmanager
    async def answering(self) -> AsyncGenerator[None]:
        """Answer the other processes while entered."""
        if not self._name:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, _address(self._name), limit=LONGEST_QUESTION)
        try:
            yield
        finally:
            server.close()

    async def find(self, question: TraceQuestion) -> list[RequestTrace]:
        """Return the traces of all processes that match; log and leave out a process that does not answer in time."""
        return question.best([*question.answer(self.own), *await self._of_others(question, _traces)])

    async def exemplars(self) -> list[KeptExemplar]:
        """Return the exemplars of this process and of the other workers of its router."""
        folder = os.environ.get(WORKERS_VARIABLE, "")
        others = await self._of_others(TraceQuestion(exemplars=folder), _exemplars) if folder else []
        return [*self._exemplars.kept(), *others]

    async def others(self) -> Sequence[str]:
        """Return the names of the other live processes."""
        return () if self._others is None else await self._others()

    async def frames_of(self, name: str) -> AsyncGenerator[bytes]:
        """Yield the frames of another process, one per line, until it ends; raise ``OSError`` or ``ValueError``."""
        reader, writer = await _connected(name)
        try:
            _require_own(writer)
            writer.write(msgspec.json.encode(TraceQuestion(watch=True)) + b"\n")
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    async def _of_others(self, question: TraceQuestion, decoder: msgspec.json.Decoder[list[T]]) -> list[T]:
        found = await asyncio.gather(*(self._ask(name, question, decoder) for name in await self.others()))
        return [each for answer in found for each in answer]

    def _answer_to(self, question: TraceQuestion) -> list[RequestTrace] | list[KeptExemplar]:
        if question.exemplars:
            return self._exemplars.kept() if question.exemplars == os.environ.get(WORKERS_VARIABLE) else []
        return question.answer(self.own)

    async def _ask(self, name: str, question: TraceQuestion, decoder: msgspec.json.Decoder[list[T]]) -> list[T]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await _connected(name)
                try:
                    _require_own(writer)
                    writer.write(msgspec.json.encode(question) + b"\n")
                    return decoder.decode(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError, *UNREADABLE) as error:
            logger.warning("traces: another router process does not answer: %s", error or type(error).__name__)
            return []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, ValueError, TimeoutError, TercetError, *UNREADABLE):
                async with asyncio.timeout(ANSWER_SECONDS):
                    _require_own(writer)
                    question = _questions.decode(await reader.readline())
                    if not question.watch:
                        writer.write(msgspec.json.encode(self._answer_to(question)) + b"\n")
                        await writer.drain()
                        return
                await self._tell_frames(writer)
        finally:
            writer.close()

    async def _tell_frames(self, writer: asyncio.StreamWriter) -> None:
        """Send frames until this process ends or the other process stops reading."""
        if self.frames is None:
            return
        async with aclosing(self.frames()) as frames:
            async for line in frames:
                writer.write(line)
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()


async def _connected(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to another process; raise ``OSError``.

    uvloop, on which routers run, cannot connect to abstract names, but accepts a connected socket.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(_address(name))  # a local connection succeeds or fails at once
        return await asyncio.open_unix_connection(sock=sock, limit=LONGEST_ANSWER)
    except BaseException:
        sock.close()
        raise


def _address(name: str) -> str:
    return f"\0tercet-traces-{os.getuid()}-{name}"


def _require_own(writer: asyncio.StreamWriter) -> None:
    """Raise ``PermissionError`` unless the other end is a process of this user: abstract names have no owner."""
    sock: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (os.getuid(), 0):
        raise PermissionError("the process at the other end belongs to another user")
