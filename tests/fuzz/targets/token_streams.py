"""Token streams: what an engine says to a router, and a router to an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tercet.protocol import EngineLoad, MoveProposal, NoSpace, Output, OutputStream, TokenLogprob, Usage
from tercet.protocol.wire import StartGenerateCall, StreamDestination
from tercet.wire.client.http_engine import EngineConnection
from tercet.wire.client.stream_listener import _Arrival
from tercet.wire.streams import RouterConnection, StreamHello
from tercet.wire.streams.wire_format import (
    LENGTH_BYTES,
    PROTOCOL,
    OutputBatch,
    StreamCommand,
    TokenDelta,
    delta_of,
    failed_delta,
    frame_of,
)
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case, MessagePack, pieces
from tests.fuzz.targets.kv_transfer import random_of
from tests.longest_wait import LONGEST_WAIT_S

KEY = "k" * 32
FRAMES = MessagePack(LENGTH_BYTES, lambda body: len(body).to_bytes(LENGTH_BYTES, "big") + body)
LOAD = EngineLoad(waiting=1, running=2, kv_usage=0.25, tokens=30, step_time=0.02)


class Wire:
    """The transport of a connection that is in this process."""

    def __init__(self) -> None:
        self.written = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


class Sequence:
    """One sequence at the router; remembers what came."""

    def __init__(self, position: int) -> None:
        self.outputs: list[Output] = []
        self.errors: list[BaseException] = []
        self.stream = OutputStream(OutputStream.until_over)
        self.stream.subscribe(self)
        self.position = position

    def on_start(self, stream: OutputStream) -> None: ...

    def on_output(self, output: Output) -> None:
        self.outputs.append(output)

    def on_end(self, error: BaseException | None) -> None: ...

    def require_one_end(self) -> None:
        assert self.stream.over, "a sequence on a connection that is closed waits"
        finished = [output.finished for output in self.outputs]
        assert not any(finished[:-1]), "there were outputs after the last one"
        assert all(token >= 0 for output in self.outputs for token in output.token_ids)


class RouterRoom:
    """A router, and an engine that says what a case holds; sequences 1 to 4 are open, from 0 and from 3 on."""

    def __init__(self) -> None:
        self._loads = 0

    def _load(self, load: EngineLoad) -> None:
        self._loads += 1
        assert min(load.waiting, load.running) >= 0
        assert load.kv_usage >= 0

    def _propose(self, proposal: MoveProposal) -> None:
        assert all(isinstance(said, str) for said in (proposal.seq_id, proposal.destination, proposal.reason))

    async def run(self, case: Case) -> Outcome:
        engine = EngineConnection("e", itertools.count(1), self._load, self._propose)
        engine.key = KEY
        sequences = [Sequence(position) for position in (0, 0, 3, 3)]
        arrivals: dict[Any, None] = {}
        arrival = _Arrival(lambda key: engine if key == KEY else None, arrivals)
        wire: Any = Wire()
        arrival.connection_made(wire)
        taken = [engine.sequence(each.position, each.stream) for each in sequences]
        for each in taken:
            each.__enter__()
        for data in (data for item in case for data in pieces(random_of(case), item)):
            if wire.closed:
                break
            arrival.data_received(data)
        happened = "closed" if wire.closed else "open"
        arrival.connection_lost(None)
        engine.drop("over")
        for each in sequences:
            each.require_one_end()
        for each in taken:
            each.__exit__(None, None, None)
        assert engine.inbox.sequences == {}
        assert not arrivals
        ends = "".join(str(len(each.outputs)) if each.outputs else "-" for each in sequences)
        return Outcome(len(case), f"{happened} {ends} {arrival._why[:40]}")


@asynccontextmanager
async def _router() -> AsyncGenerator[RouterRoom]:
    yield RouterRoom()


def _batch_cases() -> list[Case]:
    hello = frame_of(StreamHello(PROTOCOL, KEY, "e", "1"))
    probabilities = ((TokenLogprob(5, -0.5, 1), TokenLogprob(6, -1.5, 2)),)
    steps = [
        OutputBatch((delta_of(1, 0, Output((5,), usage=Usage(cached=3, computed=1))), TokenDelta(3, 3, (9, 9))), LOAD),
        OutputBatch((TokenDelta(1, 1, (6, 7)), delta_of(2, 0, Output((5,), logprobs=probabilities))), None),
        OutputBatch(
            (delta_of(1, 3, Output((8,), "stop", "word")), failed_delta(4, 3, NoSpace("full", "prompt"))), LOAD
        ),
        OutputBatch((), LOAD, (MoveProposal("s", "d", "why"), MoveProposal("s.1", "e", "why not"))),
        OutputBatch((delta_of(2, 1, Output((), "length")), delta_of(3, 5, Output((1,), "length"))), LOAD),
    ]
    frames = [frame_of(step) for step in steps]
    return [[hello, *frames], [hello, *frames[:2], frames[0]], [hello + b"".join(frames)], [frames[0]], [hello, hello]]


class EngineRoom:
    """An engine, and a router that says what a case holds; every third call of it is refused."""

    def __init__(self) -> None:
        self._calls = 0
        self._stopped = 0

    def _stop(self) -> None:
        self._stopped += 1

    async def _start(self, call: StartGenerateCall, link: RouterConnection, number: int) -> None:
        self._calls += 1
        if self._calls % 3 == 0:
            raise NoSpace("full")
        sender = link.sender(number, len(call.output), self._stop)
        sender.send(Output((1, 2)))
        if self._calls % 2:
            sender.send(Output((3,), "length"))

    async def run(self, case: Case) -> Outcome:
        lost: list[None] = []
        self._calls = self._stopped = 0
        connection = RouterConnection("f:1", lambda: LOAD, self._start, lambda: lost.append(None))
        wire: Any = Wire()
        connection.connection_made(wire)
        for data in (data for item in case for data in pieces(random_of(case), item)):
            if wire.closed:
                break
            connection.data_received(data)
        for _ in range(4):
            await asyncio.sleep(0)
        happened = f"{'closed' if wire.closed else 'open'} {self._calls} {wire.written}"
        connection.connection_lost(None)
        assert lost == [None]
        assert await connection._starting.wait(LONGEST_WAIT_S)
        assert not connection.senders
        assert len(connection._cancelled) <= 4096
        return Outcome(len(case), f"{happened} {self._stopped}")


@asynccontextmanager
async def _engine() -> AsyncGenerator[EngineRoom]:
    yield EngineRoom()


def _command_cases() -> list[Case]:
    def call(number: int, **fields: Any) -> msgspec.Raw:
        router = StreamDestination(address="127.0.0.1:1", key=KEY, number=number)
        started = StartGenerateCall(
            prompt=[1, 2], seq_id=f"s{number}", router=router, sampling_params={"seed": 3}, **fields
        )
        return msgspec.Raw(msgspec.msgpack.encode(started))

    commands = [
        StreamCommand(),
        StreamCommand(starts=(call(1), call(2, output=[4, 5]))),
        StreamCommand(cancelled=(1, 7)),
        StreamCommand(cancelled=(2,), starts=(call(7), call(8))),
    ]
    frames = [frame_of(command) for command in commands]
    return [frames, [frames[0], frames[2], frames[1]], [b"".join(frames)], [frames[1], frames[1], frames[2]]]


TARGETS = (
    Target("engine_to_router", _batch_cases, FRAMES, _router),
    Target("router_to_engine", _command_cases, FRAMES, _engine),
)
