"""The sequences of an engine: those that it generates, and its present work for each, so that an abort can end it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import msgspec

from tercet.aio import TaskSet
from tercet.engine.interface import EngineRequest, KeyedPrompt, RequestInCore
from tercet.logs import LoggedGeneration
from tercet.protocol import (
    Conflict,
    MoveProposal,
    Output,
    SequenceReport,
    TercetError,
    UnknownSequence,
    Usage,
)
from tercet.protocol.names import find_id
from tercet.protocol.wire import MoveCall, StreamDestination

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 0.25
"""Longest wait of a caller for a report, in seconds."""


class RouterLink(Protocol):
    """The engine's connection to one router, at ``address``: a ``RouterConnection`` of ``tercet.wire.streams``."""

    address: str

    # Calls ``stop`` if the sequence has to end early.
    def sender(self, number: int, position: int, stop: Callable[[], object]) -> OutputSender: ...


class OutputSender(Protocol):
    """The sender of one sequence's outputs to its router; ``open`` as long as the router wants them."""

    @property
    def connection(self) -> RouterLink: ...
    @property
    def open(self) -> bool: ...
    def send(self, output: Output) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def propose(self, proposal: MoveProposal) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class DecodingSequence:
    """A generation, and the resources to give back at its end."""

    seq_id: str
    number: int  # identifies it in the core
    request: EngineRequest
    tokens: list[int]  # the prompt and the output so far
    usage: Callable[[int], Usage]  # makes the first output's usage from the number of cached tokens
    on_end: Callable[[bool], None]  # called once, with whether it began
    model: str = ""  # for the log
    sender: OutputSender | None = field(default=None, init=False)  # of its outputs to a router, if it has one
    _logged: LoggedGeneration = field(init=False)
    _num_given: int = field(init=False)
    _status: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._num_given = len(self.tokens)
        self._logged = LoggedGeneration(self.seq_id, self.model, self._num_given)
        self.request.place = self._logged.place

    @property
    def age(self) -> float:
        return time.monotonic() - self._logged.began

    def counted(self, output: Output) -> Output:
        """Return the output for callers, with its usage if it is the first one; record its tokens."""
        self.tokens += output.token_ids
        if output.finished:
            self._status = int(HTTPStatus.OK)
        if self._begun:
            return output
        self._begun = True
        return msgspec.structs.replace(output, usage=self.usage(self.request.num_cached))

    def end(self) -> None:
        """Give back the sequence's resources; further calls do nothing."""
        if not self._over:
            self._over = True
            self._logged.over(self._status, len(self.tokens) - self._num_given)
            self.on_end(self._begun)

    @contextmanager
    def ended(self) -> Generator[None]:
        """End the sequence at the block's exit; an error that ends it becomes its status."""
        try:
            yield
        except TercetError as error:
            self._status = error.status
            raise
        finally:
            self.end()

    async def stream(self, connection: RouterLink, router: StreamDestination, position: int) -> None:
        """Send outputs to a router until the last one, or until it cancels; return once the engine has the request."""
        with ExitStack() as undo:
            undo.callback(self.end)
            sender = self.sender = connection.sender(router.number, position, self._stop)
            undo.callback(sender.close)
            await self.request.start(lambda found: self._deliver(sender, found))
            # From here on the engine's outputs end the sequence.
            undo.pop_all()

    def _deliver(self, sender: OutputSender, found: Output | TercetError) -> None:
        if self._over:
            return  # stopped; further outputs are dropped
        if isinstance(found, TercetError):
            self._status = found.status
            self.end()
            sender.fail(found)
            return
        output = self.counted(found)
        if output.finished:
            self.end()
        sender.send(output)

    def _stop(self) -> None:
        self.request.abort()
        self.end()


class SequenceTable:
    """A table of the sequences that an engine generates.

    It has their tokens, age and router. Only the core knows their blocks, and whether they run. ``ask`` polls the core,
    one poll at a time. A stuck core blocks no caller: then its last answer is reported.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[RequestInCore]]]) -> None:
        self._ask = ask
        self._sequences: dict[str, DecodingSequence] = {}  # by Tercet's request ids
        self._in_core: dict[str, RequestInCore] = {}  # by Tercet's request ids
        self._asking: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self.numbers = itertools.count(1)

    def add(self, sequence: DecodingSequence) -> None:
        self._sequences[sequence.request.request_id] = sequence

    def remove(self, sequence: DecodingSequence) -> None:
        self._sequences.pop(sequence.request.request_id, None)

    def beginning_with(self, prompt: KeyedPrompt) -> list[DecodingSequence]:
        """Return the sequences of whose first tokens the KV is also KV of ``prompt``."""
        tokens, end = prompt.tokens, len(prompt.tokens)
        # The last token distinguishes most sequences, so most need no comparison of all tokens.
        alike = (each for each in self._sequences.values() if each.tokens[end - 1 : end] == tokens[-1:])
        return [each for each in alike if not prompt.difference(each.request.prompt) and each.tokens[:end] == tokens]

    async def reports(self) -> list[SequenceReport]:
        """Return every sequence, in order of arrival; one that has not reached the core yet waits, without blocks."""
        if self._sequences:
            # One poll at a time: a stuck core would collect them.
            if self._asking is None or self._asking.done():
                self._asking = self._tasks.spawn(self._ask_core())
            await asyncio.wait({self._asking}, timeout=ANSWER_SECONDS)
        return [self._report(request_id, sequence) for request_id, sequence in self._sequences.items()]

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        propose_move({sequence.seq_id: sequence.sender for sequence in self._sequences.values()}, seq_id, call)

    def _report(self, request_id: str, sequence: DecodingSequence) -> SequenceReport:
        found, sender = self._in_core.get(request_id), sequence.sender
        return SequenceReport(
            seq_id=sequence.seq_id,
            tokens=len(sequence.tokens),
            blocks=found.blocks if found is not None else 0,
            running=found is not None and found.running,
            age=sequence.age,
            router=sender.connection.address if sender is not None else "",
        )

    async def _ask_core(self) -> None:
        try:
            answer = await self._ask()
        except Exception as error:  # an engine may raise anything for a core that has ended
            logger.debug("the engine's core cannot be polled for its sequences: %s", error)
            return
        self._in_core = {found.request_id: found for found in answer}


def propose_move(senders: Mapping[str, OutputSender | None], seq_id: str, call: MoveCall) -> None:
    """Send a router the proposal to move a sequence.

    ``senders`` has the sender of each sequence that the engine generates, by the engine's ids; None without a router.
    ``seq_id`` is one of these ids, or its client's.

    Raises :class:`~tercet.protocol.UnknownSequence` if the sequence is not here, and :class:`~tercet.protocol.Conflict`
    if no router runs it.
    """
    found = find_id(senders, seq_id)
    if found is None:
        raise UnknownSequence(f"seq_id: this engine does not generate {seq_id!r}", "seq_id")
    sender = senders[found]
    if sender is None or not sender.open:
        raise Conflict(f"seq_id: {found} is not run by a router, so it cannot be moved", "seq_id")
    sender.propose(MoveProposal(found, call.destination, call.reason))


class SequenceWork:
    """The running work of each sequence, at most one generation and any number of sends, and how to end it early."""

    def __init__(self) -> None:
        self._stops: dict[tuple[str, str | None], Callable[[], object]] = {}  # a send has its id, a generation None

    def __len__(self) -> int:
        return len(self._stops)

    def generates(self, seq_id: str) -> bool:
        return (seq_id, None) in self._stops

    def begin(self, seq_id: str, stop: Callable[[], object]) -> None:
        self._stops[seq_id, None] = stop

    def end(self, seq_id: str) -> None:
        del self._stops[seq_id, None]

    def stop(self, seq_id: str) -> bool:
        """End all work for a sequence early; return whether there was any."""
        found = [stop for (busy, _), stop in self._stops.items() if busy == seq_id]
        for stop in found:
            stop()
        return bool(found)

    @asynccontextmanager
    async def sending(self, seq_id: str, send_id: str) -> AsyncGenerator[None]:
        """End the current task by ``UnknownSequence`` if the sequence is stopped within this context."""
        # A timeout and not a cancellation of the task: the caller's own cancellation must stay what it is.
        until_aborted = asyncio.timeout(None)
        self._stops[seq_id, send_id] = lambda: until_aborted.expired() or until_aborted.reschedule(0)
        try:
            async with until_aborted:
                yield
        except TimeoutError:
            if not until_aborted.expired():
                raise
            raise UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id") from None
        finally:
            del self._stops[seq_id, send_id]
